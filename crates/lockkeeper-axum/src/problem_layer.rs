//! The format of rejections, set once for the whole app.

use std::sync::Arc;
use std::task::{Context, Poll};

use axum::BoxError;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Request, StatusCode};
use axum::response::Response;
use lockkeeper_core::{BoxFuture, Keeper};
use tower_layer::Layer;
use tower_service::Service;

use crate::problem::{Format, Rejection};

/// Sets the format of all rejections of an app: those of [`LockLayer`](crate::LockLayer) and
/// [`FenceLayer`](crate::FenceLayer), and every [`LockError`](crate::LockError) of a handler.
///
/// Put it around them, usually around the whole router. It also adds `Retry-After` to the `LockError` of a handler: the
/// remaining lease, if the store knows it. Reading it takes half a second at most; if that fails, the header is
/// omitted. The value is an estimate: a holder may renew its lease, or release the lock earlier.
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
    format: Format,
}

impl ProblemLayer {
    /// Creates a layer that reads holders and leases from the store of a keeper.
    pub fn new(keeper: impl Into<Keeper>) -> Self {
        Self { keeper: keeper.into(), format: Format::default() }
    }

    /// Sets the status for a lock that another client holds (default: 409 Conflict).
    #[must_use]
    pub fn not_acquired(mut self, status: StatusCode) -> Self {
        self.format.not_acquired = status;
        self
    }

    /// Adds the label of the holder to the response. It may disclose the names of hosts and programs.
    #[must_use]
    pub fn show_holder(mut self) -> Self {
        self.format.show_holder = true;
        self
    }
}

impl<S> Layer<S> for ProblemLayer {
    type Service = ProblemService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        ProblemService { inner, layer: Arc::new(self.clone()) }
    }
}

/// The service of a [`ProblemLayer`]: writes the rejections of the inner service.
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
        let (response, layer) = (self.inner.call(request), self.layer.clone());
        Box::pin(async move {
            let (mut head, body) = response.await?.into_parts();
            let Some(mut rejection) = head.extensions.remove::<Rejection>() else {
                return Ok(Response::from_parts(head, Body::new(body)));
            };
            drop(body);
            rejection.inspect(&layer.keeper, None).await;
            let body = rejection.write(&mut head, &layer.format);
            Ok(Response::from_parts(head, body))
        })
    }
}
