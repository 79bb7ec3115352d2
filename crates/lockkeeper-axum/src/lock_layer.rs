//! A lock around a service.

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

use crate::held::{Cover, Held};
use crate::problem::Refusal;
use crate::target::{Key, Methods, NoKey, Target, target_setters};

/// How long an answer is kept back for the store to confirm that the lock was given back. After that it is
/// asked in the background.
const RELEASE_WITHIN: Duration = Duration::from_secs(1);

/// Takes a lock for each request, and calls the service while it is held.
///
/// # What is covered
///
/// The lock is taken before the service is called and given back when it has answered, **before the answer
/// goes out**: whoever has the answer can send the next request without being refused by his own lock.
/// (If the store does not confirm it within a second, it is given back in the background.) So it covers the
/// handler, and reading the request's body in it; it does *not* cover a response's body that is streamed after the
/// handler returned, nor a connection that was upgraded. For those, [take the guard](Held::take) and
/// move it into the stream.
///
/// # What happens
///
/// - **Others hold the lock** for longer than [`wait`](Self::wait): 409 Conflict, with `Retry-After` where
///   the store knows how long their lease still is. The service is not called. A
///   [`ProblemLayer`](crate::ProblemLayer) changes the status.
/// - **The store does not answer**: 503. The service is not called.
/// - **The lock is lost** before the service has answered: its future is dropped, and the answer is 503. What it had
///   done until then is done. No step of it begins after the lease has ended, as with [`Guard::while_held`], also if
///   the process was stopped meanwhile.
/// - **The client goes away**, and the server drops the request: so is the service's future, and the lock is given
///   back in the background. A request that waits leaves the queue.
/// - **The service panics**: the lock is given back in the background.
///
/// Layers can be nested, for several locks; put them in the same order everywhere, or requests will wait
/// for each other. Two with the same key refuse every request, as nobody may hold a lock twice.
///
/// # What it does not
///
/// A process that is stopped in the middle of a step completes that step without the lock: send the
/// [fence](Held::fence) along with what is written, and let the other side check it, as
/// [`FenceLayer`](crate::FenceLayer) does.
///
/// And it sets no limit to how long a request may take. A client that sends its body slowly, to a handler that reads it,
/// has the lock for all that time, and renewed: put a timeout around the service, or set
/// [`max_hold`](Keeper::max_hold) of the keeper, after which the lock counts as lost.
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
/// Around a service of another make, with a key from the request:
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
#[must_use = "a layer without a key is none"]
pub struct LockLayer<K = NoKey> {
    keeper: Keeper,
    target: Target<K>,
    wait: Duration,
    ttl: Option<Duration>,
}

impl LockLayer {
    /// A layer that takes its locks from this keeper. It needs a key to be one.
    pub fn new(keeper: impl Into<Keeper>) -> Self {
        let target = Target { key: NoKey, methods: Methods::default() };
        Self { keeper: keeper.into(), target, wait: Duration::ZERO, ttl: None }
    }
}

impl<K> LockLayer<K> {
    target_setters!(LockLayer);

    /// Sets how long a request waits for others that hold the lock (not at all if not set, whatever the keeper's
    /// `max_wait`).
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Sets how long the lock lasts in the store without renewal (as the keeper says if not set). While the
    /// service is at work it is renewed.
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
    async fn acquire(&self, name: String, outer: Option<&Held>) -> Result<Guard, Refusal> {
        let mutex = self.keeper.mutex(name.as_str()).max_wait(self.wait);
        let mutex = if let Some(ttl) = self.ttl { mutex.ttl(ttl) } else { mutex };
        match mutex.lock().await {
            Ok(guard) => Ok(guard),
            Err(error) => {
                let mut refusal = Refusal::from_error(&error);
                refusal.look(&self.keeper, Some(Kind::Lock)).await;
                let mut outer = std::iter::successors(outer, |held| held.outer());
                if error.kind() == ErrorKind::TimedOut && outer.any(|held| held.name() == name) {
                    tracing::error!(name, "two layers with the same key are around one service");
                }
                Err(refusal)
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

/// A service that is called while a lock is held. Made by a [`LockLayer`].
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
        // The one that was found ready is the one to call.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        let layer = self.layer.clone();
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            let name = match layer.target.name(&mut head).await {
                Ok(Some(name)) => name,
                Ok(None) => {
                    let answer = inner.call(Request::from_parts(head, body)).await?;
                    return Ok(answer.map(Body::new));
                }
                Err(answer) => return Ok(answer),
            };
            let outer = head.extensions.remove::<Held>();
            let guard = match layer.acquire(name, outer.as_ref()).await {
                Ok(guard) => guard,
                Err(refusal) => return Ok(refusal.into_response()),
            };
            // Before what it covers, so that it is dropped after it.
            let cover = Cover(Held::new(guard, outer));
            head.extensions.insert(cover.0.clone());
            let work = async move { inner.call(Request::from_parts(head, body)).await };
            match give_back(&cover.0, cover.0.while_held(work).await).await {
                Ok(answer) => Ok(answer?.map(Body::new)),
                Err(error) => Ok(Refusal::from_error(&error).into_response()),
            }
        })
    }
}

/// Releases the lock, unless the service took the guard. An answer that was made after the lock was lost is discarded.
async fn give_back<T>(held: &Held, answer: Result<T, Error>) -> Result<T, Error> {
    let guard = held.take();
    let answer = answer?;
    if let Some(guard) = guard {
        // Dropped, it goes on in the background.
        match tokio::time::timeout(RELEASE_WITHIN, guard.release()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "answered, release failed"),
            Err(_) => tracing::warn!(name = held.name(), "answered, release not confirmed yet"),
        }
    }
    Ok(answer)
}
