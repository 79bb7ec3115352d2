//! Fences, on the side of what a lock protects.

use std::sync::Arc;
use std::task::{Context, Poll};

use axum::BoxError;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, Request};
use axum::response::{IntoResponse as _, Response};
use lockkeeper_core::{BoxFuture, Fence, FenceCheck, FenceRegister};
use tower_layer::Layer;
use tower_service::Service;

use crate::problem::{Reason, Refusal};
use crate::target::{Key, Methods, NoKey, Target, target_setters};

/// The header that carries a fence, as a decimal number.
pub const X_FENCE: HeaderName = HeaderName::from_static("x-fence");

/// Refuses requests whose fence is lower than the highest seen for the same resource.
///
/// It stands before the service that the holders of a lock write to. They send their fence in the header
/// [`X-Fence`](X_FENCE); one that was paused past its lease, and does not know that it has lost the lock, is found out by
/// it.
///
/// | request | answer |
/// |---|---|
/// | a fence as high as the highest, or higher | the service's; the fence is in the request's extensions |
/// | a lower one | 412 Precondition Failed: unlike with a 409, to try again is no use |
/// | none, two, or one that is no number from 1 to 2^63 - 1 | 400 |
/// | the register does not answer | 503 |
///
/// In none but the first case is the service called. Requests that need no fence, such as reads, are let
/// through with [`methods`](Self::methods).
///
/// # What it does not
///
/// Between the check and what the service then writes, a request with a higher fence may pass and write: the
/// service must do one after the other, or check again where it writes (`docs/guides/fencing.md`). And it
/// believes whoever sends the header: let it come only from those that may write.
///
/// # Examples
///
/// ```
/// use axum::{Extension, Router, extract::Path, http::Method, routing::put};
/// use lockkeeper::{Fence, FenceRegister};
/// use lockkeeper_axum::{FenceLayer, X_FENCE};
///
/// async fn write(Path(order_id): Path<u64>, Extension(fence): Extension<Fence>) -> String {
///     format!("{order_id} written under fence {fence}")
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let fences = FenceLayer::new(FenceRegister::in_memory())
///     .key_from(|Path(order_id): Path<u64>| format!("order:{order_id}"))
///     .methods([Method::PUT]);
/// let app: Router = Router::new()
///     .route("/orders/{order_id}", put(write).get(async || "read by anyone"))
///     .route_layer(fences);
/// # use axum::{body::Body, http::{Request, StatusCode}};
/// # use tower::ServiceExt as _;
/// # for (fence, status) in [(7, StatusCode::OK), (6, StatusCode::PRECONDITION_FAILED)] {
/// #     let request = Request::put("/orders/42").header(X_FENCE, fence).body(Body::empty())?;
/// #     assert_eq!(app.clone().oneshot(request).await?.status(), status);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a layer without a key is none"]
pub struct FenceLayer<K = NoKey> {
    register: FenceRegister,
    target: Target<K>,
}

impl FenceLayer {
    /// A layer that asks this register. It needs a key to be one.
    pub fn new(register: FenceRegister) -> Self {
        Self { register, target: Target { key: NoKey, methods: Methods::default() } }
    }
}

impl<K> FenceLayer<K> {
    target_setters!(FenceLayer);

    fn with_key(self, key: Key) -> FenceLayer<Key> {
        let target = Target { key, methods: self.target.methods };
        FenceLayer { register: self.register, target }
    }
}

impl FenceLayer<Key> {
    /// Lets a request pass, or returns the answer that says why not.
    async fn check(&self, head: &mut Parts) -> Result<(), Response> {
        let Some(name) = self.target.name(head).await? else { return Ok(()) };
        self.check_fence(head, name).await.map_err(Refusal::into_response)
    }

    async fn check_fence(&self, head: &mut Parts, name: String) -> Result<(), Refusal> {
        let Some(fence) = fence_of(&head.headers) else {
            return Err(Refusal::new(Reason::BadFence, Some(name)));
        };
        match self.register.check(name.as_str(), fence).await {
            Ok(FenceCheck::Passed) => {
                head.extensions.insert(fence);
                Ok(())
            }
            Ok(FenceCheck::Stale { highest }) => {
                tracing::warn!(name, %fence, %highest, "request refused: its fence is stale");
                Err(Refusal::new(Reason::StaleFence, Some(name)))
            }
            Err(error) => Err(Refusal::from_error(&error)),
        }
    }
}

/// The fence in the headers, if there is one, and only one.
fn fence_of(headers: &HeaderMap) -> Option<Fence> {
    let mut values = headers.get_all(X_FENCE).iter();
    let value = values.next()?.to_str().ok()?;
    // `parse` would take a sign.
    let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number || values.next().is_some() {
        return None;
    }
    Fence::new(value.parse().ok()?)
}

impl<S> Layer<S> for FenceLayer<Key> {
    type Service = FenceService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        FenceService { inner, layer: Arc::new(self.clone()) }
    }
}

/// A service that is called only with fences that are not stale. Made by a [`FenceLayer`].
#[derive(Debug, Clone)]
pub struct FenceService<S> {
    inner: S,
    layer: Arc<FenceLayer<Key>>,
}

impl<S, B, R> Service<Request<B>> for FenceService<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
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
        // The one that was found ready is the one to call.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        let layer = self.layer.clone();
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            if let Err(answer) = layer.check(&mut head).await {
                return Ok(answer);
            }
            let answer = inner.call(Request::from_parts(head, body)).await?;
            Ok(answer.map(Body::new))
        })
    }
}
