//! The engine's guarantees for acquires, holds and releases, in paused time on a faulty store.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]
#![allow(clippy::unchecked_time_subtraction, reason = "the operands are constants")]

mod common;

use std::time::Duration;

use common::{Forgetful, HELD_FOR, Pair, TICK, millis, pair, poll_once, secs, spawn_lock};
use lockkeeper_core::{ErrorKind, Keeper, Memory, ReleaseOutcome, State};
use lockkeeper_testkit::{Fault, Op};
use tokio::time::{Instant, sleep, timeout};

#[tokio::test(start_paused = true)]
async fn a_loss_is_reported_at_the_deadline_while_a_renewal_hangs() {
    let Pair { faulty, faults, healthy } = pair();
    let start = Instant::now();
    let guard = faulty.mutex("a").lock().await.unwrap();
    faults.everything(Fault::Hangs);
    let next = tokio::spawn(async move {
        let guard = healthy.mutex("a").lock().await.unwrap();
        (Instant::now(), guard.fence())
    });

    guard.lost().await;
    let lost = Instant::now();
    assert!(lost >= start + HELD_FOR, "reported too early, after {:?}", lost - start);
    assert!(lost <= start + HELD_FOR + TICK, "reported too late, after {:?}", lost - start);
    assert_eq!(guard.state(), State::Lost);
    assert!(!guard.is_held());
    assert_eq!(guard.remaining(), Some(Duration::ZERO));
    let (granted, fence) = next.await.unwrap();
    assert!(granted > lost, "granted {:?} before the loss was reported", lost - granted);
    assert!(fence > guard.fence());
}

#[tokio::test(start_paused = true)]
async fn a_renewal_error_is_neither_a_renewal_nor_a_loss() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    let expires_at = guard.expires_at().unwrap();

    faults.always(Op::Renew, Fault::Refused);
    sleep(secs(11)).await;
    assert_eq!(guard.state(), State::AtRisk);
    assert!(guard.is_held());
    assert_eq!(guard.expires_at().unwrap(), expires_at, "a failed renewal renews nothing");

    faults.none();
    sleep(secs(3)).await;
    assert_eq!(guard.state(), State::Held);
    assert!(guard.expires_at().unwrap() > expires_at);
    sleep(secs(1000)).await;
    assert_eq!(guard.state(), State::Held);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_without_a_response_is_retried_within_the_lease() {
    for fault in [Fault::Hangs, Fault::NoAnswer, Fault::LostAnswer] {
        let Pair { faulty, faults, .. } = pair();
        let guard = faulty.mutex("a").lock().await.unwrap();
        faults.once(Op::Renew, fault);
        sleep(secs(100)).await;
        assert_eq!(guard.state(), State::Held, "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_survives_outages_shorter_than_its_lease() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    let lost = guard.lost_token();
    for _ in 0..5 {
        // Two thirds of the TTL are always left, minus the pause between two renewals.
        faults.everything(Fault::Refused);
        sleep(secs(17)).await;
        faults.none();
        sleep(secs(13)).await;
        assert_eq!(guard.state(), State::Held);
    }
    assert!(!lost.is_cancelled());
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    assert!(!lost.is_cancelled(), "a release is not a loss");
}

#[tokio::test(start_paused = true)]
async fn a_loss_is_final_even_if_the_store_responds_again() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    // The store renews the lease without a response, so the lock stays held in the store.
    faults.always(Op::Renew, Fault::NoAnswer);
    guard.lost().await;
    faults.none();
    sleep(secs(100)).await;
    assert_eq!(guard.state(), State::Lost);
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
}

#[tokio::test(start_paused = true)]
async fn a_lock_lost_locally_but_not_in_the_store_is_released() {
    let pair = pair();
    let guard = pair.faulty.mutex("a").lock().await.unwrap();
    pair.faults.always(Op::Renew, Fault::NoAnswer);
    guard.lost().await;
    pair.faulty.close().await;
    assert_eq!(pair.left().await, []);
}

#[tokio::test(start_paused = true)]
async fn validity_counts_from_before_the_send() {
    for fault in [Fault::SlowAnswer(secs(9)), Fault::SlowRequest(secs(9))] {
        let Pair { faulty, faults, .. } = pair();
        faults.once(Op::Attempt, fault);
        let guard = faulty.mutex("a").lock().await.unwrap();
        let left = guard.remaining().unwrap();
        assert!(left <= HELD_FOR - secs(9), "{fault:?}: {left:?} left");

        faults.once(Op::Renew, Fault::SlowAnswer(secs(4)));
        let renewals = faults.asked(Op::Renew);
        while guard.remaining().unwrap() <= left {
            sleep(millis(1)).await;
        }
        assert_eq!(faults.asked(Op::Renew), renewals + 1);
        let left = guard.remaining().unwrap();
        assert!(left <= HELD_FOR - secs(4), "renewal, {fault:?}: {left:?} left");
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_later_than_its_lease_is_not_a_grant() {
    let pair = pair();
    // The response arrives, but the lease has run out.
    pair.faults.once(Op::Attempt, Fault::SlowAnswer(millis(1990)));
    let mutex = pair.faulty.mutex("a").ttl(secs(2));
    let error = mutex.lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    // No response arrives.
    pair.faults.once(Op::Attempt, Fault::NoAnswer);
    let start = Instant::now();
    let error = mutex.try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(start.elapsed() <= secs(2) + TICK, "{:?}", start.elapsed());
    pair.faulty.close().await;
    assert_eq!(pair.left().await, []);
}

#[tokio::test(start_paused = true)]
async fn an_acquire_on_a_hung_store_fails_in_bounded_time() {
    let Pair { faulty, faults, .. } = pair();
    faults.everything(Fault::Hangs);
    for (wait, bound) in [(Some(secs(3)), 3), (Some(millis(1)), 1), (None, 30)] {
        let mut mutex = faulty.mutex("a").ttl(secs(3600));
        if let Some(wait) = wait {
            mutex = mutex.max_wait(wait);
        }
        let start = Instant::now();
        let error = mutex.lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(start.elapsed() <= secs(bound) + TICK, "{:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn an_acquire_on_a_store_that_is_down_fails_at_once() {
    let Pair { faulty, faults, .. } = pair();
    faults.everything(Fault::Refused);
    let start = Instant::now();
    let error = faulty.mutex("orders/42").lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.is_retryable());
    assert_eq!(error.to_string(), r#"memory: lock "orders/42": connection refused"#);
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_lock_is_renewed_every_third_of_its_ttl() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    sleep(secs(299)).await;
    assert!((29..=30).contains(&faults.asked(Op::Renew)), "{}", faults.asked(Op::Renew));
    guard.release().await.unwrap();
    sleep(secs(100)).await;
    assert!(faults.asked(Op::Renew) <= 30, "a released lock is not renewed");
}

#[tokio::test(start_paused = true)]
async fn a_renewal_never_restores_a_lost_lock() {
    let pair = pair();
    // The notification of the loss is missed, so that a renewal detects it.
    pair.faults.always(Op::Changed, Fault::Hangs);
    let guard = pair.faulty.mutex("a").lock().await.unwrap();
    assert_eq!(pair.healthy.inspect().unwrap().break_lock("a").await.unwrap(), 1);
    timeout(secs(11), guard.lost()).await.expect("a renewal detects the loss");
    assert_eq!(pair.left().await, []);
}

#[tokio::test(start_paused = true)]
async fn a_holder_is_notified_at_once_when_its_lock_is_broken() {
    let Pair { faulty, healthy, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    // Lets the driver subscribe to notifications.
    sleep(secs(1)).await;
    let start = Instant::now();
    healthy.inspect().unwrap().break_lock("a").await.unwrap();
    guard.lost().await;
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
}

#[tokio::test(start_paused = true)]
async fn max_hold_ends_the_hold_of_a_live_holder() {
    let pair = pair();
    for (ttl, max_hold) in [(30, 100), (30, 10)] {
        let start = Instant::now();
        let mutex = pair.faulty.mutex("a").ttl(secs(ttl)).max_hold(secs(max_hold));
        let guard = mutex.lock().await.unwrap();
        let next = spawn_lock(pair.healthy.mutex("a"));
        guard.lost().await;
        let held = start.elapsed();
        assert!(held <= secs(max_hold), "lost after {held:?}");
        assert!(held >= secs(max_hold) - secs(2), "lost after {held:?}");
        next.await.unwrap().unwrap().release().await.unwrap();
        assert!(start.elapsed() <= secs(max_hold) + TICK, "next after {:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_lock_expires_in_the_store_at_max_hold_even_if_its_release_hangs() {
    let pair = pair();
    pair.faults.always(Op::Release, Fault::Hangs);
    let start = Instant::now();
    let _guard = pair.faulty.mutex("a").max_hold(secs(45)).lock().await.unwrap();
    pair.healthy.mutex("a").lock().await.unwrap().release().await.unwrap();
    assert!(start.elapsed() <= secs(45) + TICK, "freed after {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_dropped_guard_is_released_at_once() {
    let Pair { faulty, healthy, .. } = pair();
    for held_for in [Duration::ZERO, secs(1), secs(100)] {
        let guard = faulty.mutex("a").lock().await.unwrap();
        sleep(held_for).await;
        drop(guard);
        // Without a yield to the background task.
        let next = healthy.mutex("a").try_lock().await.unwrap();
        assert!(next.is_some(), "not free after a hold of {held_for:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_guard_is_released_in_the_background_on_a_slow_store() {
    let Pair { faulty, faults, healthy } = pair();
    faults.always(Op::Release, Fault::SlowRequest(secs(2)));
    for held_for in [Duration::ZERO, secs(1), secs(100)] {
        let guard = faulty.mutex("a").lock().await.unwrap();
        sleep(held_for).await;
        let start = Instant::now();
        drop(guard);
        assert_eq!(start.elapsed(), Duration::ZERO);
        healthy.mutex("a").lock().await.unwrap().release().await.unwrap();
        assert!(start.elapsed() <= secs(2) + TICK, "{held_for:?}: {:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_release_is_retried_until_the_store_is_back() {
    for fault in [Fault::Refused, Fault::LostAnswer, Fault::Hangs, Fault::NoAnswer] {
        let pair = pair();
        let guard = pair.faulty.mutex("a").lock().await.unwrap();
        pair.faults.always(Op::Release, fault);
        let error = guard.release().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{fault:?}");
        pair.faults.none();
        let start = Instant::now();
        pair.faulty.close().await;
        assert_eq!(pair.left().await, [], "{fault:?}");
        assert!(start.elapsed() < secs(20), "{fault:?}: {:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn the_release_of_a_dropped_guard_is_retried_until_the_lease_has_expired() {
    let pair = pair();
    let guard = pair.faulty.mutex("a").lock().await.unwrap();
    pair.faults.everything(Fault::Refused);
    drop(guard);
    let start = Instant::now();
    pair.faulty.close().await;
    assert!(start.elapsed() <= secs(41), "{:?}", start.elapsed());
    sleep(secs(30)).await;
    assert_eq!(pair.left().await, []);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_whose_response_is_lost_leaves_no_state() {
    for fault in [Fault::LostAnswer, Fault::NoAnswer, Fault::SlowAnswer(secs(40))] {
        let pair = pair();
        pair.faults.once(Op::Attempt, fault);
        let error = pair.faulty.mutex("a").lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        pair.faulty.close().await;
        assert_eq!(pair.left().await, [], "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_century_long_ttl_works() {
    let century = secs(100 * 366 * 24 * 60 * 60);
    let keeper = Keeper::new(Memory::new()).ttl(century);
    let mutex = keeper.mutex("a");
    let guard = mutex.lock().await.unwrap();
    tokio::time::advance(century / 10).await;
    assert!(guard.is_held());
    assert!(guard.remaining().unwrap() > century / 2);
    assert!(guard.expires_at().is_some());
    guard.extend(century).await.unwrap();
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
}

#[tokio::test(start_paused = true)]
async fn the_next_renewal_detects_that_the_store_lost_a_hold() {
    let store = Forgetful::default();
    let keeper = Keeper::new(store.clone());
    let guard = keeper.mutex("a").lock().await.unwrap();
    store.forget();
    timeout(secs(10) + TICK, guard.lost()).await.expect("a renewal detects the loss");
}

#[tokio::test]
async fn a_waiting_acquire_spawns_no_task() {
    let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let pair = pair();
    let holder = pair.healthy.mutex("a").lock().await.unwrap();
    // The keeper's maintenance task starts with its first lock.
    pair.faulty.mutex("b").lock().await.unwrap().release().await.unwrap();
    let before = alive();
    let mutex = pair.faulty.mutex("a");
    let mut waiting = Box::pin(mutex.lock());
    assert!(poll_once(waiting.as_mut()).await.is_pending());
    assert_eq!(pair.waiters("a").await, 1);
    assert_eq!(alive(), before);
    drop(waiting);
    drop(holder);
}
