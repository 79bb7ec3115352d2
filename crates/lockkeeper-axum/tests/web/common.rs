//! What the tests have in common.

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
    soon("an answer", app.clone().oneshot(request)).await.unwrap()
}

pub(crate) async fn post(app: &Router, path: &str) -> Response {
    send(app, request(Method::POST, path)).await
}

pub(crate) async fn text(response: Response) -> String {
    let bytes = soon("a body", to_bytes(response.into_body(), usize::MAX)).await.unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A header, as text.
pub(crate) fn header<'a>(response: &'a Response, name: &str) -> Option<&'a str> {
    response.headers().get(name).map(|value| value.to_str().unwrap())
}

/// The body of a refusal, which says the same as its head.
pub(crate) async fn problem(response: Response) -> Value {
    assert_eq!(header(&response, "content-type"), Some("application/problem+json"));
    let status = response.status();
    let problem: Value = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!(problem["status"], status.as_u16());
    assert_eq!(problem["title"], status.canonical_reason().unwrap());
    assert!(problem["detail"].is_string());
    problem
}

/// Sees that an answer is a refusal of this kind, and returns its body.
pub(crate) async fn refused(response: Response, status: StatusCode, reason: &str) -> Value {
    assert_eq!(response.status(), status);
    let problem = problem(response).await;
    assert_eq!(problem["reason"], reason);
    problem
}

/// A place that handlers enter and may not leave before they are let out.
#[derive(Clone)]
pub(crate) struct Room(Arc<Counts>);

struct Counts {
    entered: AtomicUsize,
    inside: AtomicUsize,
    most: AtomicUsize,
    door: Semaphore,
}

impl Room {
    pub(crate) fn new() -> Self {
        let zero = || AtomicUsize::new(0);
        let (entered, inside, most, door) = (zero(), zero(), zero(), Semaphore::new(0));
        Self(Arc::new(Counts { entered, inside, most, door }))
    }

    /// What a handler does.
    pub(crate) async fn stay(&self) {
        let _visit = Visit::new(self);
        // Even if the door is open, others have the time to come in.
        tokio::task::yield_now().await;
        self.0.door.acquire().await.unwrap().forget();
    }

    /// Lets so many out.
    pub(crate) fn let_out(&self, visitors: usize) {
        self.0.door.add_permits(visitors);
    }

    pub(crate) fn inside(&self) -> usize {
        self.0.inside.load(Ordering::SeqCst)
    }

    /// How many have ever been inside.
    pub(crate) fn entered(&self) -> usize {
        self.0.entered.load(Ordering::SeqCst)
    }

    /// How many have been inside at the same time.
    pub(crate) fn most(&self) -> usize {
        self.0.most.load(Ordering::SeqCst)
    }

    pub(crate) async fn is_entered(&self) {
        eventually("somebody is inside", async || self.inside() > 0).await;
    }

    pub(crate) async fn is_empty(&self) {
        eventually("nobody is inside", async || self.inside() == 0).await;
    }
}

/// Ends also if the handler is cancelled.
struct Visit(Room);

impl Visit {
    fn new(room: &Room) -> Self {
        let inside = room.0.inside.fetch_add(1, Ordering::SeqCst) + 1;
        room.0.most.fetch_max(inside, Ordering::SeqCst);
        room.0.entered.fetch_add(1, Ordering::SeqCst);
        Self(room.clone())
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.0.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Sends a request in a task of its own, and waits until its handler is at work.
pub(crate) async fn at_work(app: &Router, path: &str, room: &Room) -> JoinHandle<Response> {
    let (app, path) = (app.clone(), path.to_owned());
    let working = tokio::spawn(async move { post(&app, &path).await });
    room.is_entered().await;
    working
}

/// Waits until so many wait for a lock.
pub(crate) async fn queued(keeper: &Keeper, name: &str, count: usize) {
    let inspect = keeper.inspect().unwrap();
    eventually("a place in the queue", async || {
        let infos = inspect.show(name).await.unwrap();
        infos.iter().map(|info| info.waiters.len()).sum::<usize>() == count
    })
    .await;
}

/// Waits until the store knows nothing of any lock.
pub(crate) async fn nothing_left(keeper: &Keeper) {
    let inspect = keeper.inspect().unwrap();
    eventually("nothing is left", async || inspect.list("").await.unwrap().is_empty()).await;
}

pub(crate) const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
