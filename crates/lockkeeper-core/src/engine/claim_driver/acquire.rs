//! From the first attempt to a grant: attempt, wait, attempt again.

use std::time::Duration;

use super::{ClaimDriver, Cleanup, Granted, MIN_PAUSE, requested};
use crate::backoff::Backoff;
use crate::clock::{Moment, sleep_until};
use crate::contract::{Attempt, BoxFuture, Change, Fences, Grant, Kind, Mode, Renewal, Retry};
use crate::engine::context::KeeperContext;
use crate::engine::hold::Hold;
use crate::engine::observe;
use crate::engine::outcome::AcquireOutcome;
use crate::error::{Error, ErrorKind, Result};
use crate::futures::{at_once, boxed, within};
use crate::loss::LossReason;
use crate::release::LEAVE_WITHIN;

/// An attempt that takes longer has failed, whatever the ttl.
const MAX_ANSWER: Duration = Duration::from_secs(30);
/// How long the first answer is awaited even if the caller wants to wait less for other holders.
const MIN_ANSWER: Duration = Duration::from_secs(1);
/// The longest pause between two attempts on a store that does not notify.
const MAX_POLL: Duration = Duration::from_millis(500);
/// How long a try repeats rounds in which the store could not decide, at most; a third of the ttl if that is less.
/// A round with a node that does not answer takes `Quorum::node_timeout`, half a second by default: this leaves
/// time for four of them.
const MAX_UNDECIDED: Duration = Duration::from_secs(2);
/// The range of the random pauses of claims that ask at the same moment: it starts at the minimum, and doubles with every
/// round lost to others, up to the maximum. A longer one would leave the lock unused while few wait, a shorter one would split
/// most votes while many do: with 100 tasks on five nodes, 250 ms take a fifth longer than 125 ms and two thirds of the
/// requests.
const MIN_SPREAD: Duration = Duration::from_millis(2);
const MAX_SPREAD: Duration = Duration::from_millis(250);

impl ClaimDriver {
    pub(super) async fn acquire(&mut self) -> Result<Granted, Cleanup> {
        if self.hold.ending().is_some() {
            return Err(Cleanup::None);
        }
        let start = Moment::now();
        self.hold.observer.asking(self.hold.subject(), self.options.kind(), start);
        let until = self.options.wait.and_then(|wait| start.checked_add(wait));
        match self.ask(start, until, None).await {
            Ok(Attempt::Granted(grant)) if self.accepts(start, grant) => {
                self.unless_ended(Granted { sent: start, grant })
            }
            answer => boxed(self.retry_until_granted(start, until, answer)).await,
        }
    }

    /// Goes on after a first answer that was no grant.
    async fn retry_until_granted(
        &mut self,
        start: Moment,
        until: Option<Moment>,
        mut answer: Result<Attempt>,
    ) -> Result<Granted, Cleanup> {
        let one_shot = self.options.is_try();
        let ttl = self.hold.ttl();
        // A try waits for no holder, only for the store to decide.
        let until = if one_shot { Some(start.add(MAX_UNDECIDED.min(ttl / 3))) } else { until };
        let mut spread = Spread { range: MIN_SPREAD };
        let mut noticed = false;
        let mut sent = start;
        let mut contended: Option<Moment> = None;
        // When a claim that waits sent the last attempt that was answered, by whatever answer.
        let mut answered: Option<Moment> = None;
        let mut polls = Backoff::new(Duration::from_millis(5), (ttl / 3).min(MAX_POLL));
        let mut failures = Backoff::new(Duration::from_millis(50), (ttl / 10).min(MAX_POLL));

        loop {
            if let Ok(Attempt::Contended { .. } | Attempt::Undecided) = answer {
                self.hold.observer.contended(self.hold.subject());
                answered = Some(sent).filter(|_| !one_shot);
                // A claim that asked unprompted and was refused has met a holder, and no crowd.
                if noticed || matches!(answer, Ok(Attempt::Undecided)) {
                    spread.widen(Moment::now().since(sent));
                }
            }
            noticed = false;
            let pause = match answer {
                Ok(Attempt::Granted(grant)) if self.accepts(sent, grant) => {
                    return self.unless_ended(Granted { sent, grant });
                }
                Ok(Attempt::Granted(_)) => {
                    // Expired on arrival. Asked again, the store repeats the grant with a full lease.
                    let error = Error::new(
                        ErrorKind::Unavailable,
                        "the answer took longer than the lease it granted",
                    );
                    self.tolerate_error(error, answered, ttl)?;
                    failures.next()
                }
                Ok(Attempt::Contended { .. }) if one_shot => {
                    self.hold
                        .fail(AcquireOutcome::NotInTime { waited: Moment::now().since(start) });
                    return Err(Cleanup::None);
                }
                Ok(Attempt::Undecided) => spread.pause(),
                Ok(Attempt::Contended { retry, .. }) => {
                    contended = Some(sent);
                    let after = match retry {
                        Retry::After(after) => after,
                        Retry::OnNotify | Retry::Poll => Duration::MAX,
                    };
                    if retry == Retry::Poll || !self.capabilities().push {
                        polls.next().min(after)
                    } else {
                        // Refreshed before the place in the queue ends, and so often that a grant
                        // handed to us has two thirds of its lease before it.
                        (ttl / 3).saturating_sub(Moment::now().since(sent)).min(after)
                    }
                }
                Err(error) => {
                    self.tolerate_error(error, answered, ttl)?;
                    failures.next()
                }
            };
            match self.wait(Listen::Yes, pause, start, until, contended).await? {
                Waited::Granted(granted) => return self.unless_ended(granted),
                Waited::Noticed if !self.capabilities().push => {
                    noticed = true;
                    // The notice went to every waiter, not only to the next one: asking at once would split the vote.
                    let pause = spread.pause();
                    self.wait(Listen::No, pause, start, until, contended).await?;
                }
                Waited::Noticed | Waited::Elapsed => {}
            }
            if Moment::now().since(sent) < MIN_PAUSE {
                // A store that always notifies slows this claim down, and not the whole thread.
                tokio::time::sleep(MIN_PAUSE).await;
            }
            sent = Moment::now();
            let waiting =
                answered.map(|_| Waiting { since: start, contended: contended.is_some() });
            answer = self.ask(sent, until, waiting).await;
        }
    }

    /// Asks once. `waiting` is for a waiter that asks again.
    async fn ask(
        &mut self,
        sent: Moment,
        until: Option<Moment>,
        waiting: Option<Waiting>,
    ) -> Result<Attempt> {
        let floor = match self.hold.mode() {
            Mode::Exclusive if self.has_floors() => {
                self.hold.context.floors.next(&self.hold.name, sent)?
            }
            // Those who hold together should have the same fence: nothing to raise.
            Mode::Exclusive | Mode::Shared | Mode::Permits { .. } => None,
        };
        let until = until.filter(|_| !self.options.is_try());
        let mut attempt = self.claim.attempt(floor);
        match at_once(&mut attempt).await {
            Some(answer) => answer,
            None => boxed(answer(attempt, &self.hold, sent, until, waiting)).await,
        }
    }

    /// Waits for a notice, for the time to ask again, or for the end of the caller's wait.
    async fn wait(
        &mut self,
        listen: Listen,
        pause: Duration,
        start: Moment,
        until: Option<Moment>,
        contended: Option<Moment>,
    ) -> Result<Waited, Cleanup> {
        let again = Moment::now().add(pause.max(MIN_PAUSE));
        let alarm = until.map_or(again, |until| until.min(again));
        let context = self.hold.context.clone();
        let change = tokio::select! {
            biased;
            () = requested(&self.hold) => return Err(Cleanup::Release),
            () = context.closed.cancelled() => {
                self.hold.fail(AcquireOutcome::Failed(self.hold.error("lock", KeeperContext::closed_error())));
                return Err(Cleanup::Release);
            }
            change = self.claim.changed(), if listen == Listen::Yes => Some(change),
            () = sleep_until(Some(alarm)) => None,
            () = context.resumed() => None,
        };
        if let (Some(Change::Granted(grant)), Some(sent)) = (change, contended)
            && self.accepts(sent, grant)
        {
            return Ok(Waited::Granted(Granted { sent, grant }));
        }
        let now = Moment::now();
        if until.is_some_and(|until| now >= until) {
            let waited = now.since(start);
            if contended.is_some() {
                return Err(Cleanup::LeaveQueue { waited });
            }
            // No answer said that another claim holds the lock.
            self.hold
                .fail(AcquireOutcome::Failed(self.hold.error("lock", Error::undecided(waited))));
            return Err(Cleanup::Release);
        }
        Ok(if change.is_some() { Waited::Noticed } else { Waited::Elapsed })
    }

    /// Whether the store honours floors. Then each grant of a lock is the floor of the next.
    fn has_floors(&self) -> bool {
        self.capabilities().fences == Fences::Raisable
    }

    /// Records what the store granted; false if the lease has expired.
    fn accepts(&self, sent: Moment, grant: Grant) -> bool {
        if let Some(fence) = grant.fence
            && self.has_floors()
            && self.hold.asked_mode.kind() == Kind::Lock
        {
            self.hold.context.floors.granted(&self.hold.name, fence, sent);
        }
        self.believes(sent, grant)
    }

    /// The same for a grant that is known from a ticket: its fence does not come from the store, and is no floor.
    fn believes(&self, sent: Moment, grant: Grant) -> bool {
        self.hold.granted(sent, grant.fence, grant.valid_for, self.options.max_hold)
    }

    /// Refuses a grant if the acquire was dropped in the meantime.
    fn unless_ended(&self, granted: Granted) -> Result<Granted, Cleanup> {
        if self.hold.ending().is_some() { Err(Cleanup::Release) } else { Ok(granted) }
    }

    /// Decides whether a failed attempt ends the acquire. The first one does: a store that is down is an error, and
    /// not a wait. Once the store has answered, failures are tolerated for as long as the place in the queue can
    /// have lasted.
    fn tolerate_error(
        &self,
        error: Error,
        answered: Option<Moment>,
        ttl: Duration,
    ) -> Result<(), Cleanup> {
        if self.hold.ending().is_some() {
            return Err(Cleanup::Release);
        }
        let tolerated = answered.is_some_and(|last| Moment::now().since(last) < ttl);
        if tolerated && error.is_retryable() {
            observe::asking_again(&self.hold.observer, self.hold.subject(), &error);
            return Ok(());
        }
        let error = self.hold.error("lock", error);
        self.hold.fail(AcquireOutcome::Failed(error));
        Err(Cleanup::Release)
    }

    pub(super) async fn adopt(&mut self) -> Result<Granted, Cleanup> {
        let sent = Moment::now();
        self.hold.observer.asking(self.hold.subject(), self.options.kind(), sent);
        let ttl = self.hold.ttl();
        let longest = ttl.min(MAX_ANSWER);
        let mut renewal = self.claim.renew(ttl);
        let answer = tokio::select! {
            biased;
            () = requested(&self.hold) => return Err(Cleanup::None),
            answer = within(&mut renewal, sent.add(longest)) => answer,
        };
        drop(renewal);
        let fence = self.hold.fence();
        let error = match answer {
            Some(Ok(Renewal::Renewed { valid_for })) => {
                let grant = Grant { fence, valid_for: Some(valid_for) };
                if self.believes(sent, grant) {
                    return Ok(Granted { sent, grant });
                }
                Error::lost(LossReason::Expired)
            }
            Some(Ok(Renewal::Held)) => {
                let grant = Grant { fence, valid_for: None };
                self.believes(sent, grant);
                return Ok(Granted { sent, grant });
            }
            Some(Ok(Renewal::Lost(_))) => Error::no_such_hold(),
            Some(Err(error)) => error,
            None => Error::no_answer(longest),
        };
        self.hold.fail(AcquireOutcome::Failed(self.hold.error("adopt", error)));
        Err(Cleanup::None)
    }
}

/// A claim that waits, and has been answered before.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    since: Moment,
    /// Whether an answer said that another claim holds the lock.
    contended: bool,
}

/// What ended a wait.
enum Waited {
    Granted(Granted),
    /// The store says that something may have changed.
    Noticed,
    Elapsed,
}

/// Whether a wait ends early at a notice of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listen {
    Yes,
    No,
}

/// The range of the random pauses that keep apart claims which ask an undecided store at the same moment, or after
/// the same notice.
#[derive(Debug)]
struct Spread {
    range: Duration,
}

impl Spread {
    /// Widens the range after a round that took so long and was lost to others. Claims that are less than a round
    /// apart split the vote again.
    fn widen(&mut self, round: Duration) {
        self.range = (self.range * 2).max(round * 2).min(MAX_SPREAD);
    }

    fn pause(&self) -> Duration {
        self.range.mul_f64(fastrand::f64())
    }
}

/// Awaits the answer to an attempt until it would come too late. If the caller's time is up before, or the keeper is
/// closed, the caller is told at once. The answer is still awaited, to release what it grants.
///
/// A waiter was answered before, so it does not wait for this answer for long. Past the end of its time it waits a moment
/// longer, since only the answer says whether it has the lock or has to leave the queue.
async fn answer(
    mut attempt: BoxFuture<'_, Result<Attempt>>,
    hold: &Hold,
    sent: Moment,
    until: Option<Moment>,
    waiting: Option<Waiting>,
) -> Result<Attempt> {
    // A place in the queue is refreshed before it ends.
    let queued = waiting.is_some_and(|waiting| waiting.contended);
    let longest = if queued { hold.ttl() / 3 } else { hold.ttl() };
    let caller = until.map(|until| match waiting {
        Some(_) => until.add(LEAVE_WITHIN),
        None => until.max(sent.add(MIN_ANSWER)),
    });
    let longest = longest.min(MAX_ANSWER);
    let end = sent.add(longest);
    let told = tokio::select! {
        biased;
        answer = &mut attempt => return answer,
        () = hold.context.closed.cancelled() => {
            AcquireOutcome::Failed(hold.error("lock", KeeperContext::closed_error()))
        }
        () = sleep_until(Some(caller.map_or(end, |caller| caller.min(end)))) => {
            let now = Moment::now();
            match waiting {
                _ if now >= end => return Err(Error::no_answer(longest)),
                Some(Waiting { since, contended: true }) => {
                    AcquireOutcome::NotInTime { waited: now.since(since) }
                }
                Some(Waiting { since, contended: false }) => {
                    AcquireOutcome::Failed(hold.error("lock", Error::undecided(now.since(since))))
                }
                None => AcquireOutcome::Failed(hold.error("lock", Error::no_answer(now.since(sent)))),
            }
        }
    };
    hold.fail(told);
    let answer = within(&mut attempt, end).await;
    answer.unwrap_or_else(|| Err(Error::no_answer(longest)))
}
