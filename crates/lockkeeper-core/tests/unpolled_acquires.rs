//! Acquires that are polled for a while and then neither polled nor dropped.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use lockkeeper_core::{ErrorKind, Guard, Keeper, Memory, Result};
use tokio::time::{advance, sleep, timeout};

const TTL: Duration = Duration::from_secs(30);

type Acquire = Pin<Box<dyn Future<Output = Result<Guard>> + Send>>;

/// A waiting acquire that is no longer polled.
async fn left(keeper: &Keeper) -> Acquire {
    let mutex = keeper.mutex("a");
    let mut acquire: Acquire = Box::pin(async move { mutex.lock().await });
    let pending = poll_fn(|cx| Poll::Ready(acquire.as_mut().poll(cx).is_pending())).await;
    assert!(pending);
    acquire
}

async fn waiters(keeper: &Keeper) -> usize {
    keeper.inspect().unwrap().show("a").await.unwrap()[0].waiters.len()
}

#[tokio::test(start_paused = true)]
async fn an_acquire_that_is_not_polled_for_a_ttl_is_abandoned_with_an_error() {
    let keeper = Keeper::new(Memory::new()).ttl(TTL);
    let guard = keeper.mutex("a").lock().await.unwrap();
    let left = left(&keeper).await;
    sleep(TTL + Duration::from_secs(4)).await;
    assert_eq!(waiters(&keeper).await, 0);
    let error = timeout(TTL, left).await.expect("it has been given up").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let said = "memory: lock \"a\": abandoned: its future was not polled for 30.0s";
    assert_eq!(error.to_string(), said);
    assert!(error.is_retryable());
    assert_eq!(guard.release().await.unwrap(), lockkeeper_core::ReleaseOutcome::Released);
    keeper.close().await;
}

#[tokio::test(start_paused = true)]
async fn a_polled_acquire_is_not_abandoned_however_long_it_waits() {
    let keeper = Keeper::new(Memory::new()).ttl(TTL);
    let guard = keeper.mutex("a").lock().await.unwrap();
    let waiting = tokio::spawn({
        let mutex = keeper.mutex("a");
        async move { mutex.lock().await }
    });
    sleep(TTL * 20).await;
    assert_eq!(waiters(&keeper).await, 1);
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_acquire_that_is_polled_again_in_time_continues() {
    let keeper = Keeper::new(Memory::new()).ttl(TTL);
    let guard = keeper.mutex("a").lock().await.unwrap();
    let mut left = left(&keeper).await;
    for _ in 0..10 {
        sleep(TTL * 9 / 10).await;
        let polled = left.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
    }
    guard.release().await.unwrap();
    timeout(TTL, left).await.expect("it is free").unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_acquire_is_not_abandoned_after_a_pause_of_the_whole_process() {
    // In some of these the pause begins when it has been woken and is about to be given up.
    for millis in (1000..2900).step_by(100) {
        let keeper = Keeper::new(Memory::new()).ttl(TTL);
        let guard = keeper.mutex("a").lock().await.unwrap();
        let mut left = left(&keeper).await;
        sleep(TTL + Duration::from_millis(millis)).await;
        advance(Duration::from_secs(20)).await;
        // The maintenance task runs first.
        sleep(Duration::from_millis(100)).await;
        let polled = left.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending(), "after {millis} ms");
        drop(guard);
        timeout(TTL, left).await.expect("it is free").unwrap().release().await.unwrap();
    }
}
