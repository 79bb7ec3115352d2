//! Closing a keeper, and the end of its runtime, while locks are held and waited for.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{millis, pair, secs};
use lockkeeper_core::{Backend, ErrorKind, Keeper, LossReason, Memory, ReleaseOutcome};
use lockkeeper_testkit::{Fault, Op};
use tokio::runtime::{Builder, Runtime};
use tokio::time::{sleep, timeout};

fn threads(count: usize) -> Runtime {
    Builder::new_multi_thread().worker_threads(count).enable_all().build().unwrap()
}

/// A keeper that lives on a runtime.
fn keeper_on(runtime: &Runtime, store: impl Backend) -> Keeper {
    let _entered = runtime.enter();
    Keeper::new(store)
}

/// Waits in real time until a name has a waiter.
async fn until_a_waiter_is_queued(memory: &Memory, name: &str) {
    let inspect = Keeper::new(memory.clone()).inspect().unwrap();
    while inspect.show(name).await.unwrap().iter().all(|info| info.waiters.is_empty()) {
        sleep(millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn when_close_returns_waiters_have_left_the_queue() {
    let pair = pair();
    let _holder = pair.healthy.mutex("a").lock().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = pair.faulty.mutex("a");
        async move { mutex.lock().await }
    });
    pair.until_queued("a", 1).await;
    pair.faulty.close().await;
    assert_eq!(pair.waiters("a").await, 0, "still queued when close returned");
    assert_eq!(waiter.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn a_runtime_that_ends_in_a_panic_of_the_program_is_not_a_panic_of_the_store() {
    let mut kept = None;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        kept = Some(runtime.block_on(async {
            let guard = Keeper::new(Memory::new()).mutex("a").lock().await.unwrap();
            // It has its background task by then.
            sleep(millis(50)).await;
            guard
        }));
        panic!("the program's own");
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
async fn an_acquire_without_a_response_returns_when_the_keeper_is_closed() {
    let pair = pair();
    pair.faults.always(Op::Attempt, Fault::SlowAnswer(secs(20)));
    let asking = tokio::spawn({
        let mutex = pair.faulty.mutex("a");
        async move { mutex.lock().await }
    });
    sleep(secs(1)).await;
    pair.faulty.close().await;
    assert_eq!(asking.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
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
    let error = got.expect("told").expect("does not panic").unwrap_err();
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
    let guard = got.expect("woken").expect("does not panic").unwrap();
    assert_eq!(guard.blocking_release().unwrap(), ReleaseOutcome::Released);
}
