//! The engine's guarantees, in paused time on a store that misbehaves.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]
#![allow(clippy::unchecked_time_subtraction, reason = "of constants")]

mod common;

use std::time::Duration;

use common::{Forgetful, Pair, millis, pair, secs};
use lockkeeper_core::{
    Backend as _, Background, ClaimSpec, ErrorKind, Fence, Keeper, Memory, Name, ReleaseOutcome,
    State,
};
use lockkeeper_testkit::{Fault, Op};
use tokio::time::{Instant, sleep, timeout};

/// What is left of 30 s when drift is taken off: 1 % and 2 ms.
const HELD_FOR: Duration = Duration::from_millis(30_000 - 302);
/// Timers are only as fine as this.
const TICK: Duration = Duration::from_millis(2);

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
    let told = Instant::now();
    assert!(told >= start + HELD_FOR, "told too early, after {:?}", told - start);
    assert!(told <= start + HELD_FOR + TICK, "told too late, after {:?}", told - start);
    assert_eq!(guard.state(), State::Lost);
    assert!(!guard.is_held());
    assert_eq!(guard.remaining(), Some(Duration::ZERO));
    let (entered, fence) = next.await.unwrap();
    assert!(entered > told, "another entered {:?} before the loss was told", told - entered);
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
async fn a_store_that_is_down_for_less_than_the_lease_costs_nothing() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    let lost = guard.lost_token();
    for _ in 0..5 {
        // Two thirds of the ttl are always left, less a pause between two tries.
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
async fn lost_is_final_even_if_the_store_comes_back() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    // The store obeys and never tells: in the store it is held all the while.
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
async fn a_handed_off_grant_counts_from_the_last_attempt_of_the_waiter() {
    let pair = pair();
    let holder = pair.healthy.mutex("a").lock().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = pair.faulty.mutex("a");
        async move { mutex.lock().await.unwrap() }
    });
    pair.until_queued("a", 1).await;
    sleep(secs(9)).await;
    assert_eq!(pair.faults.asked(Op::Attempt), 1);
    holder.release().await.unwrap();
    let guard = waiter.await.unwrap();
    assert_eq!(pair.faults.asked(Op::Attempt), 1, "handed over without a second ask");
    let left = guard.remaining().unwrap();
    assert!(left <= HELD_FOR - secs(9), "{left:?} left");
    assert!(left >= secs(20), "a waiter refreshes its place, so two thirds are left: {left:?}");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_sends_one_refresh_per_third_of_the_ttl_and_nothing_else() {
    let pair = pair();
    let _holder = pair.healthy.mutex("a").lock().await.unwrap();
    let _waiter = tokio::spawn({
        let mutex = pair.faulty.mutex("a");
        async move { mutex.lock().await.unwrap() }
    });
    sleep(secs(299)).await;
    let asked = pair.faults.asked(Op::Attempt);
    assert!((29..=31).contains(&asked), "asked {asked} times in 299 s");
    assert_eq!(pair.waiters("a").await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_response_that_takes_longer_than_its_lease_is_no_grant() {
    let pair = pair();
    // Answered, but nothing is left of it.
    pair.faults.once(Op::Attempt, Fault::SlowAnswer(millis(1990)));
    let mutex = pair.faulty.mutex("a").ttl(secs(2));
    let error = mutex.lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    // Not answered at all.
    pair.faults.once(Op::Attempt, Fault::NoAnswer);
    let start = Instant::now();
    let error = mutex.try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(start.elapsed() <= secs(2) + TICK, "{:?}", start.elapsed());
    pair.faulty.close().await;
    assert_eq!(pair.left().await, []);
}

#[tokio::test(start_paused = true)]
async fn a_hung_store_is_an_error_in_bounded_time() {
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
async fn a_store_that_is_down_is_an_error_at_once() {
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
async fn a_waiter_survives_an_outage_shorter_than_the_ttl() {
    let pair = pair();
    let holder = pair.healthy.mutex("a").lock().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = pair.faulty.mutex("a");
        async move { mutex.lock().await }
    });
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
async fn a_waiter_fails_if_its_store_is_down_for_longer_than_the_ttl() {
    let pair = pair();
    let _holder = pair.healthy.mutex("a").lock().await.unwrap();
    let start = Instant::now();
    let waiter = tokio::spawn({
        let mutex = pair.faulty.mutex("a");
        async move { mutex.lock().await }
    });
    pair.until_queued("a", 1).await;
    pair.faults.everything(Fault::Refused);
    let error = waiter.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let told = start.elapsed();
    assert!(told >= secs(30) && told < secs(45), "told after {told:?}");
}

#[tokio::test(start_paused = true)]
async fn the_next_refresh_makes_up_for_a_missed_notification() {
    let pair = pair();
    pair.faults.always(Op::Changed, Fault::Hangs);
    let holder = pair.healthy.mutex("a").lock().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = pair.faulty.mutex("a");
        async move { mutex.lock().await.unwrap() }
    });
    pair.until_queued("a", 1).await;
    holder.release().await.unwrap();
    let released = Instant::now();
    let guard = waiter.await.unwrap();
    assert!(guard.is_held());
    assert!(released.elapsed() <= secs(10) + TICK, "{:?}", released.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_takes_over_when_the_lease_of_a_dead_holder_ends() {
    let pair = pair();
    let start = Instant::now();
    let ticket = pair.healthy.mutex("a").ttl(secs(5)).lock().await.unwrap().detach().unwrap();
    let guard = pair.faulty.mutex("a").lock().await.unwrap();
    assert!(start.elapsed() >= secs(5), "{:?}", start.elapsed());
    assert!(start.elapsed() <= secs(5) + TICK, "{:?}", start.elapsed());
    assert!(guard.fence() > ticket.fence);
}

#[tokio::test(start_paused = true)]
async fn a_lock_is_renewed_every_third_of_its_ttl() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    sleep(secs(299)).await;
    assert!((29..=30).contains(&faults.asked(Op::Renew)), "{}", faults.asked(Op::Renew));
    guard.release().await.unwrap();
    sleep(secs(100)).await;
    assert!(faults.asked(Op::Renew) <= 30, "a lock that was given back is not renewed");
}

#[tokio::test(start_paused = true)]
async fn a_renewal_never_restores_a_lost_lock() {
    let pair = pair();
    // The notice of the loss is missed, so that the renewal finds out.
    pair.faults.always(Op::Changed, Fault::Hangs);
    let guard = pair.faulty.mutex("a").lock().await.unwrap();
    assert_eq!(pair.healthy.inspect().unwrap().break_lock("a").await.unwrap(), 1);
    timeout(secs(11), guard.lost()).await.expect("the renewal finds out");
    assert_eq!(pair.left().await, []);
}

#[tokio::test(start_paused = true)]
async fn a_holder_is_notified_at_once_when_its_lock_is_broken() {
    let Pair { faulty, healthy, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    // Lets the driver begin to listen.
    sleep(secs(1)).await;
    let start = Instant::now();
    healthy.inspect().unwrap().break_lock("a").await.unwrap();
    guard.lost().await;
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
}

#[tokio::test(start_paused = true)]
async fn max_hold_ends_a_hold_although_its_holder_is_alive() {
    let pair = pair();
    for (ttl, max_hold) in [(30, 100), (30, 10)] {
        let start = Instant::now();
        let mutex = pair.faulty.mutex("a").ttl(secs(ttl)).max_hold(secs(max_hold));
        let guard = mutex.lock().await.unwrap();
        let next = tokio::spawn({
            let mutex = pair.healthy.mutex("a");
            async move { mutex.lock().await.unwrap() }
        });
        guard.lost().await;
        let held = start.elapsed();
        assert!(held <= secs(max_hold), "lost after {held:?}");
        assert!(held >= secs(max_hold) - secs(2), "lost after {held:?}");
        next.await.unwrap().release().await.unwrap();
        assert!(start.elapsed() <= secs(max_hold) + TICK, "next after {:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn the_store_frees_a_lock_after_max_hold_even_if_the_release_does_not_reach_it() {
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
        // Not even a turn of the scheduler later.
        let next = healthy.mutex("a").try_lock().await.unwrap();
        assert!(next.is_some(), "not free after it was held for {held_for:?}");
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
async fn extend_changes_the_lease_now_and_from_now_on() {
    let Pair { faulty, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    guard.extend(secs(300)).await.unwrap();
    assert!(guard.remaining().unwrap() > secs(290));
    sleep(secs(1000)).await;
    assert!(guard.remaining().unwrap() > secs(190));
    guard.extend(secs(3)).await.unwrap();
    assert!(guard.remaining().unwrap() < secs(3));
    sleep(secs(100)).await;
    assert!(guard.is_held());
}

#[tokio::test(start_paused = true)]
async fn an_extend_that_fails_releases_nothing() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    for (fault, ttl) in [(Fault::Refused, 300), (Fault::LostAnswer, 300), (Fault::Hangs, 60)] {
        faults.once(Op::Renew, fault);
        let error = guard.extend(secs(ttl)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(guard.is_held());
    }
    sleep(secs(100)).await;
    assert_eq!(guard.state(), State::Held);
    for bad in [Duration::ZERO, millis(2), Duration::MAX] {
        assert_eq!(guard.extend(bad).await.unwrap_err().kind(), ErrorKind::InvalidOption);
    }
    assert_eq!(guard.state(), State::Held);
}

#[tokio::test(start_paused = true)]
async fn a_shorter_lease_applies_even_if_its_response_is_lost() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    // The store cuts the lease to 3 s and the answer is lost: only 3 s can be relied on.
    faults.always(Op::Renew, Fault::LostAnswer);
    guard.extend(secs(3)).await.unwrap_err();
    assert!(guard.remaining().unwrap() < secs(3));
}

#[tokio::test(start_paused = true)]
async fn extend_of_a_lost_lock_is_an_error() {
    let Pair { faulty, healthy, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    healthy.inspect().unwrap().break_lock("a").await.unwrap();
    let error = guard.extend(secs(60)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert_eq!(guard.state(), State::Lost);
}

#[tokio::test(start_paused = true)]
async fn extend_does_not_go_past_max_hold() {
    let Pair { faulty, .. } = pair();
    let guard = faulty.mutex("a").max_hold(secs(60)).lock().await.unwrap();
    assert_eq!(guard.extend(secs(61)).await.unwrap_err().kind(), ErrorKind::InvalidOption);
    guard.extend(secs(50)).await.unwrap();
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
async fn a_dropped_guard_stops_retrying_its_release_when_the_lease_has_ended() {
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
async fn an_attempt_whose_response_is_lost_leaves_nothing() {
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
async fn after_max_wait_an_acquire_times_out_with_the_time_waited() {
    let pair = pair();
    let _holder = pair.healthy.mutex("a").lock().await.unwrap();
    let error = pair.faulty.mutex("a").max_wait(secs(7)).lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    let waited = error.waited().unwrap();
    assert!(waited >= secs(7) && waited <= secs(7) + TICK, "{waited:?}");
    assert_eq!(error.to_string(), r#"memory: lock "a": not acquired within 7.0s: others hold it"#);
    pair.faulty.close().await;
    assert_eq!(pair.waiters("a").await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_wait_of_zero_is_one_attempt_and_the_longest_wait_does_not_overflow() {
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
async fn a_waiter_of_a_closed_keeper_fails_and_leaves_the_queue() {
    let pair = pair();
    let _holder = pair.healthy.mutex("a").lock().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = pair.faulty.mutex("a");
        async move { mutex.lock().await }
    });
    pair.until_queued("a", 1).await;
    pair.faulty.close().await;
    assert_eq!(waiter.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    let error = pair.faulty.clone().mutex("b").lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    pair.until_queued("a", 0).await;
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

#[tokio::test]
async fn nothing_is_spawned_before_the_guard_exists() {
    let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let pair = pair();
    let holder = pair.healthy.mutex("a").lock().await.unwrap();
    // Apart from the keeper's maintenance task, which runs from its first lock on.
    pair.faulty.mutex("b").lock().await.unwrap().release().await.unwrap();
    let before = alive();
    let mutex = pair.faulty.mutex("a");
    let mut waiting = Box::pin(mutex.lock());
    assert!(
        std::future::poll_fn(|cx| {
            std::task::Poll::Ready(waiting.as_mut().poll(cx).is_pending())
        })
        .await
    );
    assert_eq!(pair.waiters("a").await, 1);
    assert_eq!(alive(), before);
    drop(waiting);
    drop(holder);
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
fn a_keeper_without_a_runtime_says_what_to_do() {
    let keeper = Keeper::new(Memory::new());
    let mutex = keeper.mutex("a");
    let mut lock = Box::pin(mutex.lock());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(Err(error)) = lock.as_mut().poll(&mut context) else {
        panic!("an error at once")
    };
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("no tokio runtime"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn while_held_ends_the_work_when_the_lock_is_lost() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    assert_eq!(guard.while_held(async { 42 }).await.unwrap(), 42);
    faults.everything(Fault::Hangs);
    let start = Instant::now();
    let error = guard.while_held(sleep(secs(1000))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(!error.is_retryable());
    assert!(start.elapsed() < secs(30));
    assert_eq!(guard.while_held(async { 42 }).await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test(start_paused = true)]
async fn fences_rise_even_if_the_store_loses_its_data() {
    let store = Forgetful::default();
    let keeper = Keeper::new(store.clone());
    let mut last = None;
    for _ in 0..10 {
        let guard = keeper.mutex("a").lock().await.unwrap();
        assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
        last = guard.fence();
        store.forget();
    }
}

#[tokio::test(start_paused = true)]
async fn the_fences_of_one_name_are_no_floor_for_another() {
    let store = Forgetful::default();
    let keeper = Keeper::new(store.clone());
    let next = async |name: &str| {
        let guard = keeper.mutex(name).lock().await.unwrap();
        let fence = guard.fence().unwrap().get();
        guard.release().await.unwrap();
        fence
    };
    for _ in 0..100 {
        next("a").await;
    }
    // Neither are those of permits of the same name.
    let permit = keeper.semaphore("b", 1).acquire().await.unwrap();
    assert!(permit.fence().unwrap().get() >= 100);
    drop(permit);
    store.forget();
    assert!(next("b").await < 10, "the floor of another name");
    assert!(next("a").await > 100, "its own floor");
}

#[tokio::test(start_paused = true)]
async fn a_floor_that_follows_from_the_stores_own_grants_is_never_refused() {
    let store = Memory::new();
    let background = Background::new(tokio::runtime::Handle::current());
    let spec = ClaimSpec::new(Name::new("a").unwrap(), secs(30), background);
    let mut claim = store.claim(spec).unwrap();
    // The highest floor that the store takes.
    claim.attempt(Fence::new(1 << 62)).await.unwrap();
    claim.release().await.unwrap();
    let keeper = Keeper::new(store);
    let mut last = None;
    for _ in 0..3 {
        let guard = keeper.mutex("a").lock().await.unwrap();
        assert!(guard.fence() > last);
        last = guard.fence();
        guard.release().await.unwrap();
    }
}

/// The fence of "a" after ten locks.
async fn tenth_fence(keeper: &Keeper) -> Option<Fence> {
    let mut last = None;
    for _ in 0..10 {
        let guard = keeper.mutex("a").lock().await.unwrap();
        last = guard.fence();
        guard.release().await.unwrap();
    }
    last
}

#[tokio::test(start_paused = true)]
async fn a_floor_ends_an_hour_after_the_last_grant() {
    let store = Forgetful::default();
    let keeper = Keeper::new(store.clone());
    let last = tenth_fence(&keeper).await;
    store.forget();
    sleep(Fence::MAX_AHEAD - secs(1)).await;
    let guard = keeper.mutex("a").lock().await.unwrap();
    assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
    guard.release().await.unwrap();
    store.forget();
    sleep(Fence::MAX_AHEAD + secs(1)).await;
    let guard = keeper.mutex("a").lock().await.unwrap();
    assert!(guard.fence() < last, "{:?} after {last:?}", guard.fence());
}

#[tokio::test(start_paused = true)]
async fn async_and_blocking_locks_of_a_keeper_have_the_same_floors() {
    let store = Forgetful::default();
    let keeper = Keeper::new(store.clone());
    let last = tenth_fence(&keeper).await;
    store.forget();
    let guard = keeper.mutex("a").blocking_lock().unwrap();
    assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
    guard.blocking_release().unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_next_renewal_detects_that_the_store_lost_a_hold() {
    let store = Forgetful::default();
    let keeper = Keeper::new(store.clone());
    let guard = keeper.mutex("a").lock().await.unwrap();
    store.forget();
    timeout(secs(10) + TICK, guard.lost()).await.expect("the renewal finds out");
}
