//! Locks that are lost, clients that go away, handlers that panic, stores that are down.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::{Method, StatusCode};
use axum::routing::post as post_route;
use lockkeeper::{Keeper, Memory};
use lockkeeper_axum::{Held, LockLayer};
use lockkeeper_testkit::wait::{eventually, soon};
use lockkeeper_testkit::{Fault, Faults, Faulty, Op};
use tokio::sync::Notify;
use tower::ServiceExt as _;

use crate::common::{Room, at_work, keeper, nothing_left, post, queued, refused, request, secs};

fn app(keeper: &Keeper, room: &Room) -> Router {
    app_with_ttl(keeper, room, secs(600))
}

fn app_with_ttl(keeper: &Keeper, room: &Room, ttl: Duration) -> Router {
    let lock = LockLayer::new(keeper.clone()).key("order:{id}").ttl(ttl).wait(secs(600));
    Router::new()
        .route("/{id}", post_route(async |State(room): State<Room>| room.stay().await))
        .route_layer(lock)
        .with_state(room.clone())
}

fn faulty() -> (Keeper, Faults) {
    let (store, faults) = Faulty::new(Memory::new());
    (Keeper::new(store), faults)
}

#[tokio::test]
async fn a_handler_whose_lock_is_lost_is_cancelled_before_the_answer() {
    let (keeper, room) = (keeper(), Room::new());
    let app = app(&keeper, &room);
    let working = at_work(&app, "/1", &room).await;
    keeper.inspect().unwrap().break_lock("order:1").await.unwrap();
    let answer = soon("the answer", working).await.unwrap();
    assert_eq!(room.inside(), 0);
    refused(answer, StatusCode::SERVICE_UNAVAILABLE, "lost").await;
    nothing_left(&keeper).await;
}

/// As one does that waits for a body which never comes.
#[tokio::test(start_paused = true)]
async fn a_request_has_its_lock_for_no_longer_than_the_keeper_allows() {
    let (keeper, room) = (keeper().max_hold(secs(9)), Room::new());
    let app = app_with_ttl(&keeper, &room, secs(3));
    let slow = at_work(&app, "/1", &room).await;
    let slow = soon("the answer", slow).await.unwrap();
    refused(slow, StatusCode::SERVICE_UNAVAILABLE, "lost").await;
    assert_eq!(room.inside(), 0);
    nothing_left(&keeper).await;
}

#[tokio::test(start_paused = true)]
async fn a_handler_is_cancelled_when_the_store_falls_silent_and_the_lease_ends() {
    let (keeper, faults) = faulty();
    let room = Room::new();
    let app = app_with_ttl(&keeper, &room, secs(10));
    let working = at_work(&app, "/1", &room).await;
    faults.everything(Fault::Hangs);
    let answer = tokio::time::timeout(secs(10), working).await.unwrap().unwrap();
    assert_eq!(room.inside(), 0);
    refused(answer, StatusCode::SERVICE_UNAVAILABLE, "lost").await;
}

/// As a process that was stopped past its lease: the clock has passed the deadline, and the request is polled before
/// the task that reports the loss.
#[tokio::test(start_paused = true)]
async fn no_step_of_a_handler_runs_after_the_deadline_even_if_it_took_the_guard() {
    for takes_guard in [false, true] {
        let (keeper, steps) = (keeper(), Arc::new(AtomicUsize::new(0)));
        let counted = steps.clone();
        let lock = LockLayer::new(keeper.clone()).key("order:{id}").ttl(secs(30));
        let handler = async move |held: Held| {
            let _guard = takes_guard.then(|| held.take());
            poll_fn(|_| {
                counted.fetch_add(1, Ordering::SeqCst);
                Poll::<()>::Pending
            })
            .await;
        };
        let app: Router = Router::new().route("/{id}", post_route(handler)).route_layer(lock);
        let mut call = pin!(app.oneshot(request(Method::POST, "/1")));
        assert!(poll_once(call.as_mut()).await.is_pending());
        assert_eq!(steps.load(Ordering::SeqCst), 1);
        // `advance` sets the clock in its first poll, and lets other tasks run after that.
        assert!(poll_once(pin!(tokio::time::advance(secs(30)))).await.is_pending());
        let answer = call.await.unwrap();
        assert_eq!(steps.load(Ordering::SeqCst), 1, "takes_guard: {takes_guard}");
        refused(answer, StatusCode::SERVICE_UNAVAILABLE, "lost").await;
    }
}

async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_answer_that_was_made_after_the_loss_is_not_given() {
    let keeper = keeper();
    let lock = LockLayer::new(keeper.clone()).key("order:{id}");
    // It computes something and never awaits, so it cannot be cancelled.
    let compute = async |held: Held| {
        let (lost, start) = (held.lost_token(), Instant::now());
        tokio::task::block_in_place(|| {
            while !lost.is_cancelled() {
                assert!(start.elapsed() < secs(30), "not told of the loss");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        "done"
    };
    let app: Router = Router::new().route("/{id}", post_route(compute)).route_layer(lock);
    let sent = tokio::spawn(async move { post(&app, "/1").await });
    let inspect = keeper.inspect().unwrap();
    eventually("the lock is held and broken", async || {
        inspect.break_lock("order:1").await.unwrap() == 1
    })
    .await;
    let answer = soon("the answer", sent).await.unwrap();
    refused(answer, StatusCode::SERVICE_UNAVAILABLE, "lost").await;
}

#[tokio::test]
async fn a_request_that_is_dropped_gives_its_lock_back() {
    let (keeper, room) = (keeper(), Room::new());
    let app = app(&keeper, &room);
    let working = at_work(&app, "/1", &room).await;
    let waiting = tokio::spawn({
        let app = app.clone();
        async move { post(&app, "/1").await }
    });
    queued(&keeper, "order:1", 1).await;
    waiting.abort();
    queued(&keeper, "order:1", 0).await;
    working.abort();
    room.is_empty().await;
    nothing_left(&keeper).await;
    assert_eq!(room.entered(), 1);
}

#[tokio::test]
async fn a_handle_that_outlives_its_request_does_not_keep_the_lock() {
    let keeper = keeper();
    let (kept, notify) = (Arc::new(std::sync::Mutex::new(None)), Arc::new(Notify::new()));
    let lock = LockLayer::new(keeper.clone()).key("order:{id}");
    let app: Router = Router::new()
        .route(
            "/{id}",
            post_route({
                let (kept, notify) = (kept.clone(), notify.clone());
                move |held: Held| async move {
                    *kept.lock().unwrap() = Some(held);
                    notify.notified().await;
                }
            }),
        )
        .route_layer(lock);
    for dropped in [false, true] {
        *kept.lock().unwrap() = None;
        let sent = tokio::spawn({
            let app = app.clone();
            async move { post(&app, "/1").await }
        });
        eventually("the handler is at work", async || kept.lock().unwrap().is_some()).await;
        if dropped {
            sent.abort();
        } else {
            notify.notify_one();
            assert_eq!(soon("the answer", sent).await.unwrap().status(), StatusCode::OK);
        }
        nothing_left(&keeper).await;
        assert!(kept.lock().unwrap().as_ref().unwrap().take().is_none());
    }
}

#[tokio::test]
async fn a_handler_that_panics_gives_its_lock_back() {
    let keeper = keeper();
    let lock = LockLayer::new(keeper.clone()).key("order:{id}");
    let panics = async |_: Held| -> &'static str { panic!("on purpose") };
    let app: Router = Router::new().route("/{id}", post_route(panics)).route_layer(lock);
    let sent = tokio::spawn(async move { post(&app, "/1").await });
    assert!(soon("the panic", sent).await.unwrap_err().is_panic());
    nothing_left(&keeper).await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_down_or_silent_is_answered_with_503_and_the_handler_not_called() {
    for fault in [Fault::Refused, Fault::Hangs, Fault::LostAnswer] {
        let (keeper, faults) = faulty();
        let room = Room::new();
        let lock = LockLayer::new(keeper.clone()).key("order:{id}");
        let app: Router = Router::new()
            .route("/{id}", post_route(async |State(room): State<Room>| room.stay().await))
            .route_layer(lock)
            .with_state(room.clone());
        faults.everything(fault);
        let problem =
            refused(post(&app, "/1").await, StatusCode::SERVICE_UNAVAILABLE, "unavailable").await;
        assert_eq!(problem["lock"], "order:1");
        assert!(!problem.to_string().contains("connection"), "{problem}");
        assert_eq!(room.entered(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_that_hangs_does_not_keep_the_answer_back_for_long() {
    let (keeper, faults) = faulty();
    let room = Room::new();
    let app = app(&keeper, &room);
    faults.always(Op::Release, Fault::Hangs);
    room.let_out(1);
    let start = tokio::time::Instant::now();
    assert_eq!(post(&app, "/1").await.status(), StatusCode::OK);
    assert!(start.elapsed() < secs(2));
    // It goes on in the background.
    faults.none();
    nothing_left(&keeper).await;
}

#[tokio::test]
async fn a_release_that_fails_does_not_spoil_the_answer() {
    let (keeper, faults) = faulty();
    let room = Room::new();
    let app = app(&keeper, &room);
    faults.once(Op::Release, Fault::Refused);
    room.let_out(1);
    assert_eq!(post(&app, "/1").await.status(), StatusCode::OK);
    nothing_left(&keeper).await;
}

#[tokio::test]
async fn a_keeper_that_is_closed_or_set_up_wrongly_is_not_explained_to_the_client() {
    let (keeper, room) = (keeper(), Room::new());
    let lock = LockLayer::new(keeper.clone()).ttl(secs(0)).key("order:{id}");
    let wrong: Router = Router::new().route("/{id}", post_route(async || "x")).route_layer(lock);
    let problem =
        refused(post(&wrong, "/1").await, StatusCode::INTERNAL_SERVER_ERROR, "internal").await;
    assert!(!problem.to_string().contains("ttl"), "{problem}");
    let app = app(&keeper, &room);
    keeper.close().await;
    refused(post(&app, "/1").await, StatusCode::SERVICE_UNAVAILABLE, "unavailable").await;
}
