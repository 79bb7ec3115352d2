//! The state of one claim, shared by its acquire, its guard and its driver.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::clock::Moment;
use crate::contract::{ClaimSpec, Grant, Mode};
use crate::engine::context::KeeperContext;
use crate::engine::observe::{self, Observer, Subject};
use crate::engine::outcome::{AcquireOutcome, Ending, OutcomeSlot, Reporter};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;
use crate::loss::LossReason;
use crate::name::{Label, Name};
use crate::options::drift;
use crate::owner::Owner;

/// The state of a lock, as its guard knows it.
///
/// It is computed in this process, without a request. It is correct as long as this machine's clock runs at a normal speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Held, and the last renewal succeeded.
    Held,
    /// Held, but the last renewal failed. Becomes `Held` when a renewal succeeds, and `Lost` if none does in time.
    AtRisk,
    /// No longer held, and not because of a release. Final.
    Lost,
    /// Released by its holder.
    Released,
}

/// The outcome of a [release](crate::Guard::release).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReleaseOutcome {
    /// The lock was held until now, and is released.
    Released,
    /// The lock was lost before the release. Work after the loss was not protected.
    AlreadyLost,
}

/// A request of a guard to its driver.
#[derive(Debug)]
pub(crate) enum Request {
    Extend(Duration, oneshot::Sender<Result<()>>),
    Downgrade(oneshot::Sender<Result<()>>),
}

/// The state of one claim, from the first attempt to the end of its hold.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) context: Arc<KeeperContext>,
    pub(crate) name: Name,
    pub(crate) owner: Owner,
    pub(crate) label: Label,
    /// The mode of the first attempt. A downgrade changes only `mode()`.
    pub(crate) requested_mode: Mode,
    pub(crate) observer: Observer,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// `Held` from the start, even before the grant: see `held`.
    state: State,
    mode: Mode,
    fence: Option<Fence>,
    ttl: Duration,
    /// Whether the acquire was granted the lock.
    held: bool,
    /// When the lease ends, minus the allowance for clock drift. `None` for a hold without a lease.
    lease_end: Option<Moment>,
    /// When `max_hold` ends the hold.
    max_hold_end: Option<Moment>,
    acquire: OutcomeSlot<AcquireOutcome>,
    release: OutcomeSlot<Result<ReleaseOutcome>>,
    ending: Option<Ending>,
    requests: Vec<Request>,
    /// Set while the claim has to be cleaned up, so that `close` waits for it.
    cleanup: Option<TaskTrackerToken>,
    /// Whether the driver has ended.
    driver_ended: bool,
    /// Whether a background task was spawned. If so, the task that waits for an outcome must be woken.
    in_background: bool,
    loss: Option<LossReason>,
    /// Created at the first call of `lost_token`.
    lost: Option<CancellationToken>,
}

impl Hold {
    /// Creates the state of a claim. `fence` is the fence of the ticket if the hold is adopted.
    pub(crate) fn new(context: Arc<KeeperContext>, spec: &ClaimSpec, fence: Option<Fence>) -> Self {
        let inner = Inner {
            state: State::Held,
            mode: spec.mode,
            fence,
            ttl: spec.ttl,
            held: false,
            lease_end: None,
            max_hold_end: None,
            acquire: OutcomeSlot::EMPTY,
            release: OutcomeSlot::EMPTY,
            ending: None,
            requests: Vec::new(),
            cleanup: None,
            driver_ended: false,
            in_background: false,
            loss: None,
            lost: None,
        };
        Self {
            context,
            name: spec.name.clone(),
            owner: spec.owner,
            label: spec.label.clone(),
            requested_mode: spec.mode,
            observer: Observer::new(),
            inner: Mutex::new(inner),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // No code panics while it has locked the mutex, so the state is consistent even if it is poisoned.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Identifies the claim in events, spans and metrics.
    pub(crate) fn subject(&self) -> Subject<'_> {
        let (store, mode) = (self.context.store, self.requested_mode);
        Subject { store, name: &self.name, label: &self.label, mode }
    }

    /// Adds the store and the name to an error.
    pub(crate) fn error(&self, operation: &'static str, error: Error) -> Error {
        error.at(self.context.store, operation, &self.name)
    }

    /// Returns the error of an operation on a lost hold.
    pub(crate) fn lost_error(&self, operation: &'static str) -> Error {
        // There is no reason if the hold was released instead.
        let reason = self.inner().loss.unwrap_or(LossReason::Expired);
        self.error(operation, Error::lost(reason))
    }

    /// Returns why the hold was lost, if it was.
    pub(crate) fn loss_reason(&self) -> Option<LossReason> {
        // Detects an expired deadline.
        let _ = self.state();
        self.inner().loss
    }

    /// Returns whether the acquire has no outcome yet.
    pub(crate) fn is_waiting(&self) -> bool {
        let inner = self.inner();
        !inner.held && inner.ending.is_none()
    }

    // Called by the guard and by the acquire.

    pub(crate) fn state(&self) -> State {
        let inner = self.inner();
        if inner.is_live() && inner.has_expired(Moment::now()) {
            return self.mark_lost(inner, LossReason::Expired);
        }
        inner.state
    }

    /// Returns whether a loss has been reported, without reading the clock.
    pub(crate) fn is_known_lost(&self) -> bool {
        self.inner().state == State::Lost
    }

    /// Returns a token that is cancelled when the hold is lost.
    pub(crate) fn lost_token(&self) -> CancellationToken {
        let mut inner = self.inner();
        let lost = inner.state == State::Lost;
        let token = inner.lost.get_or_insert_default().clone();
        drop(inner);
        if lost {
            token.cancel();
        }
        token
    }

    pub(crate) fn deadline(&self) -> Option<Moment> {
        self.inner().deadline()
    }

    pub(crate) fn fence(&self) -> Option<Fence> {
        self.inner().fence
    }

    pub(crate) fn mode(&self) -> Mode {
        self.inner().mode
    }

    pub(crate) fn ttl(&self) -> Duration {
        self.inner().ttl
    }

    pub(crate) fn max_hold_end(&self) -> Option<Moment> {
        self.inner().max_hold_end
    }

    /// Adds a request. If the hold or the driver has ended, drops the request, which closes its reply.
    pub(crate) fn request(&self, request: Request) {
        let mut inner = self.inner();
        if inner.is_live() && !inner.driver_ended {
            inner.requests.push(request);
        }
    }

    /// Requests the end of the acquire or of the hold. Returns false if it was requested before.
    pub(crate) fn end(&self, ending: Ending) -> bool {
        let mut inner = self.inner();
        if inner.ending.is_some() {
            return false;
        }
        inner.ending = Some(ending);
        if ending != Ending::Detach {
            inner.track_cleanup(&self.context);
        }
        if inner.is_live() {
            // A hold whose deadline has passed is lost, not released, even if no check has detected that so far.
            let now = inner.held.then(Moment::now);
            if now.is_some_and(|now| inner.has_expired(now)) {
                self.mark_lost(inner, LossReason::Expired);
            } else {
                inner.state = State::Released;
                let left = now.zip(inner.deadline()).map(|(now, deadline)| deadline.since(now));
                drop(inner);
                self.observer.ended(self.subject(), ending, left);
            }
        }
        true
    }

    pub(crate) fn take_release_outcome(&self, waker: &Waker) -> Option<Result<ReleaseOutcome>> {
        self.inner().release.take(waker)
    }

    pub(crate) fn take_acquire_outcome(&self, waker: &Waker) -> Option<AcquireOutcome> {
        self.inner().acquire.take(waker)
    }

    /// Wakes the acquire's task, even if there is no outcome yet.
    pub(crate) fn wake_acquirer(&self) {
        // With the state unlocked: wakers run foreign code.
        let acquirer = self.inner().acquire.waiter();
        if let Some(waker) = acquirer {
            waker.wake();
        }
    }

    // Called by the driver.

    /// Returns whether there is a request, or the end was requested.
    pub(crate) fn is_requested(&self) -> bool {
        let inner = self.inner();
        inner.ending.is_some() || !inner.requests.is_empty()
    }

    pub(crate) fn ending(&self) -> Option<Ending> {
        self.inner().ending
    }

    pub(crate) fn next_request(&self) -> Option<Request> {
        let mut inner = self.inner();
        // A caller that dropped its future needs no answer.
        inner.requests.retain(|request| match request {
            Request::Extend(_, reply) | Request::Downgrade(reply) => !reply.is_closed(),
        });
        (!inner.requests.is_empty()).then(|| inner.requests.remove(0))
    }

    pub(crate) fn has_acquire_outcome(&self) -> bool {
        self.inner().acquire.is_set()
    }

    /// Ends the acquire with a grant.
    pub(crate) fn succeed(&self) {
        self.observer.granted(self.subject(), || self.fence());
        let mut inner = self.inner();
        if inner.ending.is_some() {
            // The acquire was dropped or abandoned. The driver releases the grant.
            return;
        }
        inner.held = true;
        inner.cleanup = None;
        Inner::report(inner, |inner| &mut inner.acquire, AcquireOutcome::Granted, Reporter::Driver);
    }

    /// Ends the acquire without a lock, unless it was dropped. The driver continues with the release.
    pub(crate) fn fail(&self, outcome: AcquireOutcome) {
        self.observer.not_granted(self.subject(), &outcome);
        if self.end(Ending::Release) {
            Inner::report(self.inner(), |inner| &mut inner.acquire, outcome, Reporter::Driver);
        }
    }

    /// Ends the acquire with an error.
    pub(crate) fn fail_with(&self, operation: &'static str, error: Error) {
        self.fail(AcquireOutcome::Failed(self.error(operation, error)));
    }

    /// Ends an acquire from a task that does not poll its driver. Returns false if it has ended or was granted.
    pub(crate) fn fail_from_other_task(&self, error: Error) -> bool {
        let mut inner = self.inner();
        if inner.held || inner.ending.is_some() {
            return false;
        }
        // Under one lock: otherwise the driver could report a grant after the check above, and then release the lock of a
        // live guard.
        inner.ending = Some(Ending::Release);
        inner.state = State::Released;
        inner.track_cleanup(&self.context);
        drop(inner);
        let outcome = AcquireOutcome::Failed(error);
        self.observer.not_granted(self.subject(), &outcome);
        Inner::report(self.inner(), |inner| &mut inner.acquire, outcome, Reporter::Other);
        true
    }

    /// Records a grant. Returns false if it has expired.
    pub(crate) fn granted(&self, sent: Moment, grant: Grant, max_hold: Option<Duration>) -> bool {
        let now = Moment::now();
        let mut inner = self.inner();
        inner.fence = grant.fence.or(inner.fence);
        inner.max_hold_end = max_hold.and_then(|max_hold| now.checked_add(max_hold));
        inner.lease_end = grant.valid_for.map(|valid_for| valid_until(sent, valid_for));
        !inner.has_expired(now)
    }

    /// Records that a renewal is about to be sent. If it shortens the lease, the shorter lease applies at once, because the
    /// answer may be lost.
    pub(crate) fn renewing(&self, sent: Moment, ttl: Duration) {
        let mut inner = self.inner();
        inner.lease_end = inner.lease_end.map(|end| end.min(valid_until(sent, ttl)));
    }

    /// Records a renewal that the store confirmed. Returns false if the hold was lost before the confirmation.
    pub(crate) fn renewed(&self, sent: Moment, valid_for: Option<Duration>) -> bool {
        let mut inner = self.inner();
        if !inner.is_live() || inner.has_expired(Moment::now()) {
            return inner.state == State::Released;
        }
        inner.lease_end = valid_for.map(|valid_for| valid_until(sent, valid_for));
        inner.state = State::Held;
        true
    }

    pub(crate) fn set_ttl(&self, ttl: Duration) {
        self.inner().ttl = ttl;
    }

    pub(crate) fn set_mode(&self, mode: Mode) {
        self.inner().mode = mode;
    }

    pub(crate) fn at_risk(&self) {
        let mut inner = self.inner();
        if inner.state == State::Held {
            inner.state = State::AtRisk;
        }
    }

    /// Reports the hold as lost.
    pub(crate) fn lose(&self, reason: LossReason) {
        let mut inner = self.inner();
        // This closes the replies, which notifies the callers.
        inner.requests.clear();
        if inner.is_live() {
            self.mark_lost(inner, reason);
        }
    }

    fn mark_lost(&self, mut inner: MutexGuard<'_, Inner>, reason: LossReason) -> State {
        inner.state = State::Lost;
        let now = Moment::now();
        let reason = match (inner.deadline(), inner.max_hold_end) {
            // The last lease was cut short to end with `max_hold`, and ended earlier by the drift.
            (Some(end), Some(max_hold_end))
                if now >= end && max_hold_end.since(end) <= drift(inner.ttl) =>
            {
                LossReason::MaxHold
            }
            (Some(end), _) if now >= end => LossReason::Expired,
            _ => reason,
        };
        inner.loss = Some(reason);
        let (held, fence, token) = (inner.held, inner.fence, inner.lost.clone());
        // With the state unlocked: wakers run foreign code.
        drop(inner);
        if let Some(token) = token {
            token.cancel();
        }
        if held {
            observe::lost(&self.observer, self.subject(), fence, reason);
        }
        self.observer.lost(self.subject(), reason);
        State::Lost
    }

    /// Reports the outcome of a release. The first outcome counts.
    pub(crate) fn released(&self, outcome: Result<ReleaseOutcome>, by: Reporter) {
        let inner = self.inner();
        let is_lost = inner.state == State::Lost;
        let outcome = if is_lost { Ok(ReleaseOutcome::AlreadyLost) } else { outcome };
        Inner::report(inner, |inner| &mut inner.release, outcome, by);
    }

    pub(crate) fn is_in_background(&self) -> bool {
        self.inner().in_background
    }

    pub(crate) fn set_in_background(&self) {
        self.inner().in_background = true;
    }

    /// Makes `close` wait for an acquire that has not ended. Returns false if it has.
    pub(crate) fn keeper_closed(&self) -> bool {
        let mut inner = self.inner();
        let waits = !inner.held && !inner.driver_ended;
        if waits {
            inner.track_cleanup(&self.context);
        }
        waits
    }

    /// Makes `close` wait for a release.
    pub(crate) fn track_release(&self) {
        self.inner().track_cleanup(&self.context);
    }

    /// Records that the driver has ended.
    pub(crate) fn driver_ended(&self) {
        let mut inner = self.inner();
        inner.driver_ended = true;
        inner.cleanup = None;
    }

    /// Ends the claim after its driver was dropped.
    pub(crate) fn abandoned(&self, reason: LossReason) {
        let error = match reason {
            LossReason::RuntimeShutdown => KeeperContext::runtime_gone_error(),
            reason => Error::new(ErrorKind::Unavailable, reason.to_string()),
        };
        self.fail_from_other_task(self.error("lock", error.clone()));
        self.lose(reason);
        self.released(Err(self.error("release", error)), Reporter::Other);
        self.driver_ended();
    }
}

impl Inner {
    /// Sets an outcome. Wakes the task that waits for it, unless that task polls the driver and takes the outcome anyway.
    fn report<T>(
        mut this: MutexGuard<'_, Self>,
        slot: impl FnOnce(&mut Self) -> &mut OutcomeSlot<T>,
        outcome: T,
        by: Reporter,
    ) {
        let waiter = slot(&mut this).set(outcome);
        let wakes = by == Reporter::Other || this.in_background;
        // With the state unlocked: wakers run foreign code.
        drop(this);
        if let Some(waker) = waiter.filter(|_| wakes) {
            waker.wake();
        }
    }

    /// Makes `close` wait for the cleanup of this claim.
    fn track_cleanup(&mut self, context: &KeeperContext) {
        if self.cleanup.is_none() && !self.driver_ended {
            self.cleanup = context.token();
        }
    }

    fn is_live(&self) -> bool {
        matches!(self.state, State::Held | State::AtRisk)
    }

    fn deadline(&self) -> Option<Moment> {
        [self.lease_end, self.max_hold_end].into_iter().flatten().min()
    }

    fn has_expired(&self, now: Moment) -> bool {
        self.deadline().is_some_and(|deadline| now >= deadline)
    }
}

/// Returns the end of a lease that was requested at `sent`, minus the allowance for clock drift.
fn valid_until(sent: Moment, lease: Duration) -> Moment {
    sent.add(lease.saturating_sub(drift(lease)))
}

#[cfg(test)]
mod tests;
