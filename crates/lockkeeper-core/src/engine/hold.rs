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
use crate::engine::observe::{self, Watch};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;
use crate::loss::LossReason;
use crate::name::{Label, Name};
use crate::options::drift;
use crate::owner::Owner;

/// What a guard knows of its lock.
///
/// Only this process's belief: it is right as long as this machine's clock runs at a normal speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Held, and the last renewal was fine.
    Held,
    /// Held, but renewal fails at the moment. Becomes `Held` again when one succeeds, and `Lost` when
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
    /// The lock was held until now and is free for the next.
    Released,
    /// The lock had been lost before. Whatever was done since then was not protected.
    AlreadyLost,
}

/// What an acquire ends with.
#[derive(Debug)]
pub(crate) enum Verdict {
    Granted,
    /// Others held it for all of the time there was.
    NotInTime {
        waited: Duration,
    },
    Failed(Error),
}

/// What a guard asks of its driver.
#[derive(Debug)]
pub(crate) enum Request {
    Extend(Duration, oneshot::Sender<Result<()>>),
    Downgrade(oneshot::Sender<Result<()>>),
}

/// How a hold is to end; what the driver finds when it looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Give it back to the store.
    Release,
    /// The same, because whoever wanted or had it is gone.
    Drop,
    /// Leave it in the store, to be adopted.
    Detach,
}

/// One claim's state, from the first ask on.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) context: Arc<KeeperContext>,
    pub(crate) name: Name,
    pub(crate) owner: Owner,
    pub(crate) label: Label,
    /// How it was asked for; a downgrade changes only `mode()`.
    pub(crate) asked_mode: Mode,
    pub(crate) watch: Watch,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    state: State,
    mode: Mode,
    fence: Option<Fence>,
    ttl: Duration,
    /// Whether there ever was a guard.
    held: bool,
    /// From when on the store may give the lock to another; `None` if it needs no renewal.
    lease_end: Option<Moment>,
    /// When `max_hold` ends it.
    latest: Option<Moment>,
    verdict: Option<Verdict>,
    acquirer: Option<Waker>,
    ending: Option<Ending>,
    requests: Vec<Request>,
    outcome: Option<Result<ReleaseOutcome>>,
    releaser: Option<Waker>,
    /// Kept while a release is under way, so that `close` waits for it.
    under_way: Option<TaskTrackerToken>,
    done: bool,
    tended: bool,
    loss: Option<LossReason>,
    /// Made when somebody first wants to be told of a loss.
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
            verdict: None,
            acquirer: None,
            ending: None,
            requests: Vec::new(),
            outcome: None,
            releaser: None,
            under_way: None,
            done: false,
            tended: false,
            loss: None,
            lost: None,
        };
        let (watch, inner) = (Watch::new(), Mutex::new(inner));
        Self { context, name, owner, label, asked_mode: mode, watch, inner }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while it holds this lock, so a poisoned one cannot be half written.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An error about this hold.
    pub(crate) fn error(&self, operation: &'static str, error: Error) -> Error {
        error.at(self.context.backend.name(), operation, &self.name)
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

    /// Whether whoever asked is still waiting for an answer.
    pub(crate) fn is_waiting(&self) -> bool {
        let inner = self.inner();
        !inner.held && inner.ending.is_none()
    }

    // What the guard asks.

    pub(crate) fn state(&self) -> State {
        let inner = self.inner();
        if inner.is_live() && inner.has_expired(Moment::now()) {
            return self.mark_lost(inner, LossReason::Expired);
        }
        inner.state
    }

    /// What has been told so far, without a look at the clock.
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

    /// Asks for something. If nobody is left to do it, the request is dropped, which closes its reply.
    pub(crate) fn ask(&self, request: Request) {
        let mut inner = self.inner();
        if inner.is_live() && !inner.done {
            inner.requests.push(request);
        }
    }

    /// Asks for the end; false if that has been asked before.
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
            // A hold that ran out before it was given back was lost, even if nobody looked.
            let now = inner.held.then(Moment::now);
            if now.is_some_and(|now| inner.has_expired(now)) {
                self.mark_lost(inner, LossReason::Expired);
            } else {
                inner.state = State::Released;
                let left = now.zip(inner.deadline()).map(|(now, deadline)| deadline.since(now));
                drop(inner);
                self.watch.ended(self, ending, left);
            }
        }
        true
    }

    /// The release's outcome once it is known; until then, whom to wake.
    pub(crate) fn take_outcome(&self, waker: &Waker) -> Option<Result<ReleaseOutcome>> {
        let mut inner = self.inner();
        let outcome = inner.outcome.take();
        if outcome.is_none() {
            inner.releaser = Some(waker.clone());
        }
        outcome
    }

    /// The acquire's verdict once it is known; until then, whom to wake.
    pub(crate) fn take_verdict(&self, waker: &Waker) -> Option<Verdict> {
        let mut inner = self.inner();
        let verdict = inner.verdict.take();
        if verdict.is_none() {
            inner.acquirer = Some(waker.clone());
        }
        verdict
    }

    /// Wakes whoever is to take the verdict, even though there may be none yet.
    pub(crate) fn wake_acquirer(&self) {
        // Not under our lock: wakers run foreign code.
        let acquirer = self.inner().acquirer.clone();
        if let Some(waker) = acquirer {
            waker.wake();
        }
    }

    // What the driver tells.

    /// Whether the driver has been asked for anything.
    pub(crate) fn is_asked(&self) -> bool {
        let inner = self.inner();
        inner.ending.is_some() || !inner.requests.is_empty()
    }

    pub(crate) fn ending(&self) -> Option<Ending> {
        self.inner().ending
    }

    pub(crate) fn next_request(&self) -> Option<Request> {
        let mut inner = self.inner();
        // Who has gone needs no answer.
        inner.requests.retain(|request| match request {
            Request::Extend(_, reply) | Request::Downgrade(reply) => !reply.is_closed(),
        });
        (!inner.requests.is_empty()).then(|| inner.requests.remove(0))
    }

    /// Whether a verdict is there to be taken.
    pub(crate) fn has_verdict(&self) -> bool {
        self.inner().verdict.is_some()
    }

    /// Tells the acquire that it got the lock.
    pub(crate) fn succeed(&self) {
        self.watch.granted(self);
        let mut inner = self.inner();
        if inner.ending.is_some() {
            // It has gone, or was given up and has its verdict.
            return;
        }
        inner.held = true;
        inner.under_way = None;
        let wake = inner.tended;
        Self::give(inner, Verdict::Granted, wake);
    }

    /// Leaves a verdict. An acquire that drives finds it by itself; if another does, it is woken.
    fn give(mut inner: MutexGuard<'_, Inner>, verdict: Verdict, wake: bool) {
        inner.verdict = Some(verdict);
        let acquirer = inner.acquirer.take().filter(|_| wake);
        drop(inner);
        if let Some(waker) = acquirer {
            waker.wake();
        }
    }

    /// Tells the acquire that it did not get the lock, unless it has gone. What is still under way
    /// then is a release.
    pub(crate) fn fail(&self, verdict: Verdict) {
        self.watch.not_granted(self, &verdict);
        if self.end(Ending::Release) {
            let inner = self.inner();
            let wake = inner.tended;
            Self::give(inner, verdict, wake);
        }
    }

    /// Ends an acquire from outside of its driver, which may be at work at this moment; false if it has
    /// ended, or has its lock, by now.
    pub(crate) fn give_up(&self, error: Error) -> bool {
        let mut inner = self.inner();
        if inner.held || inner.ending.is_some() {
            return false;
        }
        // One step, so that no guard can be made in between: it would be released behind its back.
        inner.ending = Some(Ending::Release);
        inner.state = State::Released;
        if inner.under_way.is_none() && !inner.done {
            inner.under_way = self.context.token();
        }
        drop(inner);
        let verdict = Verdict::Failed(error);
        self.watch.not_granted(self, &verdict);
        // Its last poll may have been just before this: whoever drives now, it is not the acquire.
        Self::give(self.inner(), verdict, true);
        true
    }

    /// Takes note of a grant; false if nothing of it is left.
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

    /// Takes note of a renewal that is being sent: if its lease is shorter than what is left, the
    /// store may obey at once and never tell.
    pub(crate) fn renewing(&self, sent: Moment, ttl: Duration) {
        let mut inner = self.inner();
        if let Some(lease_end) = inner.lease_end {
            inner.lease_end = Some(lease_end.min(valid_until(sent, ttl)));
        }
    }

    /// Takes note of a renewal that the store confirmed; false if that came too late.
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

    /// The hold is gone: whoever relies on it is told now.
    pub(crate) fn lose(&self, reason: LossReason) {
        let mut inner = self.inner();
        // Whoever asked for something learns it from the channel being closed.
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
        // Wakers run foreign code: not under our lock.
        drop(inner);
        if let Some(token) = token {
            token.cancel();
        }
        if held {
            observe::lost(self, fence, reason);
        }
        self.watch.lost(self, reason);
        State::Lost
    }

    /// Tells the releaser what became of it; only the first word counts. One that drives finds it by
    /// itself; if the tender drives, it is woken.
    pub(crate) fn released(&self, outcome: Result<ReleaseOutcome>) {
        self.tell_releaser(outcome, |inner| inner.tended);
    }

    fn tell_releaser(&self, outcome: Result<ReleaseOutcome>, wake: impl FnOnce(&Inner) -> bool) {
        let mut inner = self.inner();
        let outcome = match inner.state {
            State::Lost => Ok(ReleaseOutcome::AlreadyLost),
            _ => outcome,
        };
        inner.outcome.get_or_insert(outcome);
        let releaser = inner.releaser.take().filter(|_| wake(&inner));
        drop(inner);
        if let Some(waker) = releaser {
            waker.wake();
        }
    }

    /// Whether the tender drives: then a verdict is no reason to stop.
    pub(crate) fn is_tended(&self) -> bool {
        self.inner().tended
    }

    pub(crate) fn set_tended(&self) {
        self.inner().tended = true;
    }

    /// Makes `close` wait for an acquire that is still on its way; false if it is not.
    pub(crate) fn close(&self) -> bool {
        let mut inner = self.inner();
        let waits = !inner.held && !inner.done;
        if waits && inner.under_way.is_none() {
            inner.under_way = self.context.token();
        }
        waits
    }

    /// Something is under way that `close` waits for.
    pub(crate) fn settling(&self) {
        let mut inner = self.inner();
        if inner.under_way.is_none() && !inner.done {
            inner.under_way = self.context.token();
        }
    }

    /// The driver is done: nothing is under way any more.
    pub(crate) fn finished(&self) {
        let mut inner = self.inner();
        inner.done = true;
        inner.under_way = None;
    }

    /// The driver was dropped before its end: nobody asks or renews any more.
    pub(crate) fn abandoned(&self, reason: LossReason) {
        let error = match reason {
            LossReason::RuntimeShutdown => KeeperContext::runtime_gone(),
            reason => Error::new(ErrorKind::Unavailable, reason.to_string()),
        };
        self.give_up(self.error("lock", error.clone()));
        self.lose(reason);
        self.tell_releaser(Err(self.error("release", error)), |_| true);
        self.finished();
    }
}

impl Inner {
    fn is_live(&self) -> bool {
        matches!(self.state, State::Held | State::AtRisk)
    }

    fn deadline(&self) -> Option<Moment> {
        match (self.lease_end, self.latest) {
            (Some(lease_end), Some(latest)) => Some(lease_end.min(latest)),
            (lease_end, latest) => lease_end.or(latest),
        }
    }

    /// Whether it ends by a moment, or at most so long before.
    fn ends_within(&self, time: Duration, moment: Moment) -> bool {
        self.deadline().is_some_and(|deadline| moment.since(deadline) <= time)
    }

    fn has_expired(&self, now: Moment) -> bool {
        self.deadline().is_some_and(|deadline| now >= deadline)
    }
}

/// Until when a lease that was asked for at a moment can be relied on.
fn valid_until(sent: Moment, lease: Duration) -> Moment {
    sent.add(lease.saturating_sub(drift(lease)))
}

#[cfg(test)]
mod tests;
