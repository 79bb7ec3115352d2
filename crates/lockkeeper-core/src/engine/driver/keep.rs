//! The time of a hold: listen, renew, serve the guard, until it ends or is lost.

use std::time::Duration;

use super::{Job, LEAST_PAUSE, Left, asked, ended};
use crate::backoff::Backoff;
use crate::clock::{Moment, sleep_until};
use crate::contract::{Change, Mode, Renewal};
use crate::engine::hold::{Ending, Request};
use crate::engine::observe;
use crate::error::{Error, ErrorKind, Result};
use crate::futures::boxed;
use crate::loss::LossReason;

impl Job {
    pub(super) async fn keep(&mut self, mut pulse: Pulse) -> Left {
        loop {
            match self.hold.ending() {
                Some(Ending::Release | Ending::Drop) => return Left::Something,
                Some(Ending::Detach) => return Left::Nothing,
                None => {}
            }
            let now = Moment::now();
            let request = self.hold.next_request();
            let lives = if self.hold.deadline().is_some_and(|deadline| now >= deadline) {
                Err(LossReason::Expired)
            } else if let Some(request) = request {
                boxed(self.serve(request, &mut pulse)).await
            } else if pulse.due.is_some_and(|due| now >= due) {
                let ttl = self.hold.ttl();
                let renewal = boxed(self.renew(ttl, Step::Renew, &mut pulse));
                match renewal.await {
                    Ok(Renewal::Lost(reason)) => Err(reason),
                    _ => Ok(()),
                }
            } else {
                self.listen(&mut pulse).await
            };
            if let Err(reason) = lives {
                self.hold.lose(reason);
                return Left::Something;
            }
        }
    }

    /// Waits for the next thing to do; an error if the hold is gone.
    async fn listen(&mut self, pulse: &mut Pulse) -> Result<(), LossReason> {
        let deadline = self.hold.deadline();
        let alarm = match (pulse.due, deadline) {
            (Some(due), Some(deadline)) => Some(due.min(deadline)),
            (due, deadline) => due.or(deadline),
        };
        tokio::select! {
            biased;
            () = asked(&self.hold) => {}
            change = self.claim.changed() => match change {
                Change::Lost(reason) => return Err(reason),
                Change::LookAgain | Change::Granted(_) => {
                    // Not again and again without a pause, whatever the store says.
                    let due = pulse.sent.add(LEAST_PAUSE);
                    boxed(sleep_until(Some(due))).await;
                    pulse.due = Some(due);
                }
            },
            () = sleep_until(alarm) => {}
            () = self.hold.context.woken() => {}
        }
        Ok(())
    }

    /// Does what the guard asked for; an error if the hold is gone.
    async fn serve(&mut self, request: Request, pulse: &mut Pulse) -> Result<(), LossReason> {
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
                // Told before the answer, so that whoever gets the answer finds the state to match.
                self.hold.lose(reason);
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
        let renewing = self.hold.watch.renewing(&self.hold);
        let answer = self.send_renewal(ttl, step, pulse).await;
        renewing.answered(&self.hold, &answer);
        answer
    }

    async fn send_renewal(
        &mut self,
        ttl: Duration,
        step: Step,
        pulse: &mut Pulse,
    ) -> Result<Renewal> {
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
            () = self.hold.context.woken() => None,
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
                self.at_risk(error, pulse);
                return answer;
            }
        };
        if !self.hold.renewed(sent, valid_for) {
            // Confirmed after the deadline: by then the loss had been told, and that is final.
            return Ok(Renewal::Lost(LossReason::Expired));
        }
        pulse.renewed(sent, valid_for.unwrap_or(lease).min(lease), last);
        answer
    }

    fn at_risk(&self, error: &Error, pulse: &mut Pulse) {
        if self.hold.ending().is_none() {
            observe::renewal_failed(&self.hold, error);
            self.hold.at_risk();
        }
        pulse.failed(self.hold.deadline());
    }
}

/// What kind of renewal is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Renew,
    Downgrade,
}

/// When to renew next.
pub(super) struct Pulse {
    /// When the last one was sent.
    sent: Moment,
    /// `None` when the hold may not last longer than it does already.
    due: Option<Moment>,
    lease: Duration,
    /// How many have failed since the last that did not.
    failures: u32,
}

impl Pulse {
    pub(super) fn new(sent: Moment, lease: Duration) -> Self {
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
