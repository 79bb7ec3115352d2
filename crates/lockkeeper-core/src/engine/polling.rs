//! Who polls the driver of a claim, and when.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::contract::{BoxFuture, Claim};
use crate::engine::context::KeeperContext;
use crate::engine::driver::{Job, Plan, drive};
use crate::engine::hold::{Ending, Hold, ReleaseOutcome, Verdict};
use crate::error::Result;
use crate::loss::LossReason;

/// A hold with a shorter ttl than this gets its tender without waiting for the steward's round.
const TOO_SHORT_TO_WAIT: Duration = Duration::from_millis(100);

/// A claim's driver and whoever polls it at the moment.
pub(crate) struct Driver {
    pub(crate) hold: Arc<Hold>,
    seat: Mutex<Seat>,
    /// Somebody wanted the tender to look while the seat was taken.
    look_again: AtomicBool,
    /// What the acquire did since somebody last looked: see [`Attention`].
    attention: AtomicU8,
}

/// Whether somebody polls an acquire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Attention {
    /// Nobody has, since the last look.
    None,
    /// Its caller has.
    Polled,
    /// It has ended, or was dropped.
    Over,
}

struct Seat {
    /// `None` when all is done.
    future: Option<BoxFuture<'static, ()>>,
    /// Whether there is a tender, and how to wake it once it has been polled.
    tended: bool,
    tender: Option<Waker>,
}

impl Driver {
    pub(crate) fn new(claim: Box<dyn Claim>, hold: Arc<Hold>, plan: Plan) -> Arc<Self> {
        let job = Job { claim, hold: hold.clone(), plan };
        let future: BoxFuture<'static, ()> = Box::pin(drive(job));
        Arc::new(Self {
            hold,
            seat: Mutex::new(Seat { future: Some(future), tended: false, tender: None }),
            look_again: AtomicBool::new(false),
            attention: AtomicU8::new(Attention::Polled as u8),
        })
    }

    fn heed(&self, attention: Attention) {
        self.attention.store(attention as u8, Ordering::Relaxed);
    }

    /// Whether its acquire was polled since this was last asked.
    pub(crate) fn attention(&self) -> Attention {
        let (polled, none) = (Attention::Polled as u8, Attention::None as u8);
        let swap =
            self.attention.compare_exchange(polled, none, Ordering::Relaxed, Ordering::Relaxed);
        match swap {
            Ok(_) => Attention::Polled,
            Err(now) if now == none => Attention::None,
            Err(_) => Attention::Over,
        }
    }

    fn seat(&self) -> MutexGuard<'_, Seat> {
        // A store that panics poisons this; the tender then reports the hold as lost.
        self.seat.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drives on, in the caller's task.
    pub(crate) fn poll(self: &Arc<Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.poll_in(self.seat(), cx)
    }

    fn poll_in(self: &Arc<Self>, mut seat: MutexGuard<'_, Seat>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(future) = &mut seat.future else { return Poll::Ready(()) };
        {
            // Timers must belong to the keeper's runtime: the task that polls later may live longer
            // than the runtime that polls now.
            let _entered = self.hold.context.enter();
            if future.as_mut().poll(cx).is_pending() {
                drop(seat);
                self.mind_the_mark();
                return Poll::Pending;
            }
        }
        let (future, tender) = (seat.future.take(), seat.tender.take());
        let alone = !seat.tended;
        drop(seat);
        drop(future);
        if let Some(tender) = tender {
            tender.wake();
        } else if alone {
            self.hold.context.dismiss(self);
        }
        Poll::Ready(())
    }

    /// Lets a task of the keeper's runtime drive from now on, if none does yet.
    pub(crate) fn tend(self: &Arc<Self>) {
        let mut seat = self.seat();
        if seat.future.is_some() && !seat.tended {
            seat.tended = true;
            drop(seat);
            self.hold.set_tended();
            self.hold.context.spawn(Tender(self.clone()));
        } else {
            drop(seat);
            self.mind_the_mark();
        }
    }

    /// Nudges for whoever found the seat taken. To be called by whoever leaves it.
    fn mind_the_mark(self: &Arc<Self>) {
        if self.look_again.swap(false, Ordering::SeqCst) {
            self.nudge();
        }
    }

    /// Goes on at once, as far as that is possible without waiting, and leaves the rest to a tender:
    /// for a guard that is dropped, which then need not wait for a task to be scheduled.
    pub(crate) fn let_go(self: &Arc<Self>) {
        // Whoever has the seat at this moment may have looked too early: the tender looks again.
        if let Ok(seat) = self.seat.try_lock() {
            let mut context = Context::from_waker(Waker::noop());
            // A drop must not panic, whatever a store does. The tender finds out and reports a loss.
            let step = AssertUnwindSafe(|| self.poll_in(seat, &mut context));
            let _ = std::panic::catch_unwind(step);
        }
        self.nudge();
    }

    /// Nobody will drive any more: whoever relies on it is told, unless all is done.
    pub(crate) fn abandon(&self, reason: LossReason) {
        let future = self.seat().future.take();
        if let Some(future) = future {
            let _entered = self.hold.context.enter();
            drop(future);
            self.hold.abandoned(reason);
        }
    }

    /// Makes a tender look, because something was asked or another poller has gone.
    pub(crate) fn nudge(self: &Arc<Self>) {
        // Never waits for the seat: whoever has it may be waking us right now. The mark is set before
        // the seat is tried, so whoever has it finds the mark when he leaves.
        self.look_again.store(true, Ordering::SeqCst);
        let tender = match self.seat.try_lock() {
            Ok(seat) => seat.tender.clone(),
            Err(TryLockError::Poisoned(seat)) => seat.into_inner().tender.clone(),
            Err(TryLockError::WouldBlock) => return,
        };
        self.look_again.store(false, Ordering::SeqCst);
        match tender {
            Some(tender) => tender.wake(),
            None => self.tend(),
        }
    }
}

/// Drives in the background, for as long as there is something to drive.
struct Tender(Arc<Driver>);

impl Future for Tender {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut seat = self.0.seat();
        if seat.future.is_none() {
            return Poll::Ready(());
        }
        match &seat.tender {
            Some(waker) if waker.will_wake(cx.waker()) => {}
            _ => seat.tender = Some(cx.waker().clone()),
        }
        drop(seat);
        self.0.poll(cx)
    }
}

impl Drop for Tender {
    fn drop(&mut self) {
        // Dropped before the end: the runtime is being shut down, or the store panicked.
        let panicking = std::thread::panicking();
        let failed = if panicking { LossReason::StoreFailed } else { LossReason::RuntimeShutdown };
        self.0.abandon(failed);
    }
}

/// An acquire: drives in the caller's task until there is a verdict.
///
/// Dropped before that, it leaves the driver to a tender, which releases whatever the store granted
/// or is about to grant.
pub(crate) struct Acquire {
    driver: Option<Arc<Driver>>,
    listed: bool,
}

/// What came of an acquire.
pub(crate) enum Acquired {
    Held(Arc<Driver>),
    NotInTime { waited: Duration },
}

impl Acquire {
    pub(crate) fn new(driver: Arc<Driver>) -> Self {
        Self { driver: Some(driver), listed: false }
    }
}

impl Future for Acquire {
    type Output = Result<Acquired>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let driver = self.driver.clone().expect("an acquire is not polled after it was ready");
        driver.heed(Attention::Polled);
        let step = AssertUnwindSafe(|| driver.poll(cx).is_ready());
        if let Err(panic) = std::panic::catch_unwind(step) {
            // A timer panics when its runtime has been shut down. That is no reason for us to.
            if driver.hold.context.runtime_is_gone() {
                driver.abandon(LossReason::RuntimeShutdown);
                self.driver = None;
                driver.heed(Attention::Over);
                return Poll::Ready(Err(KeeperContext::runtime_gone()));
            }
            std::panic::resume_unwind(panic);
        }
        let Some(verdict) = driver.hold.take_verdict(cx.waker()) else {
            if !self.listed {
                self.listed = true;
                driver.hold.context.list(&driver);
            }
            return Poll::Pending;
        };
        self.driver = None;
        driver.heed(Attention::Over);
        Poll::Ready(match verdict {
            Verdict::Granted => {
                // A tender that is there already must look again: our polls took its wake-ups.
                if driver.hold.ttl() < TOO_SHORT_TO_WAIT || driver.hold.is_tended() {
                    driver.nudge();
                }
                if !driver.hold.context.entrust(&driver) {
                    driver.abandon(LossReason::RuntimeShutdown);
                    return Poll::Ready(Err(KeeperContext::runtime_gone()));
                }
                Ok(Acquired::Held(driver))
            }
            Verdict::NotInTime { waited } => {
                driver.nudge();
                Ok(Acquired::NotInTime { waited })
            }
            Verdict::Failed(error) => {
                driver.nudge();
                Err(error)
            }
        })
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        if let Some(driver) = self.driver.take() {
            driver.heed(Attention::Over);
            driver.hold.end(Ending::Drop);
            driver.nudge();
        }
    }
}

/// A release: drives in the caller's task until the store has answered once.
///
/// Dropped before that, or if the store failed, the tender goes on.
pub(crate) struct Releasing {
    driver: Arc<Driver>,
    done: bool,
}

impl Releasing {
    pub(crate) fn new(driver: Arc<Driver>) -> Self {
        Self { driver, done: false }
    }
}

impl Future for Releasing {
    type Output = Result<ReleaseOutcome>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.done = self.driver.poll(cx).is_ready();
        match self.driver.hold.take_outcome(cx.waker()) {
            Some(outcome) => Poll::Ready(outcome),
            None => Poll::Pending,
        }
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        if !self.done {
            self.driver.nudge();
        }
    }
}
