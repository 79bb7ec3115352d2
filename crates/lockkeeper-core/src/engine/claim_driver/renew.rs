//! A hold: listen, renew and serve the guard's requests until it ends or is lost.

use std::time::Duration;

use super::{ClaimDriver, Cleanup, MIN_PAUSE, ended, requested};
use crate::backoff::Backoff;
use crate::clock::{Moment, sleep_until};
use crate::contract::{Change, Mode, Renewal};
use crate::engine::hold::Request;
use crate::engine::observe;
use crate::engine::outcome::Ending;
use crate::error::{Error, ErrorKind, Result};
use crate::futures::boxed;
use crate::loss::LossReason;

impl ClaimDriver {
    pub(super) async fn keep(&mut self, mut schedule: RenewalSchedule) -> Cleanup {
        loop {
            match self.hold.ending() {
                Some(Ending::Release | Ending::Drop) => return Cleanup::Release,
                Some(Ending::Detach) => return Cleanup::None,
                None => {}
            }
            let now = Moment::now();
            let request = self.hold.next_request();
            let lives = if self.hold.deadline().is_some_and(|deadline| now >= deadline) {
                Err(LossReason::Expired)
            } else if let Some(request) = request {
                boxed(self.serve(request, &mut schedule)).await
            } else if schedule.due.is_some_and(|due| now >= due) {
                let ttl = self.hold.ttl();
                let renewal = boxed(self.renew(ttl, Step::Renew, &mut schedule));
                match renewal.await {
                    Ok(Renewal::Lost(reason)) => Err(reason),
                    _ => Ok(()),
                }
            } else {
                self.listen(&mut schedule).await
            };
            if let Err(reason) = lives {
                self.hold.lose(reason);
                return Cleanup::Release;
            }
        }
    }

    /// Waits for the next thing to do; an error if the hold is gone.
    async fn listen(&mut self, schedule: &mut RenewalSchedule) -> Result<(), LossReason> {
        let deadline = self.hold.deadline();
        let alarm = match (schedule.due, deadline) {
            (Some(due), Some(deadline)) => Some(due.min(deadline)),
            (due, deadline) => due.or(deadline),
        };
        tokio::select! {
            biased;
            () = requested(&self.hold) => {}
            change = self.claim.changed() => match change {
                Change::Lost(reason) => return Err(reason),
                Change::LookAgain | Change::Granted(_) => {
                    // With a pause, even if the store always notifies.
                    let due = schedule.sent.add(MIN_PAUSE);
                    boxed(sleep_until(Some(due))).await;
                    schedule.due = Some(due);
                }
            },
            () = sleep_until(alarm) => {}
            () = self.hold.context.resumed() => {}
        }
        Ok(())
    }

    /// Does what the guard asked for; an error if the hold is gone.
    async fn serve(
        &mut self,
        request: Request,
        schedule: &mut RenewalSchedule,
    ) -> Result<(), LossReason> {
        let (ttl, step, reply) = match request {
            Request::Extend(ttl, reply) => {
                if ttl < self.hold.ttl() {
                    // From now on, whatever the answer: this request could still shorten a longer lease of a
                    // later renewal.
                    self.set_ttl(ttl, schedule);
                }
                (ttl, Step::Renew, reply)
            }
            Request::Downgrade(reply) => {
                // The store may obey and its answer be lost: from now on others may read.
                self.hold.set_mode(Mode::Shared);
                (self.hold.ttl(), Step::Downgrade, reply)
            }
        };
        let answer = self.renew(ttl, step, schedule).await;
        let lives = match &answer {
            Ok(Renewal::Lost(reason)) => Err(*reason),
            _ => Ok(()),
        };
        let operation = match step {
            Step::Renew => "extend",
            Step::Downgrade => "downgrade",
        };
        let answer = match answer {
            Ok(Renewal::Lost(reason)) => {
                // Before the answer, so that the caller finds a state that matches it.
                self.hold.lose(reason);
                Err(self.hold.lost_error(operation))
            }
            Ok(Renewal::Renewed { .. } | Renewal::Held) => {
                if step == Step::Renew {
                    self.set_ttl(ttl, schedule);
                }
                Ok(())
            }
            Err(error) => Err(self.hold.error(operation, error)),
        };
        // The caller may have dropped its future.
        let _ = reply.send(answer);
        lives
    }

    fn set_ttl(&self, ttl: Duration, schedule: &mut RenewalSchedule) {
        self.hold.set_ttl(ttl);
        schedule.lease = ttl;
    }

    /// Renews once. An error, or no answer, is neither a renewal nor a loss: the hold is at risk, and
    /// the next attempt follows soon.
    async fn renew(
        &mut self,
        ttl: Duration,
        step: Step,
        schedule: &mut RenewalSchedule,
    ) -> Result<Renewal> {
        let renewing = self.hold.observer.renewing(self.hold.subject(), self.hold.fence());
        let answer = self.send_renewal(ttl, step, schedule).await;
        renewing.answered(&answer, self.hold.ending());
        answer
    }

    async fn send_renewal(
        &mut self,
        ttl: Duration,
        step: Step,
        schedule: &mut RenewalSchedule,
    ) -> Result<Renewal> {
        let sent = Moment::now();
        let (lease, next) = match self.hold.latest() {
            // The lease ends with `max_hold`: there is nothing to renew after this.
            Some(latest) if latest < sent.add(ttl) => (latest.since(sent), Next::None),
            _ => (ttl, Next::Due),
        };
        self.hold.renewing(sent, lease);
        // Half of the remaining time is for the next attempt.
        let left = self.hold.deadline().map_or(Duration::MAX, |deadline| deadline.since(sent));
        let patience = schedule.patience(lease).min(left / 2);
        schedule.sent = sent;
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
            () = self.hold.context.resumed() => None,
        };
        drop(renewal);
        let answer = answer.unwrap_or_else(|| Err(Error::no_answer(Moment::now().since(sent))));
        let valid_for = match &answer {
            Ok(Renewal::Renewed { valid_for }) => Some(*valid_for),
            Ok(Renewal::Held) => None,
            Ok(Renewal::Lost(_)) => return answer,
            Err(error) if step == Step::Downgrade && error.kind() == ErrorKind::Unsupported => {
                return answer;
            }
            Err(error) => {
                self.at_risk(error, schedule);
                return answer;
            }
        };
        if !self.hold.renewed(sent, valid_for) {
            // Confirmed after the deadline: the loss has been reported by then, and is final.
            return Ok(Renewal::Lost(LossReason::Expired));
        }
        schedule.renewed(sent, valid_for.unwrap_or(lease).min(lease), next);
        answer
    }

    fn at_risk(&self, error: &Error, schedule: &mut RenewalSchedule) {
        if self.hold.ending().is_none() {
            observe::renewal_failed(&self.hold.observer, self.hold.subject(), error);
            self.hold.at_risk();
        }
        schedule.failed(self.hold.deadline());
    }
}

/// What kind of renewal is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Renew,
    Downgrade,
}

/// Whether another renewal follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Due,
    /// The lease lasts until `max_hold` ends it.
    None,
}

/// When to renew next.
pub(super) struct RenewalSchedule {
    /// When the last one was sent.
    sent: Moment,
    /// `None` when the hold may not last longer than it does already.
    due: Option<Moment>,
    lease: Duration,
    /// How many have failed since the last that did not.
    failures: u32,
}

impl RenewalSchedule {
    pub(super) fn new(sent: Moment, lease: Duration) -> Self {
        let due = Some(sent.add(lease / 3));
        Self { sent, due, lease, failures: 0 }
    }

    /// How long to wait for an answer: longer after each failure, for a store that is slow.
    fn patience(&self, lease: Duration) -> Duration {
        let patience = lease / 6 * 2_u32.pow(self.failures.min(3));
        patience.max(MIN_PAUSE)
    }

    fn renewed(&mut self, sent: Moment, lease: Duration, next: Next) {
        self.due = match next {
            Next::Due => Some(sent.add(lease / 3)),
            Next::None => None,
        };
        self.failures = 0;
    }

    fn failed(&mut self, deadline: Option<Moment>) {
        let now = Moment::now();
        let limit = self.lease / 60 * 2_u32.pow(self.failures.min(2));
        let mut pause = Backoff::new(limit, limit).next();
        if let Some(deadline) = deadline {
            // Leaves time for another attempt.
            pause = pause.min(deadline.since(now) / 2);
        }
        self.failures += 1;
        self.due = Some(now.add(pause.max(MIN_PAUSE)));
    }
}
