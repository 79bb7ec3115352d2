//! The state of one hold, shared by its guard and its driver.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::clock::Moment;
use crate::contract::Mode;
use crate::engine::context::KeeperContext;
use crate::engine::observe::{self, Observer, Subject};
use crate::engine::outcome::{AcquireOutcome, Ending};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;
use crate::loss::LossReason;
use crate::name::{Label, Name};
use crate::options::drift;
use crate::owner::Owner;

/// What a guard knows of its lock.
///
/// Known in this process only: it is right as long as this machine's clock runs at a normal speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Held, and the last renewal succeeded.
    Held,
    /// Held, but the last renewal failed. Becomes `Held` again when one succeeds, and `Lost` when
    /// none does in time.
    AtRisk,
    /// No longer held, against the holder's will. Final.
    Lost,
    /// Given back.
    Released,
}

/// How a [release](crate::Guard::release) ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReleaseOutcome {
    /// The lock was held until now, and is released.
    Released,
    /// The lock had been lost before. The work since then was not protected.
    AlreadyLost,
}

/// What a guard requests of its driver.
#[derive(Debug)]
pub(crate) enum Request {
    Extend(Duration, oneshot::Sender<Result<()>>),
    Downgrade(oneshot::Sender<Result<()>>),
}

/// One claim's state, from the first attempt on.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) context: Arc<KeeperContext>,
    pub(crate) name: Name,
    pub(crate) owner: Owner,
    pub(crate) label: Label,
    /// How it was asked for; a downgrade changes only `mode()`.
    pub(crate) asked_mode: Mode,
    pub(crate) observer: Observer,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    state: State,
    mode: Mode,
    fence: Option<Fence>,
    ttl: Duration,
    /// Whether the acquire was granted.
    held: bool,
    /// From when on the store may grant the lock to another claim; `None` if it needs no renewal.
    lease_end: Option<Moment>,
    /// When `max_hold` ends it.
    latest: Option<Moment>,
    acquire_outcome: Option<AcquireOutcome>,
    acquirer: Option<Waker>,
    ending: Option<Ending>,
    requests: Vec<Request>,
    release_outcome: Option<Result<ReleaseOutcome>>,
    releaser: Option<Waker>,
    /// Kept while a release is under way, so that `close` waits for it.
    under_way: Option<TaskTrackerToken>,
    done: bool,
    /// Whether the background task drives: then an outcome is no reason to stop, and its taker has to be woken.
    in_background: bool,
    loss: Option<LossReason>,
    /// Created at the first request for it.
    lost: Option<CancellationToken>,
}

impl Hold {
    pub(crate) fn new(
        context: Arc<KeeperContext>,
        (name, owner, label): (Name, Owner, Label),
        mode: Mode,
        ttl: Duration,
        fence: Option<Fence>,
    ) -> Self {
        let inner = Inner {
            state: State::Held,
            mode,
            fence,
            ttl,
            held: false,
            lease_end: None,
            latest: None,
            acquire_outcome: None,
            acquirer: None,
            ending: None,
            requests: Vec::new(),
            release_outcome: None,
            releaser: None,
            under_way: None,
            done: false,
            in_background: false,
            loss: None,
            lost: None,
        };
        let (observer, inner) = (Observer::new(), Mutex::new(inner));
        Self { context, name, owner, label, asked_mode: mode, observer, inner }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while it holds this lock, so a poisoned one cannot be half written.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which claim this is, for events, spans and metrics.
    pub(crate) fn subject(&self) -> Subject<'_> {
        let (store, mode) = (self.context.store, self.asked_mode);
        Subject { store, name: &self.name, label: &self.label, mode }
    }

    /// An error about this hold.
    pub(crate) fn error(&self, operation: &'static str, error: Error) -> Error {
        error.at(self.context.store, operation, &self.name)
    }

    /// The error that says that this hold is lost, and why.
    pub(crate) fn lost_error(&self, operation: &'static str) -> Error {
        // Without one it has been given back, and its lease no longer counts.
        let reason = self.inner().loss.unwrap_or(LossReason::Expired);
        self.error(operation, Error::lost(reason))
    }

    /// Why the hold was lost, if it was.
    pub(crate) fn loss_reason(&self) -> Option<LossReason> {
        // Compares the deadline with the clock first.
        let _ = self.state();
        self.inner().loss
    }

    /// Whether the acquire is still waiting for its outcome.
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

    /// Whether a loss has been reported, without reading the clock.
    pub(crate) fn is_known_lost(&self) -> bool {
        self.inner().state == State::Lost
    }

    /// Cancelled when the hold is lost.
    pub(crate) fn lost_token(&self) -> CancellationToken {
        let (token, lost) = {
            let mut inner = self.inner();
            let lost = inner.state == State::Lost;
            (inner.lost.get_or_insert_default().clone(), lost)
        };
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

    pub(crate) fn latest(&self) -> Option<Moment> {
        self.inner().latest
    }

    /// Adds a request. If the driver is done, the request is dropped, which closes its reply.
    pub(crate) fn request(&self, request: Request) {
        let mut inner = self.inner();
        if inner.is_live() && !inner.done {
            inner.requests.push(request);
        }
    }

    /// Requests the end; false if that has been requested before.
    pub(crate) fn end(&self, ending: Ending) -> bool {
        let mut inner = self.inner();
        if inner.ending.is_some() {
            return false;
        }
        inner.ending = Some(ending);
        if ending != Ending::Detach && !inner.done {
            inner.under_way = self.context.token();
        }
        if inner.is_live() {
            // A hold that expired before it was released was lost, even if that was not noticed.
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

    /// Takes the release's outcome; registers the waker if there is none yet.
    pub(crate) fn take_release_outcome(&self, waker: &Waker) -> Option<Result<ReleaseOutcome>> {
        let mut inner = self.inner();
        let outcome = inner.release_outcome.take();
        if outcome.is_none() {
            inner.releaser = Some(waker.clone());
        }
        outcome
    }

    /// Takes the acquire's outcome; registers the waker if there is none yet.
    pub(crate) fn take_acquire_outcome(&self, waker: &Waker) -> Option<AcquireOutcome> {
        let mut inner = self.inner();
        let outcome = inner.acquire_outcome.take();
        if outcome.is_none() {
            inner.acquirer = Some(waker.clone());
        }
        outcome
    }

    /// Wakes the acquire's task, even though there may be no outcome yet.
    pub(crate) fn wake_acquirer(&self) {
        // Not under this lock: wakers run foreign code.
        let acquirer = self.inner().acquirer.clone();
        if let Some(waker) = acquirer {
            waker.wake();
        }
    }

    // Called by the driver.

    /// Whether anything has been requested of the driver.
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

    /// Whether the acquire has an outcome to take.
    pub(crate) fn has_acquire_outcome(&self) -> bool {
        self.inner().acquire_outcome.is_some()
    }

    /// Gives the acquire its lock.
    pub(crate) fn succeed(&self) {
        self.observer.granted(self.subject(), || self.fence());
        let mut inner = self.inner();
        if inner.ending.is_some() {
            // It was dropped, or was given up and has its outcome.
            return;
        }
        inner.held = true;
        inner.under_way = None;
        let wake = inner.wake();
        Self::finish_acquire(inner, AcquireOutcome::Granted, wake);
    }

    fn finish_acquire(mut inner: MutexGuard<'_, Inner>, outcome: AcquireOutcome, wake: Wake) {
        inner.acquire_outcome = Some(outcome);
        let acquirer = inner.acquirer.take().filter(|_| wake == Wake::Yes);
        drop(inner);
        if let Some(waker) = acquirer {
            waker.wake();
        }
    }

    /// Ends the acquire without a lock, unless it was dropped. The driver goes on with the release.
    pub(crate) fn fail(&self, outcome: AcquireOutcome) {
        self.observer.not_granted(self.subject(), &outcome);
        if self.end(Ending::Release) {
            let inner = self.inner();
            let wake = inner.wake();
            Self::finish_acquire(inner, outcome, wake);
        }
    }

    /// Ends an acquire from outside of its driver, which may be running at this moment; false if it has
    /// ended, or has its lock, by now.
    pub(crate) fn fail_from_outside(&self, error: Error) -> bool {
        let mut inner = self.inner();
        if inner.held || inner.ending.is_some() {
            return false;
        }
        // In one step, so that no guard can be made in between: the driver would release it.
        inner.ending = Some(Ending::Release);
        inner.state = State::Released;
        if inner.under_way.is_none() && !inner.done {
            inner.under_way = self.context.token();
        }
        drop(inner);
        let outcome = AcquireOutcome::Failed(error);
        self.observer.not_granted(self.subject(), &outcome);
        // The acquire may have polled just before this, and does not look again by itself.
        Self::finish_acquire(self.inner(), outcome, Wake::Yes);
        true
    }

    /// Records a grant; false if it has expired.
    pub(crate) fn granted(
        &self,
        sent: Moment,
        fence: Option<Fence>,
        valid_for: Option<Duration>,
        max_hold: Option<Duration>,
    ) -> bool {
        let now = Moment::now();
        let mut inner = self.inner();
        inner.fence = fence.or(inner.fence);
        inner.latest = max_hold.and_then(|max_hold| now.checked_add(max_hold));
        inner.lease_end = valid_for.map(|valid_for| valid_until(sent, valid_for));
        !inner.has_expired(now)
    }

    /// Records a renewal that is being sent: if its lease is shorter than the remaining one, the store may apply it and the
    /// answer be lost.
    pub(crate) fn renewing(&self, sent: Moment, ttl: Duration) {
        let mut inner = self.inner();
        if let Some(lease_end) = inner.lease_end {
            inner.lease_end = Some(lease_end.min(valid_until(sent, ttl)));
        }
    }

    /// Records a renewal that the store confirmed; false if that came too late.
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
        // Callers of requests learn it from the channel being closed.
        inner.requests.clear();
        if inner.is_live() {
            self.mark_lost(inner, reason);
        }
    }

    fn mark_lost(&self, mut inner: MutexGuard<'_, Inner>, reason: LossReason) -> State {
        inner.state = State::Lost;
        let now = Moment::now();
        let reason = match inner.latest {
            _ if !inner.has_expired(now) => reason,
            // The last renewal before it was cut short to end then, less drift.
            Some(latest) if inner.ends_within(drift(inner.ttl), latest) => LossReason::MaxHold,
            _ => LossReason::Expired,
        };
        inner.loss = Some(reason);
        let held = inner.held;
        let fence = inner.fence;
        let token = inner.lost.clone();
        // Wakers run foreign code: not under this lock.
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

    /// Ends the release; only the first outcome counts.
    pub(crate) fn released(&self, outcome: Result<ReleaseOutcome>) {
        let inner = self.inner();
        let wake = inner.wake();
        Self::finish_release(inner, outcome, wake);
    }

    fn finish_release(
        mut inner: MutexGuard<'_, Inner>,
        outcome: Result<ReleaseOutcome>,
        wake: Wake,
    ) {
        let outcome = match inner.state {
            State::Lost => Ok(ReleaseOutcome::AlreadyLost),
            _ => outcome,
        };
        inner.release_outcome.get_or_insert(outcome);
        let releaser = inner.releaser.take().filter(|_| wake == Wake::Yes);
        drop(inner);
        if let Some(waker) = releaser {
            waker.wake();
        }
    }

    pub(crate) fn is_in_background(&self) -> bool {
        self.inner().in_background
    }

    pub(crate) fn set_in_background(&self) {
        self.inner().in_background = true;
    }

    /// Makes `close` wait for an acquire that has not ended; false if it has.
    pub(crate) fn keeper_closed(&self) -> bool {
        let mut inner = self.inner();
        let waits = !inner.held && !inner.done;
        if waits && inner.under_way.is_none() {
            inner.under_way = self.context.token();
        }
        waits
    }

    /// Makes `close` wait for a release.
    pub(crate) fn releasing(&self) {
        let mut inner = self.inner();
        if inner.under_way.is_none() && !inner.done {
            inner.under_way = self.context.token();
        }
    }

    /// The driver is done.
    pub(crate) fn finished(&self) {
        let mut inner = self.inner();
        inner.done = true;
        inner.under_way = None;
    }

    /// The driver was dropped before its end: the claim is no longer driven.
    pub(crate) fn abandoned(&self, reason: LossReason) {
        let error = match reason {
            LossReason::RuntimeShutdown => KeeperContext::runtime_gone(),
            reason => Error::new(ErrorKind::Unavailable, reason.to_string()),
        };
        self.fail_from_outside(self.error("lock", error.clone()));
        self.lose(reason);
        let failed = Err(self.error("release", error));
        Self::finish_release(self.inner(), failed, Wake::Yes);
        self.finished();
    }
}

/// Whether the task that waits for an outcome is to be woken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wake {
    Yes,
    /// It polls the driver itself, and looks afterwards.
    No,
}

impl Inner {
    fn wake(&self) -> Wake {
        if self.in_background { Wake::Yes } else { Wake::No }
    }

    fn is_live(&self) -> bool {
        matches!(self.state, State::Held | State::AtRisk)
    }

    fn deadline(&self) -> Option<Moment> {
        match (self.lease_end, self.latest) {
            (Some(lease_end), Some(latest)) => Some(lease_end.min(latest)),
            (lease_end, latest) => lease_end.or(latest),
        }
    }

    /// Whether it ends at a moment, or at most this long before.
    fn ends_within(&self, time: Duration, moment: Moment) -> bool {
        self.deadline().is_some_and(|deadline| moment.since(deadline) <= time)
    }

    fn has_expired(&self, now: Moment) -> bool {
        self.deadline().is_some_and(|deadline| now >= deadline)
    }
}

/// Until when a lease that was requested at a moment is valid, less the allowance for clock drift.
fn valid_until(sent: Moment, lease: Duration) -> Moment {
    sent.add(lease.saturating_sub(drift(lease)))
}

#[cfg(test)]
mod tests;
