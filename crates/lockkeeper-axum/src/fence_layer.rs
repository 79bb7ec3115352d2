//! Fence checks in the service that a lock protects.

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

use crate::problem::{Reason, Rejection};
use crate::target::{Key, Methods, NoKey, Target, target_setters};

/// The header that carries a fence, as a decimal number.
pub const X_FENCE: HeaderName = HeaderName::from_static("x-fence");

/// Rejects requests whose fence is lower than the highest seen for the same resource.
///
/// Put it in front of the service that the holders of a lock write to. Holders send their fence in the header
/// [`X-Fence`](X_FENCE). A holder that was paused past its lease, and does not know that it has lost the lock, is
/// rejected by its stale fence.
///
/// | request | response |
/// |---|---|
/// | the highest fence so far, or a higher one | that of the service; the fence is in the request's extensions |
/// | a lower fence | 412 Precondition Failed; unlike after a 409, a retry cannot succeed |
/// | no fence, more than one, or not a number from 1 to 2^63 - 1 | 400 Bad Request |
/// | the register does not answer | 503 Service Unavailable |
///
/// The service is called only in the first case. Use [`methods`](Self::methods) to exempt requests that need no fence,
/// such as reads.
///
/// # What it does not guarantee
///
/// Another request with a higher fence may pass and write between the check and the write of the service. The service
/// must process requests one after the other, or check the fence again where it writes (`docs/guides/fencing.md`). The
/// layer does not authenticate: accept the header only from clients that may write.
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
///     .route("/orders/{order_id}", put(write).get(async || "no fence needed"))
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
#[must_use = "set a key to get a layer"]
pub struct FenceLayer<K = NoKey> {
    register: FenceRegister,
    target: Target<K>,
}

impl FenceLayer {
    /// Creates a layer that checks fences with a register. It becomes a [`Layer`] when a key is set.
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
    /// Accepts a request, or returns the response that rejects it.
    async fn check(&self, head: &mut Parts) -> Result<(), Response> {
        let Some(name) = self.target.name(head).await? else { return Ok(()) };
        self.check_fence(head, name).await.map_err(Rejection::into_response)
    }

    async fn check_fence(&self, head: &mut Parts, name: String) -> Result<(), Rejection> {
        let Some(fence) = fence_of(&head.headers) else {
            return Err(Rejection::new(Reason::BadFence, Some(name)));
        };
        match self.register.check(name.as_str(), fence).await {
            Ok(FenceCheck::Passed) => {
                head.extensions.insert(fence);
                Ok(())
            }
            Ok(FenceCheck::Stale { highest }) => {
                tracing::warn!(name, %fence, %highest, "request rejected: its fence is stale");
                Err(Rejection::new(Reason::StaleFence, Some(name)))
            }
            Err(error) => Err(Rejection::from_error(&error)),
        }
    }
}

/// Returns the fence in the headers, if there is exactly one.
fn fence_of(headers: &HeaderMap) -> Option<Fence> {
    let mut values = headers.get_all(X_FENCE).iter();
    let value = values.next()?.to_str().ok()?;
    // `parse` would accept a sign.
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

/// The service of a [`FenceLayer`]: calls the inner service only for fences that are not stale.
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
        // Calls the instance that is ready, not its clone: see `tower_service::Service`, "Be careful when cloning inner
        // services".
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        let layer = self.layer.clone();
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            if let Err(response) = layer.check(&mut head).await {
                return Ok(response);
            }
            let response = inner.call(Request::from_parts(head, body)).await?;
            Ok(response.map(Body::new))
        })
    }
}
