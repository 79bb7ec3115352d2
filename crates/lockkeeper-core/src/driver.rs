//! The engine: ask, wait, hold, renew, release or lose. Written once, for every store.
//!
//! The whole life of a claim is one future, [`drive`]. It does not care who polls it:
//!
//! - until there is a guard, the caller's own task does, so an uncontended lock costs one answer of
//!   the store and no hop to another task;
//! - while the guard lives, a task of the keeper's runtime does (the [`Tender`](crate::polling));
//! - `release().await` polls it right in the releasing task, again without a hop;
//! - if an acquire or a release is dropped half way, the tender takes it from there, in whatever state
//!   it is: an attempt in flight is awaited and what it was granted is released.
//!
//! So cancellation is not a case of its own in the code below: it is an [`Ending`] that the driver
//! finds at the next step.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::backend::{
    Attempt, BoxFuture, Capabilities, Change, Claim, Grant, Mode, Release, Renewal,
};
use crate::backoff::Backoff;
use crate::clock::{Moment, sleep_until};
use crate::error::{Error, ErrorKind, Result};
use crate::hold::{Ending, Hold, LEASE_RAN_OUT, ReleaseOutcome, Request, TAKEN_AWAY, Verdict};
use crate::keeper::Shared;

/// An attempt that takes longer has nothing left to give, whatever the ttl.
const LONGEST_ANSWER: Duration = Duration::from_secs(30);
/// How long the first answer is awaited even if the caller wants to wait less for other holders.
const LEAST_ANSWER: Duration = Duration::from_secs(1);

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
/// The longest pause between two asks of a store that does not tell.
const MAX_POLL: Duration = Duration::from_millis(500);

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
    if left == Left::Something {
        leave_to_the_next_poll(&job.hold).await;
        job.settle().await;
    }
    let Job { claim, hold, .. } = job;
    drop(claim);
    hold.finished();
}

impl Job {
    fn capabilities(&self) -> Capabilities {
        self.hold.shared.capabilities
    }

    // Acquiring.

    async fn acquire(&mut self) -> Result<Granted, Left> {
        if self.hold.ending().is_some() {
            return Err(Left::Nothing);
        }
        let start = Moment::now();
        let until = self.plan.wait.and_then(|wait| start.checked_add(wait));
        match self.ask(start, until, None).await {
            Ok(Attempt::Granted(grant)) if self.accepts(start, grant) => {
                self.unless_ended(Granted { sent: start, grant })
            }
            answer => boxed(self.persist(start, until, answer)).await,
        }
    }

    /// Goes on after a first answer that was no grant.
    async fn persist(
        &mut self,
        start: Moment,
        until: Option<Moment>,
        mut answer: Result<Attempt>,
    ) -> Result<Granted, Left> {
        let one_shot = self.plan.wait == Some(Duration::ZERO);
        let ttl = self.hold.ttl();
        let mut sent = start;
        let mut contended: Option<Moment> = None;
        let mut polls = Backoff::new(Duration::from_millis(5), (ttl / 3).min(MAX_POLL));
        let mut failures = Backoff::new(Duration::from_millis(50), (ttl / 10).min(MAX_POLL));

        loop {
            let pause = match answer {
                Ok(Attempt::Granted(grant)) if self.accepts(sent, grant) => {
                    return self.unless_ended(Granted { sent, grant });
                }
                Ok(Attempt::Granted(_)) => {
                    // Too late to be of use. Asked again, the store gives the same grant afresh.
                    let error = Error::new(
                        ErrorKind::Unavailable,
                        "the answer took longer than the lease it granted",
                    );
                    self.weather(error, contended, ttl)?;
                    failures.next()
                }
                Ok(Attempt::Contended { .. }) if one_shot => {
                    self.hold.fail(Verdict::NotInTime { waited: Moment::now().since(start) });
                    return Err(Left::Nothing);
                }
                Ok(Attempt::Contended { retry_after }) => {
                    contended = Some(sent);
                    let retry_after = retry_after.unwrap_or(Duration::MAX);
                    if self.capabilities().push {
                        // Refreshed before the place in the queue ends, and so often that a grant
                        // handed to us has two thirds of its lease before it.
                        (ttl / 3).saturating_sub(Moment::now().since(sent)).min(retry_after)
                    } else {
                        polls.next().min(retry_after)
                    }
                }
                Err(error) => {
                    self.weather(error, contended, ttl)?;
                    failures.next()
                }
            };
            if let Some(granted) = self.wait(pause, start, until, contended).await? {
                return self.unless_ended(granted);
            }
            if Moment::now().since(sent) < LEAST_PAUSE {
                // A store that says "look again" without end gets slow, and not the whole thread.
                tokio::time::sleep(LEAST_PAUSE).await;
            }
            sent = Moment::now();
            answer = self.ask(sent, until, contended.map(|_| start)).await;
        }
    }

    /// Asks once. `waiting_since` is for a waiter that asks again.
    async fn ask(
        &mut self,
        sent: Moment,
        until: Option<Moment>,
        waiting_since: Option<Moment>,
    ) -> Result<Attempt> {
        let floor = match self.hold.mode() {
            Mode::Exclusive => self.hold.shared.next_fence(),
            // Those who hold together should have the same fence: nothing to raise.
            Mode::Shared | Mode::Permits { .. } => None,
        };
        let until = until.filter(|_| self.plan.wait != Some(Duration::ZERO));
        let mut attempt = self.claim.attempt(floor);
        match at_once(&mut attempt).await {
            Some(answer) => answer,
            None => boxed(answer(attempt, &self.hold, sent, until, waiting_since)).await,
        }
    }

    /// Waits for a notice, for the time to ask again, or for the end of the caller's patience.
    async fn wait(
        &mut self,
        pause: Duration,
        start: Moment,
        until: Option<Moment>,
        contended: Option<Moment>,
    ) -> Result<Option<Granted>, Left> {
        let again = Moment::now().add(pause.max(LEAST_PAUSE));
        let alarm = until.map_or(again, |until| until.min(again));
        let shared = self.hold.shared.clone();
        let change = tokio::select! {
            biased;
            () = asked(&self.hold) => return Err(Left::Something),
            () = shared.closed.cancelled() => {
                self.hold.fail(Verdict::Failed(self.hold.error("lock", Shared::closed_error())));
                return Err(Left::Something);
            }
            change = self.claim.changed() => Some(change),
            () = sleep_until(Some(alarm)) => None,
            () = shared.woken() => None,
        };
        if let (Some(Change::Granted(grant)), Some(sent)) = (change, contended)
            && self.accepts(sent, grant)
        {
            return Ok(Some(Granted { sent, grant }));
        }
        let now = Moment::now();
        if until.is_some_and(|until| now >= until) {
            self.hold.fail(Verdict::NotInTime { waited: now.since(start) });
            return Err(Left::Something);
        }
        Ok(None)
    }

    fn accepts(&self, sent: Moment, grant: Grant) -> bool {
        if let Some(fence) = grant.fence {
            self.hold.shared.saw_fence(fence);
        }
        self.hold.granted(sent, grant.fence, grant.valid_for, self.plan.max_hold)
    }

    /// A grant is none if the caller has gone in the meantime.
    fn unless_ended(&self, granted: Granted) -> Result<Granted, Left> {
        if self.hold.ending().is_some() { Err(Left::Something) } else { Ok(granted) }
    }

    /// Decides whether a failed ask ends the acquire. The first one does: nobody wants to wait in
    /// silence for a store that is down. Once the store has answered, failures are borne for as long
    /// as our place in the queue can have lasted.
    fn weather(&self, error: Error, contended: Option<Moment>, ttl: Duration) -> Result<(), Left> {
        if self.hold.ending().is_some() {
            return Err(Left::Something);
        }
        let patient = contended.is_some_and(|last| Moment::now().since(last) < ttl);
        if patient && error.is_retryable() {
            tracing::debug!(name = %self.hold.name.escape_debug(), %error, "asking again");
            return Ok(());
        }
        let error = self.hold.error("lock", error);
        self.hold.fail(Verdict::Failed(error));
        Err(Left::Something)
    }

    async fn adopt(&mut self) -> Result<Granted, Left> {
        let sent = Moment::now();
        let ttl = self.hold.ttl();
        let longest = ttl.min(LONGEST_ANSWER);
        let mut renewal = self.claim.renew(ttl);
        let answer = tokio::select! {
            biased;
            () = asked(&self.hold) => return Err(Left::Nothing),
            answer = within(&mut renewal, sent.add(longest)) => answer,
        };
        drop(renewal);
        let fence = self.hold.fence();
        let error = match answer {
            Some(Ok(Renewal::Renewed { valid_for })) => {
                let grant = Grant { fence, valid_for: Some(valid_for) };
                if self.accepts(sent, grant) {
                    return Ok(Granted { sent, grant });
                }
                Error::lost(LEASE_RAN_OUT)
            }
            Some(Ok(Renewal::Held)) => {
                let grant = Grant { fence, valid_for: None };
                self.accepts(sent, grant);
                return Ok(Granted { sent, grant });
            }
            Some(Ok(Renewal::Lost)) => Error::lost(LEASE_RAN_OUT),
            Some(Err(error)) => error,
            None => Error::no_answer(longest),
        };
        self.hold.fail(Verdict::Failed(self.hold.error("adopt", error)));
        Err(Left::Nothing)
    }

    // Holding.

    async fn keep(&mut self, mut pulse: Pulse) -> Left {
        loop {
            match self.hold.ending() {
                Some(Ending::Release) => return Left::Something,
                Some(Ending::Detach) => return Left::Nothing,
                None => {}
            }
            let now = Moment::now();
            let request = self.hold.next_request();
            let lives = if self.hold.deadline().is_some_and(|deadline| now >= deadline) {
                false
            } else if let Some(request) = request {
                boxed(self.serve(request, &mut pulse)).await
            } else if pulse.due.is_some_and(|due| now >= due) {
                let ttl = self.hold.ttl();
                let renewal = boxed(self.renew(ttl, Step::Renew, &mut pulse));
                !matches!(renewal.await, Ok(Renewal::Lost))
            } else {
                self.listen(&mut pulse).await
            };
            if !lives {
                self.hold.lose(TAKEN_AWAY);
                return Left::Something;
            }
        }
    }

    /// Waits for the next thing to do; false if the hold is gone.
    async fn listen(&mut self, pulse: &mut Pulse) -> bool {
        let deadline = self.hold.deadline();
        let alarm = match (pulse.due, deadline) {
            (Some(due), Some(deadline)) => Some(due.min(deadline)),
            (due, deadline) => due.or(deadline),
        };
        tokio::select! {
            biased;
            () = asked(&self.hold) => {}
            change = self.claim.changed() => match change {
                Change::Lost => return false,
                Change::LookAgain | Change::Granted(_) => {
                    // Not again and again without a pause, whatever the store says.
                    let due = pulse.sent.add(LEAST_PAUSE);
                    boxed(sleep_until(Some(due))).await;
                    pulse.due = Some(due);
                }
            },
            () = sleep_until(alarm) => {}
            () = self.hold.shared.woken() => {}
        }
        true
    }

    /// Does what the guard asked for; false if the hold is gone.
    async fn serve(&mut self, request: Request, pulse: &mut Pulse) -> bool {
        let (ttl, step, reply) = match request {
            Request::Extend(ttl, reply) => {
                if ttl < self.hold.ttl() {
                    // From now on, whatever the answer: a longer lease that was believed because of a
                    // later renewal could still be cut by this request.
                    self.set_ttl(ttl, pulse);
                }
                (ttl, Step::Renew, reply)
            }
            Request::Downgrade(reply) => {
                // The store may obey and its answer be lost: from now on others may read.
                self.hold.set_mode(Mode::Shared);
                (self.hold.ttl(), Step::Downgrade, reply)
            }
        };
        let answer = self.renew(ttl, step, pulse).await;
        let lives = !matches!(answer, Ok(Renewal::Lost));
        let operation = match step {
            Step::Renew => "extend",
            Step::Downgrade => "downgrade",
        };
        let answer = match answer {
            Ok(Renewal::Lost) => {
                // Told before the answer, so that whoever gets the answer finds the state to match.
                self.hold.lose(TAKEN_AWAY);
                Err(self.hold.lost_error(operation))
            }
            Ok(Renewal::Renewed { .. } | Renewal::Held) => {
                if step == Step::Renew {
                    self.set_ttl(ttl, pulse);
                }
                Ok(())
            }
            Err(error) => Err(self.hold.error(operation, error)),
        };
        // Whoever asked may have gone; then nobody needs the answer.
        let _ = reply.send(answer);
        lives
    }

    fn set_ttl(&self, ttl: Duration, pulse: &mut Pulse) {
        self.hold.set_ttl(ttl);
        pulse.lease = ttl;
    }

    /// Renews once. An error, or no answer, is neither a renewal nor a loss: the hold is at risk, and
    /// the next try is soon.
    async fn renew(&mut self, ttl: Duration, step: Step, pulse: &mut Pulse) -> Result<Renewal> {
        let sent = Moment::now();
        let (lease, last) = match self.hold.latest() {
            // The store frees it then by itself: there is nothing to renew after this.
            Some(latest) if latest < sent.add(ttl) => (latest.since(sent), true),
            _ => (ttl, false),
        };
        self.hold.renewing(sent, lease);
        // Half of what is left is for the next try.
        let left = self.hold.deadline().map_or(Duration::MAX, |deadline| deadline.since(sent));
        let patience = pulse.patience(lease).min(left / 2);
        pulse.sent = sent;
        let end = self.hold.deadline().map_or(sent.add(patience), |d| d.min(sent.add(patience)));
        let mut renewal = match step {
            Step::Renew => self.claim.renew(lease),
            Step::Downgrade => self.claim.downgrade(lease),
        };
        let answer = tokio::select! {
            biased;
            answer = &mut renewal => Some(answer),
            () = ended(&self.hold) => None,
            () = sleep_until(Some(end)) => None,
            () = self.hold.shared.woken() => None,
        };
        drop(renewal);
        let answer = answer.unwrap_or_else(|| Err(Error::no_answer(Moment::now().since(sent))));
        let valid_for = match &answer {
            Ok(Renewal::Renewed { valid_for }) => Some(*valid_for),
            Ok(Renewal::Held) => None,
            Ok(Renewal::Lost) => return answer,
            Err(error) if step == Step::Downgrade && error.kind() == ErrorKind::Unsupported => {
                return answer;
            }
            Err(error) => {
                self.at_risk(error, pulse);
                return answer;
            }
        };
        if !self.hold.renewed(sent, valid_for) {
            // Confirmed after the deadline: by then the loss had been told, and that is final.
            return Ok(Renewal::Lost);
        }
        pulse.renewed(sent, valid_for.unwrap_or(lease).min(lease), last);
        answer
    }

    fn at_risk(&self, error: &Error, pulse: &mut Pulse) {
        if self.hold.ending().is_none() {
            let (store, name) = (self.hold.shared.backend.name(), self.hold.name.escape_debug());
            tracing::warn!(store, %name, %error, "renewal failed, lock at risk");
            self.hold.at_risk();
        }
        pulse.failed(self.hold.deadline());
    }

    // Ending.

    /// Releases until the store confirms it, or until any lease has run out by itself.
    async fn settle(&mut self) {
        self.hold.settling();
        let release = settle(&mut *self.claim, self.hold.ttl(), |error| {
            let error = self.hold.error("release", error.clone());
            self.hold.released(Err(error));
        });
        let outcome = match release.await {
            Some(Release::Released) => ReleaseOutcome::Released,
            Some(Release::WasNotHeld) => ReleaseOutcome::AlreadyLost,
            None => {
                let (store, name) =
                    (self.hold.shared.backend.name(), self.hold.name.escape_debug());
                tracing::warn!(store, %name, "release never confirmed, lock left to expire");
                return;
            }
        };
        self.hold.released(Ok(outcome));
    }
}

/// Awaits the answer to an ask for as long as it can be worth anything. If the caller's time is up
/// before, or the keeper is closed, he is told; the answer is awaited all the same, to release what it
/// grants.
///
/// Of a waiter it is known that others hold the lock, and that the store answered before: it does not
/// wait for this answer for long.
async fn answer(
    mut attempt: BoxFuture<'_, Result<Attempt>>,
    hold: &Hold,
    sent: Moment,
    until: Option<Moment>,
    waiting_since: Option<Moment>,
) -> Result<Attempt> {
    let (longest, caller) = match waiting_since {
        Some(_) => (hold.ttl() / 3, until),
        None => (hold.ttl(), until.map(|until| until.max(sent.add(LEAST_ANSWER)))),
    };
    let longest = longest.min(LONGEST_ANSWER);
    let end = sent.add(longest);
    let told = tokio::select! {
        biased;
        answer = &mut attempt => return answer,
        () = hold.shared.closed.cancelled() => {
            Verdict::Failed(hold.error("lock", Shared::closed_error()))
        }
        () = sleep_until(Some(caller.map_or(end, |caller| caller.min(end)))) => {
            let now = Moment::now();
            match waiting_since {
                _ if now >= end => return Err(Error::no_answer(longest)),
                Some(start) => Verdict::NotInTime { waited: now.since(start) },
                None => Verdict::Failed(hold.error("lock", Error::no_answer(now.since(sent)))),
            }
        }
    };
    hold.fail(told);
    let answer = within(&mut attempt, end).await;
    answer.unwrap_or_else(|| Err(Error::no_answer(longest)))
}

/// Releases a claim until the store confirms it or any lease must have run out, and tells of each
/// failure.
///
/// A release that gets no answer is sent again: it is idempotent, and the store may be back.
pub(crate) async fn settle(
    claim: &mut dyn Claim,
    ttl: Duration,
    failed: impl Fn(&Error),
) -> Option<Release> {
    let patience = ttl.clamp(Duration::from_secs(1), Duration::from_secs(10));
    let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_secs(10).min(ttl));
    let mut end = None;
    loop {
        let mut release = claim.release();
        let answer = match at_once(&mut release).await {
            Some(answer) => Some(answer),
            None => boxed(within(&mut release, Moment::now().add(patience))).await,
        };
        let error = match answer {
            Some(Ok(release)) => return Some(release),
            Some(Err(error)) => error,
            None => Error::no_answer(patience),
        };
        drop(release);
        failed(&error);
        let now = Moment::now();
        let end = *end.get_or_insert(now.add(ttl));
        let again = now.add(pauses.next());
        if again >= end || !error.is_retryable() {
            return None;
        }
        boxed(sleep_until(Some(again))).await;
    }
}

/// What kind of renewal is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Renew,
    Downgrade,
}

/// When to renew next.
struct Pulse {
    /// When the last one was sent.
    sent: Moment,
    /// `None` when the hold may not last longer than it does already.
    due: Option<Moment>,
    lease: Duration,
    /// How many have failed since the last that did not.
    failures: u32,
}

impl Pulse {
    fn new(sent: Moment, lease: Duration) -> Self {
        let due = Some(sent.add(lease / 3));
        Self { sent, due, lease, failures: 0 }
    }

    /// How long to wait for an answer: longer each time, for a store that is slow but well.
    fn patience(&self, lease: Duration) -> Duration {
        let patience = lease / 6 * 2_u32.pow(self.failures.min(3));
        patience.max(LEAST_PAUSE)
    }

    fn renewed(&mut self, sent: Moment, lease: Duration, last: bool) {
        self.due = (!last).then(|| sent.add(lease / 3));
        self.failures = 0;
    }

    fn failed(&mut self, deadline: Option<Moment>) {
        let now = Moment::now();
        let limit = self.lease / 60 * 2_u32.pow(self.failures.min(2));
        let mut pause = Backoff::new(limit, limit).next();
        if let Some(deadline) = deadline {
            // There must be time for another try.
            pause = pause.min(deadline.since(now) / 2);
        }
        self.failures += 1;
        self.due = Some(now.add(pause.max(LEAST_PAUSE)));
    }
}

/// Puts a step that is taken now and then into memory of its own, so that a hold does not keep room for
/// it all the while: ten thousand holds are ten thousand drivers.
fn boxed<'a, T>(step: impl Future<Output = T> + Send + 'a) -> BoxFuture<'a, T> {
    Box::pin(step)
}

/// A future's output, if it is there already: then no timer need be made.
async fn at_once<T>(future: &mut BoxFuture<'_, T>) -> Option<T> {
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// A future's output, if it comes before the moment.
async fn within<T>(future: &mut BoxFuture<'_, T>, end: Moment) -> Option<T> {
    // The sleep is not even made before the future has been polled once.
    tokio::select! {
        biased;
        output = future => Some(output),
        () = sleep_until(Some(end)) => None,
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
