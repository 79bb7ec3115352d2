//! The future that drives a claim through its whole life: attempt, wait, hold, renew, release or loss.
//!
//! [`ClaimDriver::drive`] does not depend on which task polls it:
//!
//! - Until there is a guard, the caller's own task polls it. An uncontended lock costs one round trip and is not moved to
//!   another task.
//! - While the guard exists, a background task on the keeper's runtime polls it, unless the hold is very short.
//! - `release().await` polls it in the caller's task.
//! - If an acquire or a release is dropped before it is ready, the background task continues from the same state. It
//!   awaits an attempt in flight and releases the grant.
//!
//! So cancellation needs no separate code path. It sets an [`Ending`](crate::engine::outcome::Ending), which the driver
//! checks between steps.

mod renew;
mod wait;

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use self::renew::RenewalSchedule;
use crate::clock::{Moment, sleep_until};
use crate::contract::{
    Attempt, BoxFuture, Capabilities, Claim, Fences, Grant, Kind, Mode, Release, Renewal,
};
use crate::engine::context::KeeperContext;
use crate::engine::hold::{Hold, ReleaseOutcome};
use crate::engine::observe::{self, AcquireKind};
use crate::engine::outcome::{AcquireOutcome, Reporter};
use crate::error::{Error, Result};
use crate::futures::{at_once, boxed, within};
use crate::loss::LossReason;
use crate::release::{LEAVE_WITHIN, release_until_confirmed};

/// The shortest pause between two requests of the same kind.
const MIN_PAUSE: Duration = Duration::from_millis(1);
/// The longest timeout of an attempt or an adoption, for any TTL.
const MAX_ATTEMPT_TIMEOUT: Duration = Duration::from_secs(30);
/// The minimum time that the caller waits for the first answer, even if its `max_wait` is shorter. A shorter TTL limits it.
const MIN_FIRST_TIMEOUT: Duration = Duration::from_secs(1);

/// How to acquire.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AcquireOptions {
    /// How long to wait for other holders. `None` means without limit; zero means a try.
    pub(crate) wait: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) method: AcquireMethod,
}

/// The request that an acquire sends first.
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

/// A claim, and the state that its driver shares with the acquire and the guard.
pub(crate) struct ClaimDriver {
    pub(crate) claim: Box<dyn Claim>,
    pub(crate) hold: Arc<Hold>,
    pub(crate) options: AcquireOptions,
}

/// What the driver has to do before it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cleanup {
    /// Release the claim: the store may have its hold or its queue entry.
    Release,
    /// Nothing. Either the store has no record of the claim, or the hold must stay there because it was detached or could not
    /// be adopted.
    None,
    /// Leave the queue, then report the timeout to the caller.
    LeaveQueue {
        /// How long the caller has waited.
        waited: Duration,
    },
}

/// A grant of the store.
struct Granted {
    /// The validity of the grant counts from here.
    sent: Moment,
    grant: Grant,
}

/// A waiting claim whose earlier attempt the store has answered.
#[derive(Debug, Clone, Copy)]
struct Waiter {
    since: Moment,
    /// Whether an attempt was answered with `Contended`.
    contended: bool,
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
                self.hold_until_end(schedule).await
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
        hold.driver_ended();
    }

    fn capabilities(&self) -> Capabilities {
        self.hold.context.capabilities
    }

    /// Sends the first attempt, and waits if it is not granted.
    async fn acquire(&mut self) -> Result<Granted, Cleanup> {
        if self.hold.ending().is_some() {
            return Err(Cleanup::None);
        }
        let start = Moment::now();
        self.hold.observer.acquiring(self.hold.subject(), self.options.kind(), start);
        let until = self.options.wait.and_then(|wait| start.checked_add(wait));
        match self.attempt(start, until, None).await {
            Ok(Attempt::Granted(grant)) if self.accept(start, grant) => {
                self.unless_ended(Granted { sent: start, grant })
            }
            answer => boxed(self.retry_until_granted(start, until, answer)).await,
        }
    }

    /// Sends one attempt. `waiter` is set if the store has answered an attempt before.
    async fn attempt(
        &mut self,
        sent: Moment,
        until: Option<Moment>,
        waiter: Option<Waiter>,
    ) -> Result<Attempt> {
        let floor = match self.hold.mode() {
            Mode::Exclusive if self.has_floors() => {
                self.hold.context.floors.next(&self.hold.name, sent)?
            }
            // Shared holders get the current fence: a floor would raise it for each of them.
            Mode::Exclusive | Mode::Shared | Mode::Permits { .. } => None,
        };
        let until = until.filter(|_| !self.options.is_try());
        let mut attempt = self.claim.attempt(floor);
        match at_once(&mut attempt).await {
            Some(answer) => answer,
            None => boxed(await_answer(attempt, &self.hold, sent, until, waiter)).await,
        }
    }

    /// Returns whether the store honours floors. If so, the fence of each grant of a name determines the next floor.
    fn has_floors(&self) -> bool {
        self.capabilities().fences == Fences::Raisable
    }

    /// Records a grant of the store. Returns false if its lease has expired.
    fn accept(&self, sent: Moment, grant: Grant) -> bool {
        if let Some(fence) = grant.fence
            && self.has_floors()
            && self.hold.requested_mode.kind() == Kind::Lock
        {
            self.hold.context.floors.granted(&self.hold.name, fence, sent);
        }
        self.hold.granted(sent, grant, self.options.max_hold)
    }

    /// Rejects a grant if the acquire was dropped in the meantime.
    fn unless_ended(&self, granted: Granted) -> Result<Granted, Cleanup> {
        if self.hold.ending().is_some() { Err(Cleanup::Release) } else { Ok(granted) }
    }

    /// Renews the hold of a ticket. The fence of the ticket does not come from the store, so it sets no floor.
    async fn adopt(&mut self) -> Result<Granted, Cleanup> {
        let sent = Moment::now();
        self.hold.observer.acquiring(self.hold.subject(), self.options.kind(), sent);
        let ttl = self.hold.ttl();
        let timeout = ttl.min(MAX_ATTEMPT_TIMEOUT);
        let mut renewal = self.claim.renew(ttl);
        let answer = tokio::select! {
            biased;
            () = requested(&self.hold) => return Err(Cleanup::None),
            answer = within(&mut renewal, sent.add(timeout)) => answer,
        };
        drop(renewal);
        let valid_for = match answer {
            Some(Ok(Renewal::Renewed { valid_for })) => Ok(Some(valid_for)),
            Some(Ok(Renewal::Held)) => Ok(None),
            Some(Ok(Renewal::Lost(_))) => Err(Error::no_such_hold()),
            Some(Err(error)) => Err(error),
            None => Err(Error::no_answer(timeout)),
        };
        let granted = valid_for.and_then(|valid_for| {
            let grant = Grant { fence: self.hold.fence(), fence_is_past: false, valid_for };
            let is_valid = self.hold.granted(sent, grant, self.options.max_hold);
            is_valid
                .then_some(Granted { sent, grant })
                .ok_or_else(|| Error::lost(LossReason::Expired))
        });
        granted.map_err(|error| {
            self.hold.fail_with("adopt", error);
            Cleanup::None
        })
    }

    /// Leaves the queue, then reports the timeout to the caller.
    ///
    /// The order matters: as long as the queue entry exists, it can be granted the lock, and it makes the tries of other claims
    /// fail. A grant that arrives before the entry is removed is released with it. If the store does not confirm the release
    /// within [`LEAVE_WITHIN`], the timeout is reported, and the release continues in the background.
    async fn leave_queue(&mut self, waited: Duration) {
        let hold = self.hold.clone();
        let end = Moment::now().add(LEAVE_WITHIN);
        let mut leaving = boxed(self.release_until_confirmed());
        let left = within(&mut leaving, end).await.is_some();
        hold.fail(AcquireOutcome::NotAcquired { waited });
        if !left {
            yield_to_poller(&hold).await;
            leaving.await;
        }
    }

    /// Sends releases until the store confirms one, or until any lease must have expired.
    async fn release_until_confirmed(&mut self) {
        self.hold.track_release();
        let release = release_until_confirmed(&mut *self.claim, self.hold.ttl(), |error| {
            let error = self.hold.error("release", error.clone());
            self.hold.released(Err(error), Reporter::Driver);
        });
        let outcome = match release.await {
            Some(Release::Released) => ReleaseOutcome::Released,
            Some(Release::WasNotHeld) => ReleaseOutcome::AlreadyLost,
            None => {
                observe::release_unconfirmed(self.hold.subject());
                return;
            }
        };
        self.hold.released(Ok(outcome), Reporter::Driver);
    }
}

/// Awaits the answer to an attempt, with a timeout. If the caller's wait ends earlier, or the keeper is closed, the caller
/// gets its outcome at once. The answer is still awaited, so that a grant can be released.
///
/// If the wait ends during a refresh, the caller waits [`LEAVE_WITHIN`] longer: the answer may be a grant.
async fn await_answer(
    mut attempt: BoxFuture<'_, Result<Attempt>>,
    hold: &Hold,
    sent: Moment,
    until: Option<Moment>,
    waiter: Option<Waiter>,
) -> Result<Attempt> {
    // A queue entry must be refreshed before it expires.
    let is_queued = waiter.is_some_and(|waiter| waiter.contended);
    let timeout = if is_queued { hold.ttl() / 3 } else { hold.ttl() }.min(MAX_ATTEMPT_TIMEOUT);
    let end = sent.add(timeout);
    let caller_end = until.map_or(end, |until| match waiter {
        Some(_) => until.add(LEAVE_WITHIN),
        None => until.max(sent.add(MIN_FIRST_TIMEOUT)),
    });
    let outcome = tokio::select! {
        biased;
        answer = &mut attempt => return answer,
        () = hold.context.closed.cancelled() => {
            AcquireOutcome::Failed(hold.error("lock", KeeperContext::closed_error()))
        }
        () = sleep_until(Some(caller_end.min(end))) => {
            let now = Moment::now();
            match waiter {
                _ if now >= end => return Err(Error::no_answer(timeout)),
                Some(Waiter { since, contended: true }) => {
                    AcquireOutcome::NotAcquired { waited: now.since(since) }
                }
                Some(Waiter { since, contended: false }) => {
                    AcquireOutcome::Failed(hold.error("lock", Error::undecided(now.since(since))))
                }
                None => AcquireOutcome::Failed(hold.error("lock", Error::no_answer(now.since(sent)))),
            }
        }
    };
    hold.fail(outcome);
    let answer = within(&mut attempt, end).await;
    answer.unwrap_or_else(|| Err(Error::no_answer(timeout)))
}

/// Waits for a request of the guard, or for the end of the claim. Registers no waker: each request is followed by a poll of
/// the driver, or by `request_repoll`.
async fn requested(hold: &Hold) {
    std::future::poll_fn(|_| if hold.is_requested() { Poll::Ready(()) } else { Poll::Pending })
        .await;
}

/// Waits until the end of the claim was requested. Registers no waker, like [`requested`].
async fn ended(hold: &Hold) {
    std::future::poll_fn(|_| hold.ending().map_or(Poll::Pending, |_| Poll::Ready(()))).await;
}

/// Returns `Pending` once, so that the acquire that polls the driver can take its outcome before the driver continues.
///
/// Without this, the first poll would already create timers that a short hold never needs. Registers no waker: the acquire
/// leaves the driver to the background task. Does nothing if there is no outcome to take, or if there is a background
/// task, which wakes the acquire instead.
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
