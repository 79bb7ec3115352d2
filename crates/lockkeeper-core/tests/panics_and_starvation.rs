//! Stores that panic, threads that exit, and loops that do not yield.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use common::{millis, poll_once, secs};
use lockkeeper_core::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, ErrorKind, Fence, Guard,
    Inspector, Keeper, Memory, Release, ReleaseOutcome, Renewal, Result, State,
};
use tokio::time::{sleep, timeout};

/// A store that panics in one operation.
#[derive(Debug)]
struct Panics(Memory, &'static str);

impl Backend for Panics {
    fn name(&self) -> &'static str {
        "panics"
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        Ok(Box::new(PanicsClaim(self.0.claim(spec)?, self.1)))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.0.inspector()
    }
}

struct PanicsClaim(Box<dyn Claim>, &'static str);

impl PanicsClaim {
    fn panic_in(&self, op: &str) {
        assert!(self.1 != op, "on purpose, in {op}");
    }
}

impl Claim for PanicsClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        self.panic_in("attempt");
        if self.1 == "attempt, polled again" {
            return Box::pin(async {
                // The first poller polls twice; the panic is in the poll of the next poller.
                let mut polls = 0..2;
                poll_fn(|_| polls.next().map_or(Poll::Ready(()), |_| Poll::Pending)).await;
                panic!("on purpose, in an attempt that was polled again")
            });
        }
        self.0.attempt(floor)
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        self.panic_in("changed");
        self.0.changed()
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        self.panic_in("renew");
        self.0.renew(ttl)
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        self.panic_in("downgrade");
        self.0.downgrade(ttl)
    }

    fn set_fence(&mut self, fence: Fence) {
        self.0.set_fence(fence);
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        self.panic_in("release");
        self.0.release()
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_whose_store_panics_is_lost() {
    for op in ["changed", "renew"] {
        let keeper = Keeper::new(Panics(Memory::new(), op));
        let guard = keeper.mutex("a").lock().await.unwrap();
        timeout(secs(11), guard.lost()).await.expect("the loss");
        assert_eq!(guard.state(), State::Lost);
        assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
        timeout(secs(1), keeper.close()).await.expect("the keeper closes");
    }
}

#[tokio::test(start_paused = true)]
async fn dropping_a_guard_never_panics_even_if_the_store_does() {
    let keeper = Keeper::new(Panics(Memory::new(), "release"));
    drop(keeper.mutex("a").lock().await.unwrap());
    let guard = keeper.mutex("b").lock().await.unwrap();
    sleep(millis(10)).await;
    drop(guard);
    timeout(secs(1), keeper.close()).await.expect("the keeper closes");
}

#[tokio::test(start_paused = true)]
async fn a_store_panic_in_an_attempt_reaches_only_its_caller() {
    let keeper = Keeper::new(Panics(Memory::new(), "attempt"));
    let mutex = keeper.mutex("a");
    let acquire = tokio::spawn(async move { mutex.lock().await });
    assert!(acquire.await.unwrap_err().is_panic());
    timeout(secs(1), keeper.close()).await.expect("the keeper closes");
}

#[tokio::test(start_paused = true)]
async fn an_acquire_fails_if_the_store_panics_in_its_background_task() {
    let keeper = Keeper::new(Panics(Memory::new(), "attempt, polled again"));
    let mutex = keeper.mutex("a");
    let mut acquire = pin!(mutex.lock());
    assert!(poll_once(acquire.as_mut()).await.is_pending());
    // `close` moves the acquire to the background, where the store panics.
    timeout(secs(1), keeper.close()).await.expect("the keeper closes");
    let error = timeout(secs(60), acquire).await.expect("an error").unwrap_err();
    assert_eq!(error.to_string(), "panics: lock \"a\": the store panicked");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}

#[tokio::test]
async fn a_guard_in_a_thread_local_is_released_when_its_thread_exits() {
    thread_local! {
        static KEPT: RefCell<Option<Guard>> = const { RefCell::new(None) };
    }
    let keeper = Keeper::new(Memory::new());
    let guard = keeper.mutex("a").lock().await.unwrap();
    std::thread::spawn(move || KEPT.set(Some(guard))).join().expect("does not panic");
    let again = keeper.mutex("a").try_lock_for(secs(20)).await.unwrap();
    assert!(again.is_some());
}

#[tokio::test]
async fn a_loop_that_locks_without_pause_does_not_starve_other_tasks() {
    let keeper = Keeper::new(Memory::new());
    let done = Arc::new(AtomicBool::new(false));
    let other = tokio::spawn({
        let done = done.clone();
        async move { done.store(true, Ordering::SeqCst) }
    });
    let mutex = keeper.mutex("a");
    let mut rounds = 0_u64;
    while !done.load(Ordering::SeqCst) {
        mutex.lock().await.unwrap().release().await.unwrap();
        rounds += 1;
        assert!(rounds < 100_000, "the other task never ran");
    }
    other.await.unwrap();
}
