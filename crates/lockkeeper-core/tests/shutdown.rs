//! Closing a keeper, and the end of its runtime, with holders and waiters.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{keeper_on, millis, pair, secs, spawn_lock, threads, until_a_waiter_is_queued};
use lockkeeper_core::{ErrorKind, Keeper, LossReason, Memory, ReleaseOutcome, State};
use lockkeeper_testkit::{Fault, Op};
use tokio::runtime::Builder;
use tokio::time::{Instant, sleep, timeout};

#[tokio::test(start_paused = true)]
async fn when_close_returns_waiters_have_left_the_queue() {
    let pair = pair();
    let _holder = pair.healthy.mutex("a").lock().await.unwrap();
    let waiter = spawn_lock(pair.faulty.mutex("a"));
    pair.until_queued("a", 1).await;
    pair.faulty.close().await;
    assert_eq!(pair.waiters("a").await, 0, "still queued when close returned");
    assert_eq!(waiter.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    let error = pair.faulty.clone().mutex("b").lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[test]
fn a_runtime_dropped_by_a_panic_is_reported_as_a_shutdown_and_not_as_a_store_panic() {
    let mut kept = None;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        kept = Some(runtime.block_on(async {
            let guard = Keeper::new(Memory::new()).mutex("a").lock().await.unwrap();
            // Until the guard has its background task.
            sleep(millis(50)).await;
            guard
        }));
        panic!("on purpose");
    }));
    assert!(panicked.is_err());
    assert_eq!(kept.unwrap().loss_reason(), Some(LossReason::RuntimeShutdown));
}

#[test]
fn a_waiter_of_a_closed_keeper_gets_no_grant_when_its_runtime_ends() {
    let memory = Memory::new();
    let own = Builder::new_current_thread().enable_all().build().unwrap();
    let other = Builder::new_current_thread().enable_all().build().unwrap();
    let healthy = keeper_on(&other, memory.clone());
    let holder = other.block_on(healthy.mutex("a").lock()).unwrap();
    own.block_on(async {
        let keeper = Keeper::new(memory.clone());
        let mutex = keeper.mutex("a");
        tokio::spawn(async move { mutex.lock().await });
        until_a_waiter_is_queued(&memory, "a").await;
        keeper.close().await;
    });
    drop(own);
    other.block_on(async {
        holder.release().await.unwrap();
        assert!(healthy.mutex("a").try_lock().await.unwrap().is_some());
    });
}

#[tokio::test(start_paused = true)]
async fn an_acquire_without_a_response_fails_when_the_keeper_is_closed() {
    let pair = pair();
    pair.faults.always(Op::Attempt, Fault::SlowAnswer(secs(20)));
    let acquire = spawn_lock(pair.faulty.mutex("a"));
    sleep(secs(1)).await;
    pair.faulty.close().await;
    assert_eq!(acquire.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(pair.left().await, []);
}

#[test]
fn a_waiter_fails_when_the_runtime_of_its_keeper_ends() {
    let memory = Memory::new();
    let (own, other) = (threads(1), threads(1));
    let keeper = keeper_on(&own, memory.clone());
    let _held = own.block_on(keeper.mutex("b").lock()).unwrap();
    let _blocks = other.block_on(keeper_on(&other, memory.clone()).mutex("a").lock()).unwrap();
    let mutex = keeper.mutex("a");
    let waiter = other.spawn(async move { mutex.lock().await });
    other.block_on(until_a_waiter_is_queued(&memory, "a"));
    drop(own);
    let got = other.block_on(async { timeout(secs(30), waiter).await });
    let error = got.expect("an error").expect("does not panic").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

#[test]
fn an_unused_keeper_works_after_its_runtime_has_ended() {
    let memory = Memory::new();
    let (own, other) = (threads(1), threads(1));
    let keeper = keeper_on(&own, memory.clone());
    let held = other.block_on(keeper_on(&other, memory.clone()).mutex("a").lock()).unwrap();
    drop(own);
    let mutex = keeper.mutex("a");
    let waiter = other.spawn(async move { mutex.lock().await });
    other.block_on(until_a_waiter_is_queued(&memory, "a"));
    drop(held);
    let got = other.block_on(async { timeout(secs(30), waiter).await });
    let guard = got.expect("a grant").expect("does not panic").unwrap();
    assert_eq!(guard.blocking_release().unwrap(), ReleaseOutcome::Released);
}

#[tokio::test(start_paused = true)]
async fn close_waits_for_releases_in_flight_and_not_for_guards() {
    let pair = pair();
    let kept = pair.faulty.mutex("kept").lock().await.unwrap();
    pair.faults.always(Op::Release, Fault::SlowRequest(secs(5)));
    drop(pair.faulty.mutex("dropped").lock().await.unwrap());
    let start = Instant::now();
    pair.faulty.close().await;
    assert!(start.elapsed() >= secs(5));
    let names: Vec<_> = pair.left().await.into_iter().map(|info| info.name.to_string()).collect();
    assert_eq!(names, ["kept"]);
    sleep(secs(100)).await;
    assert!(kept.is_held(), "guards outlive the keeper");
    assert_eq!(kept.release().await.unwrap(), ReleaseOutcome::Released);
}

#[test]
fn a_guard_dropped_on_a_thread_without_a_runtime_is_released() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let keeper = Keeper::new(Memory::new());
    let guard = runtime.block_on(keeper.mutex("a").lock()).unwrap();
    std::thread::spawn(move || drop(guard)).join().unwrap();
    let guard = runtime.block_on(keeper.mutex("a").try_lock_for(secs(20))).unwrap();
    assert!(guard.is_some());
}

#[test]
fn a_guard_that_outlives_its_runtime_reports_its_loss_and_its_keeper_still_works() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let keeper = Keeper::new(Memory::new());
    let (long, short) = runtime.block_on(async {
        let long = keeper.mutex("long").lock().await.unwrap();
        sleep(millis(5)).await;
        (long, keeper.mutex("short").lock().await.unwrap())
    });
    let lost = long.lost_token();
    drop(runtime);
    assert!(lost.is_cancelled());
    assert_eq!((long.state(), short.state()), (State::Lost, State::Lost));
    drop(short);
    let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    other.block_on(async {
        assert_eq!(long.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
        let next = keeper.mutex("a").lock().await.unwrap();
        assert_eq!(next.release().await.unwrap(), ReleaseOutcome::Released);
        keeper.close().await;
    });
}

#[test]
fn an_acquire_outside_a_runtime_is_a_config_error() {
    let keeper = Keeper::new(Memory::new());
    let mutex = keeper.mutex("a");
    let mut lock = Box::pin(mutex.lock());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(Err(error)) = lock.as_mut().poll(&mut context) else {
        panic!("expected an error on the first poll")
    };
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("no tokio runtime"), "{error}");
}
