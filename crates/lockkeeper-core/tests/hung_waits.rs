//! Waits on a store that hangs or that has lost its data.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use common::{Forgetful, millis, pair, secs};
use lockkeeper_core::{Keeper, Memory};
use lockkeeper_testkit::{Fault, Op};
use tokio::time::{Instant, sleep};

/// Waits in real time until a name has a waiter.
async fn until_a_waiter_is_queued(memory: &Memory, name: &str) {
    let inspect = Keeper::new(memory.clone()).inspect().unwrap();
    while inspect.show(name).await.unwrap().iter().all(|info| info.waiters.is_empty()) {
        sleep(millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_survives_a_refresh_without_a_response() {
    for fault in [Fault::NoAnswer, Fault::Hangs] {
        let pair = pair();
        let holder = pair.healthy.mutex("a").lock().await.unwrap();
        let waiter = tokio::spawn({
            let mutex = pair.faulty.mutex("a");
            async move { mutex.lock().await }
        });
        pair.until_queued("a", 1).await;
        pair.faults.once(Op::Attempt, fault);
        sleep(secs(11)).await;
        assert_eq!(pair.faults.asked(Op::Attempt), 2, "the refresh is under way");
        holder.release().await.unwrap();
        let got = waiter.await.unwrap();
        assert!(got.is_ok(), "{fault:?}: {got:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_bounded_wait_returns_in_time_even_if_a_refresh_hangs() {
    let pair = pair();
    let _holder = pair.healthy.mutex("a").lock().await.unwrap();
    let start = Instant::now();
    let mutex = pair.faulty.mutex("a");
    let waiting = tokio::spawn(async move { mutex.try_lock_for(millis(10_500)).await });
    pair.until_queued("a", 1).await;
    pair.faults.always(Op::Attempt, Fault::Hangs);
    let got = waiting.await.unwrap();
    assert!(matches!(got, Ok(None)), "{got:?}");
    // The answer to the refresh is awaited for 100 ms past the end.
    assert!(start.elapsed() <= millis(10_610), "told after {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn lock_all_times_out_in_time_even_if_releases_hang() {
    let pair = pair();
    let _held = pair.healthy.mutex("d").lock().await.unwrap();
    pair.faults.always(Op::Release, Fault::Hangs);
    let start = Instant::now();
    let got = pair.faulty.lock_all(["a", "b", "c", "d"]).try_lock_for(secs(1)).await.unwrap();
    assert!(got.is_none());
    assert!(start.elapsed() < secs(3), "after {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_handed_off_fence_is_above_all_that_its_keeper_has_seen() {
    let store = Forgetful::default();
    let (one, two) = (Keeper::new(store.clone()), Keeper::new(store.clone()));
    let mut last = None;
    for _ in 0..10 {
        let guard = one.mutex("a").lock().await.unwrap();
        last = guard.fence();
        guard.release().await.unwrap();
    }
    store.forget();
    let holder = two.mutex("a").lock().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = one.mutex("a");
        async move { mutex.lock().await.unwrap() }
    });
    until_a_waiter_is_queued(&store.memory(), "a").await;
    holder.release().await.unwrap();
    let guard = waiter.await.unwrap();
    assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
}
