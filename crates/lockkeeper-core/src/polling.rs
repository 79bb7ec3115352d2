//! Who polls the driver of a claim, and when.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::backend::{BoxFuture, Claim};
use crate::driver::{Job, Plan, drive};
use crate::error::Result;
use crate::guard::Guard;
use crate::hold::{Ending, Hold, ReleaseOutcome, Verdict};
use crate::keeper::Shared;

/// A hold with a shorter ttl than this gets its tender without waiting for the steward's round.
const TOO_SHORT_TO_WAIT: Duration = Duration::from_millis(100);

/// A claim's driver and whoever polls it at the moment.
pub(crate) struct Driver {
    pub(crate) hold: Arc<Hold>,
    seat: Mutex<Seat>,
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
        })
    }

    fn seat(&self) -> MutexGuard<'_, Seat> {
        // A store that panics poisons this; the tender then reports the hold as lost.
        self.seat.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drives on, in the caller's task.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll_in(self.seat(), cx)
    }

    fn poll_in(&self, mut seat: MutexGuard<'_, Seat>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(future) = &mut seat.future else { return Poll::Ready(()) };
        {
            // Timers must belong to the keeper's runtime: the task that polls later may live longer
            // than the runtime that polls now.
            let _entered = self.hold.shared.enter();
            if future.as_mut().poll(cx).is_pending() {
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
            self.hold.shared.dismiss(self);
        }
        Poll::Ready(())
    }

    /// Lets a task of the keeper's runtime drive from now on, if none does yet.
    pub(crate) fn tend(self: &Arc<Self>) {
        let mut seat = self.seat();
        if seat.future.is_some() && !seat.tended {
            seat.tended = true;
            drop(seat);
            self.hold.shared.spawn(Tender(self.clone()));
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
    pub(crate) fn abandon(&self) {
        let future = self.seat().future.take();
        if future.is_some() {
            self.hold.abandoned();
        }
    }

    /// Makes a tender look, because something was asked or another poller has gone.
    pub(crate) fn nudge(self: &Arc<Self>) {
        let tender = self.seat().tender.clone();
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
        self.0.abandon();
    }
}

/// An acquire: drives in the caller's task until there is a verdict.
///
/// Dropped before that, it leaves the driver to a tender, which releases whatever the store granted
/// or is about to grant.
pub(crate) struct Acquire(Option<Arc<Driver>>);

/// What came of an acquire.
pub(crate) enum Acquired {
    Guard(Guard),
    NotInTime { waited: Duration },
}

impl Acquire {
    pub(crate) fn new(driver: Arc<Driver>) -> Self {
        Self(Some(driver))
    }
}

impl Future for Acquire {
    type Output = Result<Acquired>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let driver = self.0.as_ref().expect("an acquire is not polled after it was ready");
        let _ = driver.poll(cx);
        let Some(verdict) = driver.hold.take_verdict() else { return Poll::Pending };
        let driver = self.0.take().expect("it was there a moment ago");
        Poll::Ready(match verdict {
            Verdict::Granted => {
                if driver.hold.ttl() < TOO_SHORT_TO_WAIT {
                    driver.tend();
                }
                if !driver.hold.shared.entrust(&driver) {
                    driver.abandon();
                    return Poll::Ready(Err(Shared::runtime_gone()));
                }
                Ok(Acquired::Guard(Guard::new(driver)))
            }
            Verdict::NotInTime { waited } => {
                driver.tend();
                Ok(Acquired::NotInTime { waited })
            }
            Verdict::Failed(error) => {
                driver.tend();
                Err(error)
            }
        })
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        if let Some(driver) = self.0.take() {
            driver.hold.end(Ending::Release);
            driver.tend();
        }
    }
}

/// A release: drives in the caller's task until the store has answered once.
///
/// Dropped before that, or if the store failed, the tender goes on.
pub(crate) struct Releasing(pub(crate) Arc<Driver>);

impl Future for Releasing {
    type Output = Result<ReleaseOutcome>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let _ = self.0.poll(cx);
        match self.0.hold.take_outcome(cx.waker()) {
            Some(outcome) => Poll::Ready(outcome),
            None => Poll::Pending,
        }
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        self.0.nudge();
    }
}
