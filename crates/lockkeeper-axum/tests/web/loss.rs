//! Lost locks, disconnected clients, handlers that panic, stores that fail.

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

use crate::common::{
    Gate, keeper, post, rejected, request, secs, start_request, wait_for_waiters, wait_until_free,
};

fn app(keeper: &Keeper, gate: &Gate) -> Router {
    app_with_ttl(keeper, gate, secs(600))
}

fn app_with_ttl(keeper: &Keeper, gate: &Gate, ttl: Duration) -> Router {
    let lock = LockLayer::new(keeper.clone()).key("order:{id}").ttl(ttl).wait(secs(600));
    Router::new()
        .route("/{id}", post_route(async |State(gate): State<Gate>| gate.pass().await))
        .route_layer(lock)
        .with_state(gate.clone())
}

fn faulty() -> (Keeper, Faults) {
    let (store, faults) = Faulty::new(Memory::new());
    (Keeper::new(store), faults)
}

#[tokio::test]
async fn a_handler_whose_lock_is_lost_is_cancelled_before_the_response() {
    let (keeper, gate) = (keeper(), Gate::new());
    let app = app(&keeper, &gate);
    let working = start_request(&app, "/1", &gate).await;
    keeper.inspect().unwrap().break_lock("order:1").await.unwrap();
    let answer = soon("the response", working).await.unwrap();
    assert_eq!(gate.running(), 0);
    rejected(answer, StatusCode::SERVICE_UNAVAILABLE, "lost").await;
    wait_until_free(&keeper).await;
}

/// Like a handler that waits for a body that never arrives.
#[tokio::test(start_paused = true)]
async fn a_request_holds_its_lock_for_max_hold_at_most() {
    let (keeper, gate) = (keeper().max_hold(secs(9)), Gate::new());
    let app = app_with_ttl(&keeper, &gate, secs(3));
    let slow = start_request(&app, "/1", &gate).await;
    let slow = soon("the response", slow).await.unwrap();
    rejected(slow, StatusCode::SERVICE_UNAVAILABLE, "lost").await;
    assert_eq!(gate.running(), 0);
    wait_until_free(&keeper).await;
}

#[tokio::test(start_paused = true)]
async fn a_handler_is_cancelled_before_the_lease_ends_if_the_store_does_not_answer() {
    let (keeper, faults) = faulty();
    let gate = Gate::new();
    let app = app_with_ttl(&keeper, &gate, secs(10));
    let working = start_request(&app, "/1", &gate).await;
    faults.everything(Fault::Hangs);
    let answer = tokio::time::timeout(secs(10), working).await.unwrap().unwrap();
    assert_eq!(gate.running(), 0);
    rejected(answer, StatusCode::SERVICE_UNAVAILABLE, "lost").await;
}

/// Like a process that was stopped past its lease: the clock has passed the deadline, and the request is polled before
/// the task that reports the loss.
#[tokio::test(start_paused = true)]
async fn a_handler_is_not_polled_after_the_deadline_even_if_it_took_the_guard() {
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
        // `advance` sets the clock in its first poll, and yields to other tasks after that.
        assert!(poll_once(pin!(tokio::time::advance(secs(30)))).await.is_pending());
        let answer = call.await.unwrap();
        assert_eq!(steps.load(Ordering::SeqCst), 1, "takes_guard: {takes_guard}");
        rejected(answer, StatusCode::SERVICE_UNAVAILABLE, "lost").await;
    }
}

async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_response_that_was_made_after_the_loss_is_discarded() {
    let keeper = keeper();
    let lock = LockLayer::new(keeper.clone()).key("order:{id}");
    // The handler never awaits, so it cannot be cancelled.
    let compute = async |held: Held| {
        let (lost, start) = (held.lost_token(), Instant::now());
        tokio::task::block_in_place(|| {
            while !lost.is_cancelled() {
                assert!(start.elapsed() < secs(30), "the token was not cancelled");
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
    let answer = soon("the response", sent).await.unwrap();
    rejected(answer, StatusCode::SERVICE_UNAVAILABLE, "lost").await;
}

#[tokio::test]
async fn a_dropped_request_releases_its_lock_or_leaves_the_queue() {
    let (keeper, gate) = (keeper(), Gate::new());
    let app = app(&keeper, &gate);
    let working = start_request(&app, "/1", &gate).await;
    let waiting = tokio::spawn({
        let app = app.clone();
        async move { post(&app, "/1").await }
    });
    wait_for_waiters(&keeper, "order:1", 1).await;
    waiting.abort();
    wait_for_waiters(&keeper, "order:1", 0).await;
    working.abort();
    gate.wait_until_idle().await;
    wait_until_free(&keeper).await;
    assert_eq!(gate.started(), 1);
}

#[tokio::test]
async fn a_held_that_outlives_its_request_does_not_keep_the_lock() {
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
        eventually("the handler runs", async || kept.lock().unwrap().is_some()).await;
        if dropped {
            sent.abort();
        } else {
            notify.notify_one();
            assert_eq!(soon("the response", sent).await.unwrap().status(), StatusCode::OK);
        }
        wait_until_free(&keeper).await;
        assert!(kept.lock().unwrap().as_ref().unwrap().take().is_none());
    }
}

#[tokio::test]
async fn a_handler_that_panics_releases_its_lock() {
    let keeper = keeper();
    let lock = LockLayer::new(keeper.clone()).key("order:{id}");
    let panics = async |_: Held| -> &'static str { panic!("on purpose") };
    let app: Router = Router::new().route("/{id}", post_route(panics)).route_layer(lock);
    let sent = tokio::spawn(async move { post(&app, "/1").await });
    assert!(soon("the panic", sent).await.unwrap_err().is_panic());
    wait_until_free(&keeper).await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_or_hangs_is_503_and_the_handler_is_not_called() {
    for fault in [Fault::Refused, Fault::Hangs, Fault::LostAnswer] {
        let (keeper, faults) = faulty();
        let gate = Gate::new();
        let lock = LockLayer::new(keeper.clone()).key("order:{id}");
        let app: Router = Router::new()
            .route("/{id}", post_route(async |State(gate): State<Gate>| gate.pass().await))
            .route_layer(lock)
            .with_state(gate.clone());
        faults.everything(fault);
        let problem =
            rejected(post(&app, "/1").await, StatusCode::SERVICE_UNAVAILABLE, "unavailable").await;
        assert_eq!(problem["lock"], "order:1");
        assert!(!problem.to_string().contains("connection"), "{problem}");
        assert_eq!(gate.started(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_that_hangs_delays_the_response_by_a_second_at_most() {
    let (keeper, faults) = faulty();
    let gate = Gate::new();
    let app = app(&keeper, &gate);
    faults.always(Op::Release, Fault::Hangs);
    gate.open(1);
    let start = tokio::time::Instant::now();
    assert_eq!(post(&app, "/1").await.status(), StatusCode::OK);
    assert!(start.elapsed() < secs(2));
    // The release continues in the background.
    faults.none();
    wait_until_free(&keeper).await;
}

#[tokio::test]
async fn a_release_that_fails_does_not_change_the_response() {
    let (keeper, faults) = faulty();
    let gate = Gate::new();
    let app = app(&keeper, &gate);
    faults.once(Op::Release, Fault::Refused);
    gate.open(1);
    assert_eq!(post(&app, "/1").await.status(), StatusCode::OK);
    wait_until_free(&keeper).await;
}

#[tokio::test]
async fn a_closed_or_misconfigured_keeper_is_not_disclosed_to_the_client() {
    let (keeper, gate) = (keeper(), Gate::new());
    let lock = LockLayer::new(keeper.clone()).ttl(secs(0)).key("order:{id}");
    let wrong: Router = Router::new().route("/{id}", post_route(async || "x")).route_layer(lock);
    let problem =
        rejected(post(&wrong, "/1").await, StatusCode::INTERNAL_SERVER_ERROR, "internal").await;
    assert!(!problem.to_string().contains("ttl"), "{problem}");
    let app = app(&keeper, &gate);
    keeper.close().await;
    rejected(post(&app, "/1").await, StatusCode::SERVICE_UNAVAILABLE, "unavailable").await;
}
