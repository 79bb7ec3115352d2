//! The wait of an acquire that was not granted at once: pauses and attempts, until a grant or the end of the wait.

use std::time::Duration;

use super::{ClaimDriver, Cleanup, Granted, MIN_PAUSE, Waiter, requested};
use crate::backoff::Backoff;
use crate::clock::{Moment, sleep_until};
use crate::contract::{Attempt, Change, Retry};
use crate::engine::context::KeeperContext;
use crate::engine::observe;
use crate::engine::outcome::AcquireOutcome;
use crate::error::{Error, ErrorKind, Result};

/// The longest pause between two attempts on a store that does not notify.
const MAX_POLL: Duration = Duration::from_millis(500);
/// How long a try repeats attempts that are `Undecided`; a third of the TTL if that is less. On a quorum with a node that
/// does not answer, an attempt takes `Quorum::node_timeout`, half a second by default: this leaves time for four.
const MAX_UNDECIDED: Duration = Duration::from_secs(2);
/// The bounds of the jitter: the random pause that separates claims which attempt at the same time. It starts at the
/// minimum and doubles after every attempt that was refused because of concurrent ones. With a longer maximum the lock
/// would be unused while few claims wait; with a shorter one most votes would be split while many wait.
const MIN_JITTER: Duration = Duration::from_millis(2);
const MAX_JITTER: Duration = Duration::from_millis(250);

/// The state of a wait.
struct Wait {
    start: Moment,
    /// When the wait ends.
    until: Option<Moment>,
    /// When the last attempt was sent.
    sent: Moment,
    /// When the last attempt that was answered with `Contended` was sent.
    contended: Option<Moment>,
    /// When the last attempt that received any answer was sent. `None` for a try.
    answered: Option<Moment>,
    /// Whether the last attempt followed a notification to all waiters.
    notified: bool,
    /// The longest random pause before the next attempt.
    jitter: Duration,
    /// The pauses between attempts on a store that does not notify.
    polls: Backoff,
    /// The pauses after failed attempts.
    failures: Backoff,
}

impl Wait {
    /// Doubles the jitter, and makes it longer than an attempt takes: attempts that overlap would refuse each other again.
    fn increase_jitter(&mut self) {
        let attempt_time = Moment::now().since(self.sent);
        self.jitter = self.jitter.max(attempt_time).saturating_mul(2).min(MAX_JITTER);
    }

    fn random_pause(&self) -> Duration {
        self.jitter.mul_f64(fastrand::f64())
    }
}

impl ClaimDriver {
    /// Continues an acquire whose first attempt was not granted.
    pub(super) async fn retry_until_granted(
        &mut self,
        start: Moment,
        until: Option<Moment>,
        mut answer: Result<Attempt>,
    ) -> Result<Granted, Cleanup> {
        let ttl = self.hold.ttl();
        // A try does not wait for a holder. It only repeats undecided attempts.
        let undecided_until = || Some(start.add(MAX_UNDECIDED.min(ttl / 3)));
        let mut wait = Wait {
            start,
            until: if self.options.is_try() { undecided_until() } else { until },
            sent: start,
            contended: None,
            answered: None,
            notified: false,
            jitter: MIN_JITTER,
            polls: Backoff::new(Duration::from_millis(5), (ttl / 3).min(MAX_POLL)),
            failures: Backoff::new(Duration::from_millis(50), (ttl / 10).min(MAX_POLL)),
        };
        loop {
            if let Ok(Attempt::Granted(grant)) = answer
                && self.accept(wait.sent, grant)
            {
                return self.unless_ended(Granted { sent: wait.sent, grant });
            }
            let pause = self.pause_after(answer, &mut wait)?;
            wait.notified = false;
            match self.pause(Listen::Yes, pause, &wait).await? {
                Paused::Granted(granted) => return self.unless_ended(granted),
                Paused::Notified if !self.capabilities().push => {
                    wait.notified = true;
                    // Without `push`, all waiters are notified. Simultaneous attempts would refuse each other.
                    self.pause(Listen::No, wait.random_pause(), &wait).await?;
                }
                Paused::Notified | Paused::Elapsed => {}
            }
            if Moment::now().since(wait.sent) < MIN_PAUSE {
                // A store whose notifications never stop would make this a busy loop.
                tokio::time::sleep(MIN_PAUSE).await;
            }
            wait.sent = Moment::now();
            let contended = wait.contended.is_some();
            let waiter = wait.answered.map(|_| Waiter { since: start, contended });
            answer = self.attempt(wait.sent, wait.until, waiter).await;
        }
    }

    /// Returns how long to pause after an attempt that was not granted, or an error if the acquire has ended.
    fn pause_after(&self, answer: Result<Attempt>, wait: &mut Wait) -> Result<Duration, Cleanup> {
        let retry = match answer {
            Ok(Attempt::Contended { retry, .. }) => Some(retry),
            Ok(Attempt::Undecided) => None,
            Ok(Attempt::Granted(_)) => {
                // The lease expired before the answer arrived. The next attempt renews it.
                let message =
                    "the lease that the store granted had expired before its answer arrived";
                return self.tolerate_error(Error::new(ErrorKind::Unavailable, message), wait);
            }
            Err(error) => return self.tolerate_error(error, wait),
        };
        self.hold.observer.contended(self.hold.subject());
        let is_try = self.options.is_try();
        wait.answered = Some(wait.sent).filter(|_| !is_try);
        // Only these attempts can have been refused because of concurrent ones. Any other found a holder.
        if wait.notified || retry.is_none() {
            wait.increase_jitter();
        }
        let Some(retry) = retry else { return Ok(wait.random_pause()) };
        if is_try {
            let waited = Moment::now().since(wait.start);
            self.hold.fail(AcquireOutcome::NotAcquired { waited });
            return Err(Cleanup::None);
        }
        wait.contended = Some(wait.sent);
        let after = match retry {
            Retry::After(after) => after,
            Retry::OnNotify | Retry::Poll => Duration::MAX,
        };
        Ok(if retry == Retry::Poll || !self.capabilities().push {
            wait.polls.next().min(after)
        } else {
            // Refreshes the queue entry. The validity of a handed-off grant counts from the last refresh, so at least two
            // thirds of it are left when it arrives.
            (self.hold.ttl() / 3).saturating_sub(Moment::now().since(wait.sent)).min(after)
        })
    }

    /// Returns how long to pause after a failed attempt, or an error if the failure ends the acquire.
    ///
    /// A failure of the first attempt ends it: a store that is down is not contention. Once the store has answered an
    /// attempt, retryable failures are tolerated for a TTL, because a queue entry lasts that long.
    fn tolerate_error(&self, error: Error, wait: &mut Wait) -> Result<Duration, Cleanup> {
        if self.hold.ending().is_some() {
            return Err(Cleanup::Release);
        }
        let ttl = self.hold.ttl();
        let tolerated = wait.answered.is_some_and(|last| Moment::now().since(last) < ttl);
        if tolerated && error.is_retryable() {
            observe::retrying(&self.hold.observer, self.hold.subject(), &error);
            return Ok(wait.failures.next());
        }
        self.hold.fail_with("lock", error);
        Err(Cleanup::Release)
    }

    /// Pauses until a notification, the next attempt or the end of the caller's wait.
    async fn pause(
        &mut self,
        listen: Listen,
        pause: Duration,
        wait: &Wait,
    ) -> Result<Paused, Cleanup> {
        let attempt_at = Moment::now().add(pause.max(MIN_PAUSE));
        let wake_at = wait.until.map_or(attempt_at, |until| until.min(attempt_at));
        let context = self.hold.context.clone();
        let change = tokio::select! {
            biased;
            () = requested(&self.hold) => return Err(Cleanup::Release),
            () = context.closed.cancelled() => {
                self.hold.fail_with("lock", KeeperContext::closed_error());
                return Err(Cleanup::Release);
            }
            change = self.claim.changed(), if listen == Listen::Yes => Some(change),
            () = sleep_until(Some(wake_at)) => None,
            () = context.maintenance.resumed() => None,
        };
        if let (Some(Change::Granted(grant)), Some(sent)) = (change, wait.contended)
            && self.accept(sent, grant)
        {
            return Ok(Paused::Granted(Granted { sent, grant }));
        }
        let now = Moment::now();
        if wait.until.is_some_and(|until| now >= until) {
            let waited = now.since(wait.start);
            if wait.contended.is_some() {
                return Err(Cleanup::LeaveQueue { waited });
            }
            // No attempt was answered with `Contended`.
            self.hold.fail_with("lock", Error::undecided(waited));
            return Err(Cleanup::Release);
        }
        Ok(if change.is_some() { Paused::Notified } else { Paused::Elapsed })
    }
}

/// What ended a pause.
enum Paused {
    Granted(Granted),
    /// The store notified the claim.
    Notified,
    Elapsed,
}

/// Whether a notification of the store ends a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listen {
    Yes,
    No,
}
