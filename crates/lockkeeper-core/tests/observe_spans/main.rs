//! The spans of waits, holds and renewals, in paused time.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod collector;
#[path = "../common/mod.rs"]
mod common;

use collector::Collector;
use common::{Pair, pair, secs};
use lockkeeper_core::{Fence, Keeper, Memory};
use lockkeeper_testkit::{Fault, Op};
use tokio::time::sleep;
use tracing::{Instrument, Level};

const WAIT: &str = "lockkeeper.wait";
const HOLD: &str = "lockkeeper.hold";
const RENEW: &str = "lockkeeper.renew";

#[tokio::test(start_paused = true)]
async fn the_spans_of_a_wait_and_its_hold_are_children_of_the_callers_span() {
    let collector = Collector::for_this_thread(Level::TRACE);
    let keeper = Keeper::new(Memory::new()).label("web-1");
    let request = tracing::info_span!("request");
    let guard = keeper.mutex("orders/42").lock().instrument(request).await.unwrap();
    let fence = guard.fence().map(Fence::get).unwrap().to_string();

    let waits = collector.spans(WAIT);
    assert_eq!(waits.len(), 1);
    assert_eq!(waits[0].parent, Some("request"));
    assert_eq!(waits[0].handles, 0, "closed");
    let holds = collector.spans(HOLD);
    assert_eq!(holds.len(), 1);
    assert_eq!(holds[0].parent, Some("request"));
    assert_eq!(holds[0].handles, 1, "open while the lock is held");
    assert_eq!(holds[0].field("outcome"), "");
    for span in [&waits[0], &holds[0]] {
        assert_eq!(span.field("store"), "memory");
        assert_eq!(span.field("name"), "orders/42");
        assert_eq!(span.field("mode"), "exclusive");
        assert_eq!(span.field("label"), "web-1");
        assert_eq!(span.field("fence"), fence);
    }
    assert_eq!(waits[0].field("outcome"), "granted_at_once");

    guard.release().await.unwrap();
    let hold = &collector.spans(HOLD)[0];
    assert_eq!(hold.field("outcome"), "released");
    assert_eq!(hold.handles, 0);
}

#[tokio::test(start_paused = true)]
async fn the_span_of_a_renewal_is_a_child_of_its_hold_and_has_an_outcome() {
    let collector = Collector::for_this_thread(Level::TRACE);
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    faults.once(Op::Renew, Fault::Refused);
    sleep(secs(12)).await;
    let renewals = collector.spans(RENEW);
    let outcomes: Vec<_> = renewals.iter().map(|span| span.field("outcome")).collect();
    assert_eq!(outcomes, ["failed", "renewed"]);
    for renewal in &renewals {
        assert_eq!(renewal.parent, Some(HOLD));
        assert_eq!((renewal.field("name"), renewal.field("store")), ("a", "memory"));
        assert_eq!(renewal.field("fence"), guard.fence().map(Fence::get).unwrap().to_string());
        assert_eq!(renewal.handles, 0);
    }
    let event = ("renewal failed, lock at risk".to_owned(), Some(HOLD));
    assert_eq!(collector.events(), [event]);

    // A renewal hangs while the lock is released.
    faults.once(Op::Renew, Fault::Hangs);
    sleep(secs(11)).await;
    guard.release().await.unwrap();
    faulty.close().await;
    let renewals = collector.spans(RENEW);
    assert_eq!(renewals[2].field("outcome"), "cancelled");
    assert!(renewals.iter().all(|span| span.handles == 0));
    assert_eq!(collector.spans(HOLD)[0].handles, 0);
}

#[tokio::test(start_paused = true)]
async fn a_loss_closes_the_span_of_its_hold_with_the_reason() {
    let collector = Collector::for_this_thread(Level::TRACE);
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    faults.everything(Fault::Hangs);
    guard.lost().await;
    let hold = &collector.spans(HOLD)[0];
    assert_eq!((hold.field("outcome"), hold.field("reason")), ("lost", "expired"));
    assert_eq!(hold.handles, 0);
    assert_eq!(collector.events().last().unwrap(), &("lock lost".to_owned(), Some(HOLD)));
    faults.none();
    drop(guard);
    faulty.close().await;
    assert_eq!(collector.spans(HOLD)[0].field("outcome"), "lost", "the outcome is final");
    assert!(collector.spans(RENEW).iter().all(|span| span.handles == 0));
}

#[tokio::test(start_paused = true)]
async fn an_unsuccessful_wait_closes_its_span_and_opens_no_hold() {
    let collector = Collector::for_this_thread(Level::TRACE);
    let Pair { faulty, faults, healthy } = pair();
    let held = healthy.mutex("a").lock().await.unwrap();
    faulty.mutex("a").try_lock().await.unwrap();
    faulty.mutex("a").try_lock_for(secs(1)).await.unwrap();
    tokio::time::timeout(secs(1), faulty.mutex("a").lock()).await.unwrap_err();
    faults.once(Op::Attempt, Fault::Refused);
    faulty.mutex("a").lock().await.unwrap_err();
    let mutex = faulty.mutex("a");
    let waiter = tokio::spawn(async move { mutex.lock().await });
    sleep(secs(1)).await;
    faulty.close().await;
    waiter.await.unwrap().unwrap_err();
    held.release().await.unwrap();

    let waits = collector.spans(WAIT);
    let outcomes: Vec<_> = waits.iter().skip(1).map(|span| span.field("outcome")).collect();
    assert_eq!(outcomes, ["not_acquired", "timed_out", "cancelled", "failed", "closed"]);
    assert!(waits.iter().skip(1).all(|span| span.field("fence").is_empty()));
    assert!(waits.iter().all(|span| span.handles == 0));
    assert_eq!(collector.spans(HOLD).len(), 1, "the span of the holder");
}

#[tokio::test(start_paused = true)]
async fn a_lock_name_cannot_forge_log_lines() {
    let collector = Collector::for_this_thread(Level::TRACE);
    let keeper = Keeper::new(Memory::new());
    drop(keeper.mutex("a\nWARN lock lost").lock().await.unwrap());
    assert_eq!(collector.spans(WAIT)[0].field("name"), "a\\nWARN lock lost");
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_at_level_info_sees_the_warnings_and_no_spans() {
    let collector = Collector::for_this_thread(Level::INFO);
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    faults.once(Op::Renew, Fault::Refused);
    sleep(secs(12)).await;
    guard.release().await.unwrap();
    for name in [WAIT, HOLD, RENEW] {
        assert!(collector.spans(name).is_empty(), "{name}");
    }
    assert_eq!(collector.events(), [("renewal failed, lock at risk".to_owned(), None)]);
}
