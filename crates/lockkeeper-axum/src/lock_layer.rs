//! Locks around a service.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::BoxError;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::Request;
use axum::response::{IntoResponse as _, Response};
use lockkeeper_core::{BoxFuture, Error, ErrorKind, Guard, Keeper, Kind};
use tower_layer::Layer;
use tower_service::Service;

use crate::held::{Held, ReleaseOnDrop};
use crate::problem::Rejection;
use crate::target::{Key, Methods, NoKey, Target, target_setters};

/// How long a response waits for the store to confirm the release. After that, the release continues in the background.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

/// Acquires a lock for each request, and calls the service while the lock is held.
///
/// # What the lock covers
///
/// The lock is acquired before the service is called and released when the service has responded, **before the response
/// is sent**: a client that has the response can send its next request without a conflict with its own lock. (If the
/// store does not confirm the release within a second, it continues in the background.) The lock covers the handler,
/// including its reading of the request body. It does *not* cover a response body that is streamed after the handler
/// has returned, or an upgraded connection. For those, [take the guard](Held::take) and move it into the stream.
///
/// # What happens if
///
/// - **another client holds the lock** for longer than [`wait`](Self::wait): 409 Conflict, with `Retry-After` if the
///   store knows the remaining lease. The service is not called. A [`ProblemLayer`](crate::ProblemLayer) changes the
///   status.
/// - **the store does not answer**: 503 Service Unavailable. The service is not called.
/// - **the lock is lost** before the service has responded: its future is dropped, and the response is 503. Work that
///   is already done is not undone. The future is not polled after the lease has ended, as with [`Guard::while_held`],
///   even if the process was stopped meanwhile.
/// - **the client disconnects**, and the server drops the request: the service's future is dropped, and the lock is
///   released in the background. A waiting request leaves the queue.
/// - **the service panics**: the lock is released in the background.
///
/// Layers can be nested for several locks. Nest them in the same order everywhere, or requests can deadlock until their
/// `wait` ends. Two layers with the same key reject every request, because locks are not re-entrant.
///
/// # What it does not guarantee
///
/// A process that is stopped in the middle of a poll completes that poll without the lock. Send the
/// [fence](Held::fence) with each write, and check it there, as [`FenceLayer`](crate::FenceLayer) does.
///
/// The layer does not limit the duration of a request. A client that sends its body slowly holds the lock, with
/// renewals, while the handler reads the body. Put a timeout around the service, or set [`max_hold`](Keeper::max_hold)
/// of the keeper, after which the lock counts as lost.
///
/// # Examples
///
/// ```
/// use axum::{Router, extract::Path, routing::post};
/// use lockkeeper::{Keeper, Memory};
/// use lockkeeper_axum::{Held, LockLayer};
/// use std::time::Duration;
///
/// async fn pay(Path(order_id): Path<u64>, held: Held) -> String {
///     format!("{order_id} paid under fence {:?}", held.fence())
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let keeper = Keeper::new(Memory::new());
/// let lock = LockLayer::new(keeper.clone())
///     .key_from(|Path(order_id): Path<u64>| format!("order:{order_id}"))
///     .ttl(Duration::from_secs(15))
///     .wait(Duration::from_secs(2));
/// let app: Router = Router::new().route("/orders/{order_id}/pay", post(pay)).route_layer(lock);
/// # use axum::{body::Body, http::{Request, StatusCode}};
/// # use tower::ServiceExt as _;
/// # let request = Request::post("/orders/42/pay").body(Body::empty())?;
/// # assert_eq!(app.oneshot(request).await?.status(), StatusCode::OK);
/// # Ok(())
/// # }
/// ```
///
/// Around another tower service, with a key from the request:
///
/// ```
/// use axum::http::{Request, Response};
/// use lockkeeper::{Keeper, Memory};
/// use lockkeeper_axum::LockLayer;
/// use tower::{Layer as _, ServiceExt as _, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let lock = LockLayer::new(Keeper::new(Memory::new()))
///     .key_fn(|request| Some(request.headers.get("x-account")?.to_str().ok()?.to_owned()));
/// let service = service_fn(async |_: Request<String>| {
///     Ok::<_, std::io::Error>(Response::new("done".to_owned()))
/// });
/// let request = Request::builder().header("x-account", "7").body(String::new())?;
/// let response = lock.layer(service).oneshot(request).await?;
/// assert_eq!(response.status(), 200);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "set a key to get a layer"]
pub struct LockLayer<K = NoKey> {
    keeper: Keeper,
    target: Target<K>,
    wait: Duration,
    ttl: Option<Duration>,
}

impl LockLayer {
    /// Creates a layer that acquires locks from a keeper. It becomes a [`Layer`] when a key is set.
    pub fn new(keeper: impl Into<Keeper>) -> Self {
        let target = Target { key: NoKey, methods: Methods::default() };
        Self { keeper: keeper.into(), target, wait: Duration::ZERO, ttl: None }
    }
}

impl<K> LockLayer<K> {
    target_setters!(LockLayer);

    /// Sets how long a request waits for the lock (default: zero, regardless of the keeper's `max_wait`).
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Sets the TTL of the lock (default: that of the keeper). The lock is renewed while the service runs.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    fn with_key(self, key: Key) -> LockLayer<Key> {
        let target = Target { key, methods: self.target.methods };
        LockLayer { keeper: self.keeper, target, wait: self.wait, ttl: self.ttl }
    }
}

impl LockLayer<Key> {
    async fn acquire(&self, name: String, outer: Option<&Held>) -> Result<Guard, Rejection> {
        let mutex = self.keeper.mutex(name.as_str()).max_wait(self.wait);
        let mutex = if let Some(ttl) = self.ttl { mutex.ttl(ttl) } else { mutex };
        match mutex.lock().await {
            Ok(guard) => Ok(guard),
            Err(error) => {
                let mut rejection = Rejection::from_error(&error);
                rejection.inspect(&self.keeper, Some(Kind::Lock)).await;
                let mut outer = std::iter::successors(outer, |held| held.outer());
                if error.kind() == ErrorKind::TimedOut && outer.any(|held| held.name() == name) {
                    tracing::error!(
                        name,
                        "two nested layers have the same key: remove one of them"
                    );
                }
                Err(rejection)
            }
        }
    }
}

impl<S> Layer<S> for LockLayer<Key> {
    type Service = LockService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        LockService { inner, layer: Arc::new(self.clone()) }
    }
}

/// The service of a [`LockLayer`]: calls the inner service while a lock is held.
#[derive(Debug, Clone)]
pub struct LockService<S> {
    inner: S,
    layer: Arc<LockLayer<Key>>,
}

impl<S, B, R> Service<Request<B>> for LockService<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
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
            let name = match layer.target.name(&mut head).await {
                Ok(Some(name)) => name,
                Ok(None) => {
                    let response = inner.call(Request::from_parts(head, body)).await?;
                    return Ok(response.map(Body::new));
                }
                Err(response) => return Ok(response),
            };
            let outer = head.extensions.remove::<Held>();
            let guard = match layer.acquire(name, outer.as_ref()).await {
                Ok(guard) => guard,
                Err(rejection) => return Ok(rejection.into_response()),
            };
            // Declared before the work, so that it is dropped after it.
            let hold = ReleaseOnDrop(Held::new(guard, outer));
            head.extensions.insert(hold.0.clone());
            let work = async move { inner.call(Request::from_parts(head, body)).await };
            match release(&hold.0, hold.0.while_held(work).await).await {
                Ok(response) => Ok(response?.map(Body::new)),
                Err(error) => Ok(Rejection::from_error(&error).into_response()),
            }
        })
    }
}

/// Releases the lock, unless the service took the guard. Discards the response if the lock was lost before it.
async fn release<T>(held: &Held, response: Result<T, Error>) -> Result<T, Error> {
    let guard = held.take();
    let response = response?;
    if let Some(guard) = guard {
        // If it times out, the dropped release continues in the background.
        match tokio::time::timeout(RELEASE_TIMEOUT, guard.release()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "request served, but the release failed"),
            Err(_) => {
                tracing::warn!(name = held.name(), "request served, release not confirmed in time");
            }
        }
    }
    Ok(response)
}
