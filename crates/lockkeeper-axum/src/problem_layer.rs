//! How refusals are worded, once for the whole app.

use std::sync::Arc;
use std::task::{Context, Poll};

use axum::BoxError;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Request, StatusCode};
use axum::response::Response;
use lockkeeper_core::{BoxFuture, Keeper};
use tower_layer::Layer;
use tower_service::Service;

use crate::problem::{Refusal, Wording};

/// Sets, once for the app, how refusals are worded: those of [`LockLayer`](crate::LockLayer) and
/// [`FenceLayer`](crate::FenceLayer), and every [`LockError`](crate::LockError) of a handler.
///
/// Put it outside of them, so on the whole router. It also adds `Retry-After` to a handler's own `LockError`,
/// after a look into the store: the remaining lease, where it is known. The look takes half a second at
/// most, and if it fails the answer does without. A holder that lives renews its lease, and one that is
/// done gives the lock back earlier: it is an estimate.
///
/// # Examples
///
/// ```
/// use axum::{Router, http::StatusCode, routing::post};
/// use lockkeeper::{Keeper, Memory};
/// use lockkeeper_axum::{LockLayer, ProblemLayer};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let keeper = Keeper::new(Memory::new());
/// let app: Router = Router::new()
///     .route("/orders/{order_id}/pay", post(async || "paid"))
///     .route_layer(LockLayer::new(keeper.clone()).key("order:{order_id}"))
///     .layer(ProblemLayer::new(keeper).not_acquired(StatusCode::LOCKED).show_holder());
/// # let _ = app;
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct ProblemLayer {
    keeper: Keeper,
    wording: Wording,
}

impl ProblemLayer {
    /// A layer that looks into the store of this keeper.
    pub fn new(keeper: impl Into<Keeper>) -> Self {
        Self { keeper: keeper.into(), wording: Wording::default() }
    }

    /// Sets the status for "others hold the lock" (409 Conflict if not set).
    #[must_use]
    pub fn not_acquired(mut self, status: StatusCode) -> Self {
        self.wording.not_acquired = status;
        self
    }

    /// Tells the client the label of whoever holds the lock. It may give away names of hosts and programs.
    #[must_use]
    pub fn show_holder(mut self) -> Self {
        self.wording.holder = true;
        self
    }
}

impl<S> Layer<S> for ProblemLayer {
    type Service = ProblemService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        ProblemService { inner, layer: Arc::new(self.clone()) }
    }
}

/// A service whose refusals are worded by a [`ProblemLayer`].
#[derive(Debug, Clone)]
pub struct ProblemService<S> {
    inner: S,
    layer: Arc<ProblemLayer>,
}

impl<S, B, R> Service<Request<B>> for ProblemService<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
    R: HttpBody<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    type Response = Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (answer, layer) = (self.inner.call(request), self.layer.clone());
        Box::pin(async move {
            let (mut head, body) = answer.await?.into_parts();
            let Some(mut refusal) = head.extensions.remove::<Refusal>() else {
                return Ok(Response::from_parts(head, Body::new(body)));
            };
            drop(body);
            refusal.look(&layer.keeper, None).await;
            let body = refusal.write(&mut head, &layer.wording);
            Ok(Response::from_parts(head, body))
        })
    }
}
