//! The exact changes of every metric, in paused time.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

#[path = "../common/mod.rs"]
mod common;
mod recorder;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use common::{Pair, pair, secs};
use lockkeeper_core::{ErrorKind, Keeper, Memory, ReleaseOutcome, describe_metrics};
use lockkeeper_testkit::{Fault, Op};
use metrics::Unit;
use recorder::Recorded;
use tokio::time::{sleep, timeout};

/// Polls a future a number of times, lets other tasks run after each poll, and drops it.
async fn poll_and_drop(future: impl Future, polls: usize) {
    let mut future = pin!(future);
    for _ in 0..polls {
        let mut cx = Context::from_waker(Waker::noop());
        if future.as_mut().poll(&mut cx).is_ready() {
            return;
        }
        sleep(Duration::from_millis(400)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_free_lock_counts_as_granted_at_once_and_its_hold_counts_at_the_release() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let keeper = Keeper::new(Memory::new());
    let guard = keeper.mutex("a").lock().await.unwrap();
    assert_eq!(
        recorded.changes(),
        [
            "acquisitions_total memory exclusive granted_at_once: 1",
            "wait_seconds memory exclusive granted_at_once: 0.0 s"
        ]
    );

    sleep(secs(5)).await;
    assert_eq!(recorded.changes(), [""; 0], "a hold counts when it ends");
    guard.release().await.unwrap();
    assert_eq!(
        recorded.changes(),
        [
            "hold_seconds memory exclusive released: 5.0 s",
            "remaining_lease_seconds memory exclusive: 24.7 s"
        ]
    );
    keeper.close().await;
    assert_eq!(recorded.changes(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_counts_once_as_contended_with_its_wait_time() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let keeper = Keeper::new(Memory::new());
    let guard = keeper.mutex("a").lock().await.unwrap();
    let mutex = keeper.mutex("a");
    let waiter = tokio::spawn(async move { mutex.lock().await.unwrap() });
    // A refresh of its queue position does not count as contention again.
    sleep(secs(25)).await;
    assert_eq!(recorded.count("contended_total memory exclusive"), 1);
    recorded.changes();
    drop(guard);
    let guard = waiter.await.unwrap();
    assert_eq!(
        recorded.changes(),
        [
            "acquisitions_total memory exclusive granted_after_wait: 1",
            "hold_seconds memory exclusive dropped: 25.0 s",
            // Renewed after 10 and after 20 seconds.
            "remaining_lease_seconds memory exclusive: 24.7 s",
            "wait_seconds memory exclusive granted_after_wait: 25.0 s",
        ]
    );
    drop(guard);
    keeper.close().await;
    recorded.changes();
}

#[tokio::test(start_paused = true)]
async fn a_failed_try_is_not_counted_as_a_timed_out_wait() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let keeper = Keeper::new(Memory::new());
    let _held = keeper.mutex("a").lock().await.unwrap();
    recorded.changes();

    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
    assert_eq!(
        recorded.changes(),
        [
            "acquisitions_total memory exclusive not_acquired: 1",
            "contended_total memory exclusive: 1",
            "wait_seconds memory exclusive not_acquired: 0.0 s",
        ]
    );
    assert!(keeper.mutex("a").try_lock_for(secs(2)).await.unwrap().is_none());
    let error = keeper.mutex("a").max_wait(secs(3)).lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(
        recorded.changes(),
        [
            "acquisitions_total memory exclusive timed_out: 2",
            "contended_total memory exclusive: 2",
            "wait_seconds memory exclusive timed_out: 2.0 s, 3.0 s",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_store_failure_is_counted_as_failed_and_not_as_contended() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let Pair { faulty, faults, .. } = pair();
    faults.once(Op::Attempt, Fault::Refused);
    faulty.mutex("a").lock().await.unwrap_err();
    faulty.close().await;
    assert_eq!(
        recorded.changes(),
        [
            "acquisitions_total memory exclusive failed: 1",
            "wait_seconds memory exclusive failed: 0.0 s"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_dropped_acquire_counts_as_cancelled_even_if_it_is_granted_later() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let Pair { faulty, faults, healthy } = pair();
    let held = healthy.mutex("a").lock().await.unwrap();
    recorded.changes();
    let mutex = faulty.mutex("a");
    tokio::time::timeout(secs(4), mutex.lock()).await.unwrap_err();
    assert_eq!(
        recorded.changes(),
        [
            "acquisitions_total memory exclusive cancelled: 1",
            "contended_total memory exclusive: 1",
            "wait_seconds memory exclusive cancelled: 4.0 s",
        ]
    );
    held.release().await.unwrap();
    recorded.changes();

    faults.once(Op::Attempt, Fault::SlowAnswer(secs(3)));
    tokio::time::timeout(secs(1), mutex.lock()).await.unwrap_err();
    faulty.close().await;
    assert_eq!(
        recorded.changes(),
        [
            "acquisitions_total memory exclusive cancelled: 1",
            "wait_seconds memory exclusive cancelled: 1.0 s",
        ],
        "a grant after the drop is not a hold"
    );
}

#[tokio::test(start_paused = true)]
async fn an_acquire_dropped_after_any_poll_has_one_outcome_and_each_grant_one_hold() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    for fault in [None, Some(Fault::SlowAnswer(secs(1))), Some(Fault::LostAnswer)] {
        for polls in 1..12 {
            let Pair { faulty, faults, healthy } = pair();
            let held = healthy.mutex("a").lock().await.unwrap();
            if let Some(fault) = fault {
                faults.always(Op::Attempt, fault);
            }
            recorded.changes();
            let waits = async {
                let guard = faulty.mutex("a").lock().await;
                sleep(secs(1)).await;
                drop(guard);
            };
            let release = async {
                sleep(secs(2)).await;
                held.release().await.unwrap();
            };
            tokio::join!(poll_and_drop(waits, polls), release);
            faulty.close().await;
            let context = format!("{fault:?}, {polls} polls");
            let granted = recorded.count("acquisitions_total memory exclusive granted");
            assert_eq!(recorded.count("acquisitions_total"), 1, "{context}");
            assert_eq!(recorded.count("wait_seconds"), 1, "{context}");
            // The other hold is that of `held`.
            assert_eq!(recorded.count("hold_seconds"), granted + 1, "{context}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn acquires_during_and_after_close_count_as_closed() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let keeper = Keeper::new(Memory::new());
    let _held = keeper.mutex("a").lock().await.unwrap();
    let mutex = keeper.mutex("a");
    let waiter = tokio::spawn(async move { mutex.lock().await.unwrap_err() });
    sleep(secs(3)).await;
    recorded.changes();
    keeper.close().await;
    assert_eq!(waiter.await.unwrap().kind(), ErrorKind::Closed);
    assert_eq!(
        recorded.changes(),
        [
            "acquisitions_total memory exclusive closed: 1",
            "wait_seconds memory exclusive closed: 3.0 s"
        ]
    );
    keeper.mutex("b").lock().await.unwrap_err();
    keeper.mutex("").lock().await.unwrap_err();
    assert_eq!(
        recorded.changes(),
        [
            "acquisitions_total memory exclusive closed: 1",
            "acquisitions_total memory exclusive rejected: 1",
        ],
        "no wait is measured without an attempt"
    );
}

#[tokio::test(start_paused = true)]
async fn a_detached_hold_counts_as_detached_and_its_adoption_as_adopted() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let keeper = Keeper::new(Memory::new());
    let guard = keeper.mutex("a").lock().await.unwrap();
    sleep(secs(2)).await;
    recorded.changes();
    let ticket = guard.detach().unwrap();
    assert_eq!(recorded.changes(), ["hold_seconds memory exclusive detached: 2.0 s"]);

    let guard = keeper.adopt(ticket.clone()).await.unwrap();
    guard.release().await.unwrap();
    keeper.adopt(ticket).await.unwrap_err();
    assert_eq!(
        recorded.changes(),
        [
            "acquisitions_total memory exclusive adopted: 1",
            "acquisitions_total memory exclusive failed: 1",
            "hold_seconds memory exclusive released: 0.0 s",
            "remaining_lease_seconds memory exclusive: 29.7 s",
            "wait_seconds memory exclusive adopted: 0.0 s",
            "wait_seconds memory exclusive failed: 0.0 s",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn a_hold_whose_renewals_fail_counts_once_as_lost_by_expiry() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    recorded.changes();
    faults.everything(Fault::Hangs);
    guard.lost().await;
    let failed = recorded.count("renewals_failed_total memory exclusive");
    let sent = faults.asked(Op::Renew);
    assert!(failed >= 2, "{failed}");
    // The last renewal may still be in flight.
    assert!(sent - failed <= 1, "{failed} of {sent}");
    let changes = recorded.changes();
    assert_eq!(
        changes[..2],
        ["hold_seconds memory exclusive lost: 29.7 s", "losses_total memory exclusive expired: 1",]
    );
    assert_eq!(changes.len(), 3, "{changes:?}");

    faults.none();
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
    faulty.close().await;
    assert_eq!(recorded.changes(), [""; 0], "a hold ends once");
}

#[tokio::test(start_paused = true)]
async fn losses_are_counted_by_reason() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let keeper = Keeper::new(Memory::new());
    let guard = keeper.mutex("a").lock().await.unwrap();
    sleep(secs(1)).await;
    recorded.changes();
    keeper.inspect().unwrap().break_lock("a").await.unwrap();
    guard.lost().await;
    assert_eq!(
        recorded.changes(),
        ["hold_seconds memory exclusive lost: 1.0 s", "losses_total memory exclusive broken: 1",]
    );

    let guard = keeper.mutex("b").max_hold(secs(40)).lock().await.unwrap();
    recorded.changes();
    guard.lost().await;
    assert_eq!(
        recorded.changes(),
        ["hold_seconds memory exclusive lost: 39.8 s", "losses_total memory exclusive max_hold: 1"],
        "the last of three renewals covers the time until max_hold"
    );
    let guard = keeper.mutex("c").max_hold(secs(30)).lock().await.unwrap();
    recorded.changes();
    guard.lost().await;
    assert_eq!(recorded.changes()[1], "losses_total memory exclusive max_hold: 1");
}

#[test]
fn the_holds_of_a_runtime_that_is_shut_down_count_as_lost() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let guard = runtime.block_on(async {
        let guard = Keeper::new(Memory::new()).mutex("a").lock().await.unwrap();
        // Until the maintenance task has given it a background task.
        sleep(Duration::from_millis(10)).await;
        guard
    });
    recorded.changes();
    drop(runtime);
    let changes = recorded.changes();
    assert_eq!(changes[1..], ["losses_total memory exclusive runtime_shutdown: 1"]);
    assert!(changes[0].starts_with("hold_seconds memory exclusive lost"), "{changes:?}");
    drop(guard);
    assert_eq!(recorded.changes(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn failed_renewals_before_a_successful_one_change_only_their_counter() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    recorded.changes();
    faults.once(Op::Renew, Fault::Refused);
    faults.once(Op::Renew, Fault::LostAnswer);
    sleep(secs(100)).await;
    assert_eq!(recorded.changes(), ["renewals_failed_total memory exclusive: 2"]);
    assert!(guard.is_held());
    guard.release().await.unwrap();
    let changes = recorded.changes();
    assert_eq!(changes[0], "hold_seconds memory exclusive released: 100.0 s");
    assert!(changes[1].starts_with("remaining_lease_seconds"), "{changes:?}");
    assert_eq!(changes.len(), 2, "{changes:?}");
}

#[tokio::test(start_paused = true)]
async fn a_renewal_cancelled_by_a_release_is_not_counted_as_failed() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    faults.once(Op::Renew, Fault::Hangs);
    sleep(secs(11)).await;
    assert_eq!(faults.asked(Op::Renew), 1, "the renewal is in flight");
    recorded.changes();
    guard.release().await.unwrap();
    faulty.close().await;
    assert_eq!(
        recorded.changes(),
        [
            "hold_seconds memory exclusive released: 11.0 s",
            "remaining_lease_seconds memory exclusive: 18.7 s"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn the_remaining_lease_at_the_release_is_measured() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    faults.always(Op::Renew, Fault::Refused);
    sleep(Duration::from_millis(29_500)).await;
    recorded.changes();
    guard.release().await.unwrap();
    assert_eq!(
        recorded.changes(),
        [
            "hold_seconds memory exclusive released: 29.5 s",
            "remaining_lease_seconds memory exclusive: 0.2 s"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn metrics_are_labelled_with_the_mode_and_not_with_names_or_labels() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    let keeper = Keeper::new(Memory::new()).label("secretary");
    let reader = keeper.rw_lock("orders/42").read().await.unwrap();
    let permit = keeper.semaphore("orders/42", 4).acquire().await.unwrap();
    let writer = keeper.rw_lock("orders/43").write().await.unwrap();
    writer.downgrade().await.unwrap();
    for guard in [reader, permit, writer] {
        guard.release().await.unwrap();
    }
    let changes = recorded.changes();
    for mode in ["shared", "permits", "exclusive"] {
        let count = changes.iter().filter(|change| change.contains(&format!("memory {mode}")));
        assert_eq!(count.count(), 4, "{mode}: {changes:?}");
    }
    assert_eq!(changes.len(), 12, "a downgraded writer keeps its requested mode: {changes:?}");
    let text = changes.concat();
    assert!(!text.contains("orders") && !text.contains("secretary"), "{text}");
}

#[test]
fn every_metric_has_a_unit_and_a_line_in_the_guide() {
    let recorded = Recorded::default();
    let _here = recorded.install();
    describe_metrics();
    let described = recorded.described();
    for (name, unit) in &described {
        let expected = if name.ends_with("_seconds") { Unit::Seconds } else { Unit::Count };
        assert_eq!(*unit, Some(expected), "{name}");
    }
    let page = include_str!("../../../../docs/guides/observability.md");
    for (name, _) in &described {
        assert!(page.contains(&format!("| `{name}` |")), "{name} is not in the guide");
    }
    assert_eq!(described.len(), 7);
}

#[tokio::test(start_paused = true)]
async fn a_panicking_recorder_affects_no_lock_and_no_drop() {
    let _here = metrics::set_default_local_recorder(&recorder::Panics);
    let keeper = Keeper::new(Memory::new());
    let mutex = keeper.mutex("a");
    drop(mutex.lock().await.unwrap());
    let guard = mutex.lock().await.unwrap();
    assert!(mutex.try_lock().await.unwrap().is_none());

    // The maintenance task reports the abandoned acquire and must survive the panic.
    let mut unpolled = Box::pin(mutex.lock());
    assert!(unpolled.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    sleep(secs(60)).await;
    let abandoned = timeout(secs(1), unpolled).await.expect("an error");
    assert_eq!(abandoned.unwrap_err().kind(), ErrorKind::Unavailable);

    keeper.inspect().unwrap().break_lock("a").await.unwrap();
    timeout(secs(60), guard.lost()).await.expect("the loss");
    drop(guard);
    let guard = mutex.lock().await.unwrap();
    sleep(secs(120)).await;
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    timeout(secs(1), keeper.close()).await.expect("closes");
}
