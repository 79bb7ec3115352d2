//! Waits: refreshes, notifications, bounded waits, and stores that are down or hang.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]
#![allow(clippy::unchecked_time_subtraction, reason = "the operands are constants")]

mod common;

use std::time::Duration;

use common::{HELD_FOR, TICK, millis, pair, secs, spawn_lock};
use lockkeeper_core::ErrorKind;
use lockkeeper_testkit::{Fault, Op};
use tokio::time::{Instant, sleep};

#[tokio::test(start_paused = true)]
async fn a_waiter_survives_a_refresh_without_a_response() {
    for fault in [Fault::NoAnswer, Fault::Hangs] {
        let pair = pair();
        let holder = pair.healthy.mutex("a").lock().await.unwrap();
        let waiter = spawn_lock(pair.faulty.mutex("a"));
        pair.until_queued("a", 1).await;
        pair.faults.once(Op::Attempt, fault);
        sleep(secs(11)).await;
        assert_eq!(pair.faults.asked(Op::Attempt), 2, "the refresh is in flight");
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
    // The engine waits for the response to the refresh until 100 ms after the deadline.
    assert!(start.elapsed() <= millis(10_610), "returned after {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn lock_all_returns_in_time_even_if_releases_hang() {
    let pair = pair();
    let _held = pair.healthy.mutex("d").lock().await.unwrap();
    pair.faults.always(Op::Release, Fault::Hangs);
    let start = Instant::now();
    let got = pair.faulty.lock_all(["a", "b", "c", "d"]).try_lock_for(secs(1)).await.unwrap();
    assert!(got.is_none());
    assert!(start.elapsed() < secs(3), "after {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_handed_off_grant_counts_from_the_last_attempt_of_the_waiter() {
    let pair = pair();
    let holder = pair.healthy.mutex("a").lock().await.unwrap();
    let waiter = spawn_lock(pair.faulty.mutex("a"));
    pair.until_queued("a", 1).await;
    sleep(secs(9)).await;
    assert_eq!(pair.faults.asked(Op::Attempt), 1);
    holder.release().await.unwrap();
    let guard = waiter.await.unwrap().unwrap();
    assert_eq!(pair.faults.asked(Op::Attempt), 1, "handed off without a second attempt");
    let left = guard.remaining().unwrap();
    assert!(left <= HELD_FOR - secs(9), "{left:?} left");
    assert!(left >= secs(20), "a refresh every third of the TTL leaves two thirds: {left:?}");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_sends_one_refresh_per_third_of_the_ttl_and_nothing_else() {
    let pair = pair();
    let _holder = pair.healthy.mutex("a").lock().await.unwrap();
    let _waiter = spawn_lock(pair.faulty.mutex("a"));
    sleep(secs(299)).await;
    let attempts = pair.faults.asked(Op::Attempt);
    assert!((29..=31).contains(&attempts), "{attempts} attempts in 299 s");
    assert_eq!(pair.waiters("a").await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_survives_an_outage_shorter_than_the_ttl() {
    let pair = pair();
    let holder = pair.healthy.mutex("a").lock().await.unwrap();
    let waiter = spawn_lock(pair.faulty.mutex("a"));
    pair.until_queued("a", 1).await;
    pair.faults.everything(Fault::Refused);
    sleep(secs(25)).await;
    pair.faults.none();
    sleep(secs(5)).await;
    assert_eq!(pair.waiters("a").await, 1);
    holder.release().await.unwrap();
    assert!(waiter.await.unwrap().unwrap().is_held());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_fails_after_an_outage_longer_than_the_ttl() {
    let pair = pair();
    let _holder = pair.healthy.mutex("a").lock().await.unwrap();
    let start = Instant::now();
    let waiter = spawn_lock(pair.faulty.mutex("a"));
    pair.until_queued("a", 1).await;
    pair.faults.everything(Fault::Refused);
    let error = waiter.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let failed = start.elapsed();
    assert!(failed >= secs(30) && failed < secs(45), "failed after {failed:?}");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_misses_a_notification_is_granted_at_its_next_refresh() {
    let pair = pair();
    pair.faults.always(Op::Changed, Fault::Hangs);
    let holder = pair.healthy.mutex("a").lock().await.unwrap();
    let waiter = spawn_lock(pair.faulty.mutex("a"));
    pair.until_queued("a", 1).await;
    holder.release().await.unwrap();
    let released = Instant::now();
    let guard = waiter.await.unwrap().unwrap();
    assert!(guard.is_held());
    assert!(released.elapsed() <= secs(10) + TICK, "{:?}", released.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_granted_the_lock_when_the_lease_of_a_dead_holder_expires() {
    let pair = pair();
    let start = Instant::now();
    let ticket = pair.healthy.mutex("a").ttl(secs(5)).lock().await.unwrap().detach().unwrap();
    let guard = pair.faulty.mutex("a").lock().await.unwrap();
    assert!(start.elapsed() >= secs(5), "{:?}", start.elapsed());
    assert!(start.elapsed() <= secs(5) + TICK, "{:?}", start.elapsed());
    assert!(guard.fence() > ticket.fence);
}

#[tokio::test(start_paused = true)]
async fn after_max_wait_an_acquire_times_out_with_the_time_waited() {
    let pair = pair();
    let _holder = pair.healthy.mutex("a").lock().await.unwrap();
    let error = pair.faulty.mutex("a").max_wait(secs(7)).lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    let waited = error.waited().unwrap();
    assert!(waited >= secs(7) && waited <= secs(7) + TICK, "{waited:?}");
    assert_eq!(
        error.to_string(),
        r#"memory: lock "a": not acquired within 7.0s: other clients hold it"#
    );
    pair.faulty.close().await;
    assert_eq!(pair.waiters("a").await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_wait_of_zero_makes_one_attempt_and_the_longest_wait_does_not_overflow() {
    let pair = pair();
    let holder = pair.healthy.mutex("a").lock().await.unwrap();
    let mutex = pair.faulty.mutex("a");
    let start = Instant::now();
    assert!(mutex.try_lock().await.unwrap().is_none());
    assert!(mutex.try_lock_for(Duration::ZERO).await.unwrap().is_none());
    let zero = mutex.clone().max_wait(Duration::ZERO);
    assert_eq!(zero.lock().await.unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(pair.faults.asked(Op::Attempt), 3);
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert!(mutex.try_lock_for(secs(2)).await.unwrap().is_none());
    assert!(start.elapsed() >= secs(2));

    let waiter = tokio::spawn(async move { mutex.try_lock_for(Duration::MAX).await });
    pair.until_queued("a", 1).await;
    sleep(secs(100)).await;
    holder.release().await.unwrap();
    assert!(waiter.await.unwrap().unwrap().is_some());
}
