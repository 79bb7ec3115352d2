//! The engine: ask, wait, hold, renew, release or lose. Written once, for every store.
//!
//! The whole life of a claim is one future, [`drive`]. It does not care who polls it:
//!
//! - until there is a guard, the caller's own task does, so an uncontended lock costs one answer of
//!   the store and no hop to another task;
//! - while the guard lives, a task of the keeper's runtime does (the [`Tender`](crate::engine::polling));
//! - `release().await` polls it right in the releasing task, again without a hop;
//! - if an acquire or a release is dropped half way, the tender takes it from there, in whatever state
//!   it is: an attempt in flight is awaited and what it was granted is released.
//!
//! So cancellation is not a case of its own in the code below: it is an [`Ending`](crate::engine::hold::Ending) that the driver
//! finds at the next step.

mod acquire;
mod keep;

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use self::keep::Pulse;
use crate::clock::Moment;
use crate::contract::{Capabilities, Claim, Grant, Release};
use crate::engine::hold::{Hold, ReleaseOutcome, Verdict};
use crate::engine::observe;
use crate::futures::{boxed, within};
use crate::release::{LEAVE_WITHIN, release_until_confirmed};

/// How an acquire goes about it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// How long to wait for other holders: `None` is for ever, zero is one attempt.
    pub(crate) wait: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    /// The owner holds already: renew instead of asking.
    pub(crate) adopt: bool,
}

/// The shortest pause between two questions of the same kind.
const LEAST_PAUSE: Duration = Duration::from_millis(1);

/// A claim on its way.
pub(crate) struct Job {
    pub(crate) claim: Box<dyn Claim>,
    pub(crate) hold: Arc<Hold>,
    pub(crate) plan: Plan,
}

/// What the store may have of this claim when the driver is through with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// Something that is to be released.
    Something,
    /// Nothing, or something that is to stay.
    Nothing,
    /// A place in the queue of a caller whose time is up: it is left before the caller is told.
    Place {
        /// How long the caller has waited.
        waited: Duration,
    },
}

/// A grant, and from when it counts.
struct Granted {
    sent: Moment,
    grant: Grant,
}

/// Drives a claim through its whole life.
pub(crate) async fn drive(mut job: Job) {
    let acquired = if job.plan.adopt { boxed(job.adopt()).await } else { job.acquire().await };
    let left = match acquired {
        Ok(granted) => {
            job.hold.succeed();
            let lease = granted.grant.valid_for.unwrap_or(Duration::MAX).min(job.hold.ttl());
            let pulse = Pulse::new(granted.sent, lease);
            leave_to_the_next_poll(&job.hold).await;
            job.keep(pulse).await
        }
        Err(left) => left,
    };
    match left {
        Left::Something => {
            leave_to_the_next_poll(&job.hold).await;
            job.settle().await;
        }
        Left::Place { waited } => boxed(job.leave(waited)).await,
        Left::Nothing => {}
    }
    let Job { claim, hold, .. } = job;
    drop(claim);
    hold.finished();
}

impl Job {
    fn capabilities(&self) -> Capabilities {
        self.hold.context.capabilities
    }

    /// Leaves the queue, then tells the caller that its time is up.
    ///
    /// In this order, since a place in the queue can be handed the lock, and can make the tries of others fail. A lock
    /// that is handed over in the meantime is released with it. If the store does not confirm in time, the
    /// caller is told first, and the release goes on in the background.
    async fn leave(&mut self, waited: Duration) {
        let hold = self.hold.clone();
        let end = Moment::now().add(LEAVE_WITHIN);
        let mut leaving = boxed(self.settle());
        let left = within(&mut leaving, end).await.is_some();
        hold.fail(Verdict::NotInTime { waited });
        if !left {
            leave_to_the_next_poll(&hold).await;
            leaving.await;
        }
    }

    /// Releases until the store confirms it, or until any lease has run out by itself.
    async fn settle(&mut self) {
        self.hold.settling();
        let release = release_until_confirmed(&mut *self.claim, self.hold.ttl(), |error| {
            let error = self.hold.error("release", error.clone());
            self.hold.released(Err(error));
        });
        let outcome = match release.await {
            Some(Release::Released) => ReleaseOutcome::Released,
            Some(Release::WasNotHeld) => ReleaseOutcome::AlreadyLost,
            None => {
                observe::release_unconfirmed(&self.hold);
                return;
            }
        };
        self.hold.released(Ok(outcome));
    }
}

/// Ready when the guard has asked for something. Registers no waker: whoever asks also polls the
/// driver, or nudges the tender.
async fn asked(hold: &Hold) {
    std::future::poll_fn(|_| if hold.is_asked() { Poll::Ready(()) } else { Poll::Pending }).await;
}

/// Ready when the hold is to end; like [`asked`].
async fn ended(hold: &Hold) {
    std::future::poll_fn(|_| match hold.ending() {
        Some(_) => Poll::Ready(()),
        None => Poll::Pending,
    })
    .await;
}

/// Stops this poll, so that whoever polls can take the verdict, and lets the next poll go on.
///
/// Without this the first poll would already set up timers that a short hold never needs. Registers
/// no waker: an acquire that finds a verdict hands the driver to a tender. If nobody
/// waits for a verdict any more, or the tender drives, this does nothing.
async fn leave_to_the_next_poll(hold: &Hold) {
    let mut left = false;
    std::future::poll_fn(|_| {
        if left || !hold.has_verdict() || hold.is_tended() {
            return Poll::Ready(());
        }
        left = true;
        Poll::Pending
    })
    .await;
}
