//! Work under a lock stops at the deadline, even before the task that reports the loss has run.
//!
//! Each test stalls the process: the clock passes the end of the lease while no other task runs, and the work
//! is polled first.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use common::{Pair, pair, poll_once, secs};
use lockkeeper_core::{ErrorKind, Keeper, Memory};
use lockkeeper_testkit::Fault;
use tokio::time::{Instant, sleep};

const TTL: Duration = Duration::from_secs(30);

/// Returns a future that counts its polls and never completes.
fn count(steps: &Cell<usize>) -> impl Future<Output = ()> {
    poll_fn(|_| {
        steps.set(steps.get() + 1);
        Poll::Pending
    })
}

/// Moves the clock past the lease without letting another task run: `advance` sets the clock in its first poll and
/// yields after that.
async fn stall() {
    assert!(poll_once(pin!(tokio::time::advance(TTL))).await.is_pending());
}

#[tokio::test(start_paused = true)]
async fn no_step_of_the_work_runs_after_the_deadline_of_a_guard() {
    let keeper = Keeper::new(Memory::new()).ttl(TTL);
    let guard = keeper.mutex("a").lock().await.unwrap();
    let steps = Cell::new(0);
    let mut work = pin!(guard.while_held(count(&steps)));
    assert!(poll_once(work.as_mut()).await.is_pending());
    stall().await;
    assert_eq!(work.await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(steps.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn no_step_of_the_work_runs_after_the_deadline_of_one_of_several_guards() {
    let keeper = Keeper::new(Memory::new()).ttl(TTL);
    let guards = keeper.lock_all(["a", "b"]).lock().await.unwrap();
    guards.get("a").unwrap().extend(TTL * 3).await.unwrap();
    let steps = Cell::new(0);
    let mut work = pin!(guards.while_held(count(&steps)));
    assert!(poll_once(work.as_mut()).await.is_pending());
    stall().await;
    let error = work.await.unwrap_err();
    assert_eq!((error.kind(), error.name()), (ErrorKind::Lost, Some("b")));
    assert_eq!(steps.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn no_step_of_the_work_runs_after_the_deadline_of_a_leadership() {
    let keeper = Keeper::new(Memory::new()).ttl(TTL);
    let election = keeper.election("a");
    let steps = Cell::new(0);
    let terms = Cell::new(0);
    let mut work = pin!(election.run_while_leader(|_| {
        terms.set(terms.get() + 1);
        count(&steps)
    }));
    assert!(poll_once(work.as_mut()).await.is_pending());
    assert_eq!((terms.get(), steps.get()), (1, 1));
    stall().await;
    // The second poll may start the next term.
    assert!(poll_once(work.as_mut()).await.is_pending());
    assert_eq!(steps.get(), terms.get(), "the work of the first term was polled again");
}

#[tokio::test(start_paused = true)]
async fn owned_work_stops_at_a_loss_and_not_at_a_release() {
    let keeper = Keeper::new(Memory::new()).ttl(TTL);
    let guard = keeper.mutex("a").lock().await.unwrap();
    let steps = Cell::new(0);
    let mut work = pin!(guard.while_held_owned(count(&steps)));
    assert!(poll_once(work.as_mut()).await.is_pending());
    stall().await;
    assert_eq!(work.await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(steps.get(), 1);
    drop(guard);

    let guard = keeper.mutex("a").lock().await.unwrap();
    let work = guard.while_held_owned(async { stall().await });
    guard.release().await.unwrap();
    work.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn work_that_completes_after_the_deadline_is_reported_as_lost() {
    let keeper = Keeper::new(Memory::new()).ttl(TTL);
    let guards = keeper.lock_all(["a", "b"]).lock().await.unwrap();
    let error = guards.while_held(stall()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
}

#[tokio::test(start_paused = true)]
async fn while_held_cancels_the_work_when_the_lock_is_lost() {
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
