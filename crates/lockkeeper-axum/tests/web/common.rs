//! Helpers of the tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, StatusCode};
use axum::response::Response;
use lockkeeper::{Keeper, Memory};
use lockkeeper_testkit::wait::{eventually, soon};
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tower::ServiceExt as _;

pub(crate) fn keeper() -> Keeper {
    Keeper::new(Memory::new()).label("the first")
}

pub(crate) fn request(method: Method, path: &str) -> Request<Body> {
    Request::builder().method(method).uri(path).body(Body::empty()).unwrap()
}

pub(crate) async fn send(app: &Router, request: Request<Body>) -> Response {
    soon("a response", app.clone().oneshot(request)).await.unwrap()
}

pub(crate) async fn post(app: &Router, path: &str) -> Response {
    send(app, request(Method::POST, path)).await
}

pub(crate) async fn text(response: Response) -> String {
    let bytes = soon("a body", to_bytes(response.into_body(), usize::MAX)).await.unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Returns a header as text.
pub(crate) fn header<'a>(response: &'a Response, name: &str) -> Option<&'a str> {
    response.headers().get(name).map(|value| value.to_str().unwrap())
}

/// Returns the body of a rejection, after comparing it with the status.
pub(crate) async fn problem(response: Response) -> Value {
    assert_eq!(header(&response, "content-type"), Some("application/problem+json"));
    let status = response.status();
    let problem: Value = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!(problem["status"], status.as_u16());
    assert_eq!(problem["title"], status.canonical_reason().unwrap());
    assert!(problem["detail"].is_string());
    problem
}

/// Asserts that a response is a rejection with this status and reason, and returns its body.
pub(crate) async fn rejected(response: Response, status: StatusCode, reason: &str) -> Value {
    assert_eq!(response.status(), status);
    let problem = problem(response).await;
    assert_eq!(problem["reason"], reason);
    problem
}

/// Counts the handlers that run, and blocks them until they are released.
#[derive(Clone)]
pub(crate) struct Gate(Arc<Counts>);

struct Counts {
    started: AtomicUsize,
    running: AtomicUsize,
    max_running: AtomicUsize,
    permits: Semaphore,
}

impl Gate {
    pub(crate) fn new() -> Self {
        let zero = || AtomicUsize::new(0);
        let (started, running, max_running) = (zero(), zero(), zero());
        Self(Arc::new(Counts { started, running, max_running, permits: Semaphore::new(0) }))
    }

    /// The work of a handler.
    pub(crate) async fn pass(&self) {
        let _running = RunningHandler::new(self);
        // Gives other handlers the time to start, even if a permit is available.
        tokio::task::yield_now().await;
        self.0.permits.acquire().await.unwrap().forget();
    }

    /// Lets this many handlers return.
    pub(crate) fn open(&self, handlers: usize) {
        self.0.permits.add_permits(handlers);
    }

    pub(crate) fn running(&self) -> usize {
        self.0.running.load(Ordering::SeqCst)
    }

    /// Returns how many handlers have started.
    pub(crate) fn started(&self) -> usize {
        self.0.started.load(Ordering::SeqCst)
    }

    /// Returns the highest number of handlers that ran at the same time.
    pub(crate) fn max_running(&self) -> usize {
        self.0.max_running.load(Ordering::SeqCst)
    }

    pub(crate) async fn wait_until_running(&self) {
        eventually("a handler runs", async || self.running() > 0).await;
    }

    pub(crate) async fn wait_until_idle(&self) {
        eventually("no handler runs", async || self.running() == 0).await;
    }
}

/// Counts a handler until it is dropped, which includes a cancelled one.
struct RunningHandler(Gate);

impl RunningHandler {
    fn new(gate: &Gate) -> Self {
        let running = gate.0.running.fetch_add(1, Ordering::SeqCst) + 1;
        gate.0.max_running.fetch_max(running, Ordering::SeqCst);
        gate.0.started.fetch_add(1, Ordering::SeqCst);
        Self(gate.clone())
    }
}

impl Drop for RunningHandler {
    fn drop(&mut self) {
        self.0.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Sends a request in a new task, and waits until its handler runs.
pub(crate) async fn start_request(app: &Router, path: &str, gate: &Gate) -> JoinHandle<Response> {
    let (app, path) = (app.clone(), path.to_owned());
    let working = tokio::spawn(async move { post(&app, &path).await });
    gate.wait_until_running().await;
    working
}

/// Waits until a lock has this many waiters.
pub(crate) async fn wait_for_waiters(keeper: &Keeper, name: &str, count: usize) {
    let inspect = keeper.inspect().unwrap();
    eventually("the number of waiters", async || {
        let infos = inspect.show(name).await.unwrap();
        infos.iter().map(|info| info.waiters.len()).sum::<usize>() == count
    })
    .await;
}

/// Waits until the store has no locks.
pub(crate) async fn wait_until_free(keeper: &Keeper) {
    let inspect = keeper.inspect().unwrap();
    eventually("the store has no locks", async || inspect.list("").await.unwrap().is_empty()).await;
}

pub(crate) const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
