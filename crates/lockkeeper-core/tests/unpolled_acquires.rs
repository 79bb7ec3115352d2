//! Acquires that are polled at first and then neither polled nor dropped.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Duration;

use common::{poll_once, spawn_lock};
use lockkeeper_core::{ErrorKind, Guard, Keeper, Memory, Result};
use tokio::time::{advance, sleep, timeout};

const TTL: Duration = Duration::from_secs(30);

type Acquire = Pin<Box<dyn Future<Output = Result<Guard>> + Send>>;

/// Returns a waiting acquire that has been polled once.
async fn unpolled(keeper: &Keeper) -> Acquire {
    let mutex = keeper.mutex("a");
    let mut acquire: Acquire = Box::pin(async move { mutex.lock().await });
    assert!(poll_once(acquire.as_mut()).await.is_pending());
    acquire
}

async fn waiters(keeper: &Keeper) -> usize {
    keeper.inspect().unwrap().show("a").await.unwrap()[0].waiters.len()
}

#[tokio::test(start_paused = true)]
async fn an_acquire_that_is_not_polled_for_one_ttl_is_abandoned_with_an_error() {
    let keeper = Keeper::new(Memory::new()).ttl(TTL);
    let guard = keeper.mutex("a").lock().await.unwrap();
    let acquire = unpolled(&keeper).await;
    sleep(TTL + Duration::from_secs(4)).await;
    assert_eq!(waiters(&keeper).await, 0);
    let error = timeout(TTL, acquire).await.expect("it has been abandoned").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let expected = "memory: lock \"a\": abandoned: its future was not polled for 30.0s";
    assert_eq!(error.to_string(), expected);
    assert!(error.is_retryable());
    assert_eq!(guard.release().await.unwrap(), lockkeeper_core::ReleaseOutcome::Released);
    keeper.close().await;
}

#[tokio::test(start_paused = true)]
async fn an_acquire_that_is_polled_is_never_abandoned() {
    let keeper = Keeper::new(Memory::new()).ttl(TTL);
    let guard = keeper.mutex("a").lock().await.unwrap();
    let waiting = spawn_lock(keeper.mutex("a"));
    sleep(TTL * 20).await;
    assert_eq!(waiters(&keeper).await, 1);
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_acquire_that_is_polled_again_in_time_continues() {
    let keeper = Keeper::new(Memory::new()).ttl(TTL);
    let guard = keeper.mutex("a").lock().await.unwrap();
    let mut acquire = unpolled(&keeper).await;
    for _ in 0..10 {
        sleep(TTL * 9 / 10).await;
        let polled = acquire.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
    }
    guard.release().await.unwrap();
    timeout(TTL, acquire).await.expect("it is free").unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_acquire_is_not_abandoned_after_a_pause_of_the_whole_process() {
    // In some rounds the pause begins after the wake-up and before the acquire is abandoned.
    for millis in (1000..2900).step_by(100) {
        let keeper = Keeper::new(Memory::new()).ttl(TTL);
        let guard = keeper.mutex("a").lock().await.unwrap();
        let mut acquire = unpolled(&keeper).await;
        sleep(TTL + Duration::from_millis(millis)).await;
        advance(Duration::from_secs(20)).await;
        // The maintenance task runs first.
        sleep(Duration::from_millis(100)).await;
        let polled = acquire.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending(), "after {millis} ms");
        drop(guard);
        timeout(TTL, acquire).await.expect("it is free").unwrap().release().await.unwrap();
    }
}
