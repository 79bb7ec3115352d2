//! An acquire without success returns after its cleanup, or shortly after its deadline if the store does not respond.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use common::{millis, pair, secs};
use lockkeeper_core::{ErrorKind, Keeper, Memory};
use lockkeeper_testkit::{Fault, Op};
use tokio::time::{Instant, sleep};

#[tokio::test(start_paused = true)]
async fn after_a_timed_out_wait_the_next_try_gets_the_released_lock() {
    let keeper = Keeper::new(Memory::new());
    let mutex = keeper.mutex("a");
    for round in 0..100 {
        let guard = mutex.lock().await.unwrap();
        assert!(mutex.try_lock_for(millis(5)).await.unwrap().is_none());
        guard.release().await.unwrap();
        let next = mutex.try_lock().await.unwrap();
        next.unwrap_or_else(|| panic!("taken in round {round}")).release().await.unwrap();

        let guard = mutex.lock().await.unwrap();
        let error = mutex.clone().max_wait(millis(5)).lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        guard.release().await.unwrap();
        let next = mutex.try_lock().await.unwrap();
        next.unwrap_or_else(|| panic!("taken in round {round}")).release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn readers_and_permits_that_time_out_leave_the_queue_before_they_return() {
    let keeper = Keeper::new(Memory::new());
    let (lock, permits) = (keeper.rw_lock("a"), keeper.semaphore("b", 2));
    for _ in 0..20 {
        let (writer, both) = (lock.write().await.unwrap(), permits.acquire_many(2).await.unwrap());
        assert!(lock.try_read_for(millis(5)).await.unwrap().is_none());
        assert!(permits.try_acquire_for(millis(5)).await.unwrap().is_none());
        writer.release().await.unwrap();
        both.release().await.unwrap();
        lock.try_write().await.unwrap().expect("free").release().await.unwrap();
        permits.try_acquire_many(2).await.unwrap().expect("free").release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn the_locks_of_a_failed_set_are_free_when_it_returns() {
    let pair = pair();
    // Releases have latency, as on a real store.
    pair.faults.always(Op::Release, Fault::SlowRequest(millis(20)));
    for wait in [secs(0), millis(5)] {
        let _held = pair.healthy.mutex("d").lock().await.unwrap();
        let set = pair.faulty.lock_all(["a", "b", "c", "d"]);
        assert!(set.try_lock_for(wait).await.unwrap().is_none());
        let left = pair.left().await;
        assert!(left.iter().all(|info| &*info.name == "d" && info.waiters.is_empty()), "{left:?}");

        let error = set.max_wait(wait).lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert_eq!(pair.left().await.len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn the_locks_of_a_set_that_loses_one_are_free_when_it_returns() {
    let pair = pair();
    pair.faults.always(Op::Release, Fault::SlowRequest(millis(20)));
    let _held = pair.healthy.mutex("c").lock().await.unwrap();
    let waiting = tokio::spawn({
        let set = pair.faulty.lock_all(["a", "b", "c"]);
        async move { set.lock().await.map(drop) }
    });
    pair.until_queued("c", 1).await;
    assert_eq!(pair.healthy.inspect().unwrap().break_lock("a").await.unwrap(), 1);
    let error = waiting.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    let left = pair.left().await;
    assert!(left.iter().all(|info| &*info.name == "c"), "{left:?}");
}

#[tokio::test(start_paused = true)]
async fn a_hung_store_delays_the_result_only_briefly() {
    for fault in [Fault::Hangs, Fault::NoAnswer, Fault::Refused, Fault::LostAnswer] {
        let pair = pair();
        let _held = pair.healthy.mutex("a").lock().await.unwrap();
        pair.faults.always(Op::Release, fault);
        let start = Instant::now();
        assert!(pair.faulty.mutex("a").try_lock_for(secs(1)).await.unwrap().is_none());
        let took = start.elapsed();
        assert!(took <= millis(1150), "{fault:?}: after {took:?}");
        // The background task removes the queue entry.
        pair.faults.none();
        pair.faulty.close().await;
        assert_eq!(pair.waiters("a").await, 0, "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_hung_refresh_delays_the_result_only_briefly() {
    let pair = pair();
    let _held = pair.healthy.mutex("a").lock().await.unwrap();
    let waiting = tokio::spawn({
        let mutex = pair.faulty.mutex("a").ttl(secs(3));
        async move { mutex.try_lock_for(millis(1500)).await.unwrap().is_none() }
    });
    let start = Instant::now();
    pair.until_queued("a", 1).await;
    // The queue position is refreshed after a second, without a response.
    pair.faults.everything(Fault::Hangs);
    assert!(waiting.await.unwrap());
    assert!(start.elapsed() <= millis(1750), "after {:?}", start.elapsed());
    pair.faults.none();
    pair.faulty.close().await;
    assert_eq!(pair.waiters("a").await, 0);
}

/// The lock is handed off around the deadline of the waiter.
#[tokio::test(start_paused = true)]
async fn a_lock_handed_off_at_the_deadline_is_either_held_or_free() {
    let (mut held, mut free) = (0, 0);
    for offset in 0..60 {
        let pair = pair();
        let guard = pair.healthy.mutex("a").lock().await.unwrap();
        pair.faults.always(Op::Release, Fault::SlowRequest(millis(20)));
        let waiting = tokio::spawn({
            let mutex = pair.faulty.mutex("a");
            async move { mutex.try_lock_for(millis(100)).await.unwrap() }
        });
        sleep(millis(70 + offset)).await;
        guard.release().await.unwrap();
        if let Some(guard) = waiting.await.unwrap() {
            assert!(guard.is_held());
            held += 1;
        } else {
            assert!(pair.healthy.mutex("a").try_lock().await.unwrap().is_some(), "at {offset}");
            free += 1;
        }
        pair.faulty.close().await;
    }
    assert!(held > 10 && free > 10, "{held} held, {free} free");
}

#[test]
fn blocking_waits_that_time_out_leave_the_queue_before_they_return() {
    let keeper = Keeper::new(Memory::new());
    let mutex = keeper.mutex("a");
    for _ in 0..20 {
        let guard = mutex.blocking_lock().unwrap();
        assert!(mutex.blocking_try_lock_for(millis(5)).unwrap().is_none());
        assert!(keeper.lock_all(["0", "a"]).blocking_try_lock_for(millis(5)).unwrap().is_none());
        guard.blocking_release().unwrap();
        mutex.blocking_try_lock().unwrap().expect("free").blocking_release().unwrap();
        keeper.mutex("0").blocking_try_lock().unwrap().expect("free").blocking_release().unwrap();
    }
}
