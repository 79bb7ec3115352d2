//! The future that drives a claim through its whole life: attempt, wait, hold, renew, release or lose.
//!
//! [`ClaimDriver::drive`] does not depend on which task polls it:
//!
//! - until there is a guard, the caller's own task does, so an uncontended lock costs one answer of the store and no hop
//!   to another task;
//! - while the guard lives, a background task of the keeper's runtime does;
//! - `release().await` polls it right in the releasing task, again without a hop;
//! - if an acquire or a release is dropped half way, the background task continues in any state: an attempt in flight
//!   is awaited, and what it was granted is released.
//!
//! So cancellation is not a case of its own in the code below: it is an [`Ending`](crate::engine::outcome::Ending) that the
//! driver finds at the next step.

mod acquire;
mod renew;

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use self::renew::RenewalSchedule;
use crate::clock::Moment;
use crate::contract::{Capabilities, Claim, Grant, Release};
use crate::engine::hold::{Hold, ReleaseOutcome};
use crate::engine::observe::{self, AcquireKind};
use crate::engine::outcome::AcquireOutcome;
use crate::futures::{boxed, within};
use crate::release::{LEAVE_WITHIN, release_until_confirmed};

/// How to acquire.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AcquireOptions {
    /// How long to wait for other holders: `None` is without limit, zero is one attempt.
    pub(crate) wait: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) method: AcquireMethod,
}

/// What is sent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AcquireMethod {
    /// An attempt.
    Attempt,
    /// A renewal: the owner holds the lock already.
    Adopt,
}

impl AcquireOptions {
    fn is_try(self) -> bool {
        self.wait == Some(Duration::ZERO)
    }

    fn kind(self) -> AcquireKind {
        match self.method {
            AcquireMethod::Adopt => AcquireKind::Adopt,
            AcquireMethod::Attempt if self.is_try() => AcquireKind::Try,
            AcquireMethod::Attempt => AcquireKind::Wait,
        }
    }
}

/// The shortest pause between two requests of the same kind.
const MIN_PAUSE: Duration = Duration::from_millis(1);

/// A claim, and what drives it.
pub(crate) struct ClaimDriver {
    pub(crate) claim: Box<dyn Claim>,
    pub(crate) hold: Arc<Hold>,
    pub(crate) options: AcquireOptions,
}

/// What the driver has to do before it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cleanup {
    /// The store may have something of this claim: release it.
    Release,
    /// The store has nothing, or something that is to stay.
    None,
    /// The caller's time is up: leave the queue before the caller is told.
    LeaveQueue {
        /// How long the caller has waited.
        waited: Duration,
    },
}

/// A grant, and from when its validity counts.
struct Granted {
    sent: Moment,
    grant: Grant,
}

impl ClaimDriver {
    /// Drives the claim through its whole life.
    pub(crate) async fn drive(mut self) {
        let acquired = match self.options.method {
            AcquireMethod::Adopt => boxed(self.adopt()).await,
            AcquireMethod::Attempt => self.acquire().await,
        };
        let cleanup = match acquired {
            Ok(granted) => {
                self.hold.succeed();
                let lease = granted.grant.valid_for.unwrap_or(Duration::MAX).min(self.hold.ttl());
                let schedule = RenewalSchedule::new(granted.sent, lease);
                yield_to_poller(&self.hold).await;
                self.keep(schedule).await
            }
            Err(cleanup) => cleanup,
        };
        match cleanup {
            Cleanup::Release => {
                yield_to_poller(&self.hold).await;
                self.release_until_confirmed().await;
            }
            Cleanup::LeaveQueue { waited } => boxed(self.leave_queue(waited)).await,
            Cleanup::None => {}
        }
        let Self { claim, hold, .. } = self;
        drop(claim);
        hold.finished();
    }

    fn capabilities(&self) -> Capabilities {
        self.hold.context.capabilities
    }

    /// Leaves the queue, then tells the caller that its time is up.
    ///
    /// In this order, since a place in the queue can be handed the lock, and can make the tries of others fail. A lock
    /// that is handed over in the meantime is released with it. If the store does not confirm in time, the
    /// caller is told first, and the release goes on in the background.
    async fn leave_queue(&mut self, waited: Duration) {
        let hold = self.hold.clone();
        let end = Moment::now().add(LEAVE_WITHIN);
        let mut leaving = boxed(self.release_until_confirmed());
        let left = within(&mut leaving, end).await.is_some();
        hold.fail(AcquireOutcome::NotInTime { waited });
        if !left {
            yield_to_poller(&hold).await;
            leaving.await;
        }
    }

    /// Releases until the store confirms it, or until any lease has expired.
    async fn release_until_confirmed(&mut self) {
        self.hold.releasing();
        let release = release_until_confirmed(&mut *self.claim, self.hold.ttl(), |error| {
            let error = self.hold.error("release", error.clone());
            self.hold.released(Err(error));
        });
        let outcome = match release.await {
            Some(Release::Released) => ReleaseOutcome::Released,
            Some(Release::WasNotHeld) => ReleaseOutcome::AlreadyLost,
            None => {
                observe::release_unconfirmed(self.hold.subject());
                return;
            }
        };
        self.hold.released(Ok(outcome));
    }
}

/// Ready when something was requested of the driver. Registers no waker: a request is followed by a poll of the driver,
/// or by `request_repoll`.
async fn requested(hold: &Hold) {
    std::future::poll_fn(|_| if hold.is_requested() { Poll::Ready(()) } else { Poll::Pending })
        .await;
}

/// Ready when the hold is to end; like [`requested`].
async fn ended(hold: &Hold) {
    std::future::poll_fn(|_| match hold.ending() {
        Some(_) => Poll::Ready(()),
        None => Poll::Pending,
    })
    .await;
}

/// Ends this poll, so that the acquire that polls can take its outcome, and lets the next poll go on.
///
/// Without this the first poll would already create timers that a short hold never needs. Registers no waker: an acquire
/// that finds an outcome hands the driver to a background task. Does nothing if there is no outcome to take, or if
/// the background task polls.
async fn yield_to_poller(hold: &Hold) {
    let mut yielded = false;
    std::future::poll_fn(|_| {
        if yielded || !hold.has_acquire_outcome() || hold.is_in_background() {
            return Poll::Ready(());
        }
        yielded = true;
        Poll::Pending
    })
    .await;
}
