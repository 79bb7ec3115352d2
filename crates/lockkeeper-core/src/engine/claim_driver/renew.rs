//! The driver of a hold: renews, serves the guard's requests and listens to the store, until the hold ends or is lost.

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
    /// Renews the hold and serves requests until the hold ends or is lost.
    pub(super) async fn hold_until_end(&mut self, mut schedule: RenewalSchedule) -> Cleanup {
        loop {
            match self.hold.ending() {
                Some(Ending::Release | Ending::Drop) => return Cleanup::Release,
                Some(Ending::Detach) => return Cleanup::None,
                None => {}
            }
            let now = Moment::now();
            let request = self.hold.next_request();
            let still_held = if self.hold.deadline().is_some_and(|deadline| now >= deadline) {
                Err(LossReason::Expired)
            } else if let Some(request) = request {
                boxed(self.serve(request, &mut schedule)).await
            } else if schedule.due.is_some_and(|due| now >= due) {
                let ttl = self.hold.ttl();
                let renewal = boxed(self.renew(ttl, RenewalKind::Renew, &mut schedule));
                match renewal.await {
                    Ok(Renewal::Lost(reason)) => Err(reason),
                    _ => Ok(()),
                }
            } else {
                self.listen(&mut schedule).await
            };
            if let Err(reason) = still_held {
                self.hold.lose(reason);
                return Cleanup::Release;
            }
        }
    }

    /// Waits for a request, a notification, a due renewal or the deadline. Returns an error if the store reports a loss.
    async fn listen(&mut self, schedule: &mut RenewalSchedule) -> Result<(), LossReason> {
        let wake_at = [schedule.due, self.hold.deadline()].into_iter().flatten().min();
        tokio::select! {
            biased;
            () = requested(&self.hold) => {}
            change = self.claim.changed() => match change {
                Change::Lost(reason) => return Err(reason),
                Change::LookAgain | Change::Granted(_) => {
                    // The pause bounds the rate of renewals if the store always notifies.
                    let due = schedule.sent.add(MIN_PAUSE);
                    boxed(sleep_until(Some(due))).await;
                    schedule.due = Some(due);
                }
            },
            () = sleep_until(wake_at) => {}
            () = self.hold.context.maintenance.resumed() => {}
        }
        Ok(())
    }

    /// Serves a request of the guard. Returns an error if the hold is lost.
    async fn serve(
        &mut self,
        request: Request,
        schedule: &mut RenewalSchedule,
    ) -> Result<(), LossReason> {
        let (operation, ttl, kind, reply) = match request {
            Request::Extend(ttl, reply) => {
                if ttl < self.hold.ttl() {
                    // Set even if the request then fails, because the store may still execute it.
                    self.set_ttl(ttl, schedule);
                }
                ("extend", ttl, RenewalKind::Renew, reply)
            }
            Request::Downgrade(reply) => {
                // Set before the answer, which may be lost: other readers may hold the lock from now on.
                self.hold.set_mode(Mode::Shared);
                ("downgrade", self.hold.ttl(), RenewalKind::Downgrade, reply)
            }
        };
        let (answer, still_held) = match self.renew(ttl, kind, schedule).await {
            Ok(Renewal::Lost(reason)) => {
                // Reported before the reply, so that a caller that gets the error also finds the state `Lost`.
                self.hold.lose(reason);
                (Err(self.hold.lost_error(operation)), Err(reason))
            }
            Ok(Renewal::Renewed { .. } | Renewal::Held) => {
                if kind == RenewalKind::Renew {
                    self.set_ttl(ttl, schedule);
                }
                (Ok(()), Ok(()))
            }
            Err(error) => (Err(self.hold.error(operation, error)), Ok(())),
        };
        // The caller may have dropped its future.
        let _ = reply.send(answer);
        still_held
    }

    fn set_ttl(&self, ttl: Duration, schedule: &mut RenewalSchedule) {
        self.hold.set_ttl(ttl);
        schedule.lease = ttl;
    }

    /// Sends one renewal. An error, or no answer in time, is neither a renewal nor a loss: the hold is at risk, and the
    /// renewal is retried soon.
    async fn renew(
        &mut self,
        ttl: Duration,
        kind: RenewalKind,
        schedule: &mut RenewalSchedule,
    ) -> Result<Renewal> {
        let renewing = self.hold.observer.renewing(self.hold.subject(), self.hold.fence());
        let answer = self.send_renewal(ttl, kind, schedule).await;
        renewing.answered(&answer, self.hold.ending());
        answer
    }

    async fn send_renewal(
        &mut self,
        ttl: Duration,
        kind: RenewalKind,
        schedule: &mut RenewalSchedule,
    ) -> Result<Renewal> {
        let sent = Moment::now();
        // A lease does not outlast `max_hold`.
        let lease = self.hold.max_hold_end().map_or(ttl, |end| end.since(sent).min(ttl));
        self.hold.renewing(sent, lease);
        // Leaves half of the remaining time for another renewal.
        let left = self.hold.deadline().map_or(Duration::MAX, |deadline| deadline.since(sent));
        let end = sent.add(schedule.answer_timeout(lease).min(left / 2));
        schedule.sent = sent;
        let mut renewal = match kind {
            RenewalKind::Renew => self.claim.renew(lease),
            RenewalKind::Downgrade => self.claim.downgrade(lease),
        };
        let answer = tokio::select! {
            biased;
            answer = &mut renewal => Some(answer),
            () = ended(&self.hold) => None,
            () = sleep_until(Some(end)) => None,
            () = self.hold.context.maintenance.resumed() => None,
        };
        drop(renewal);
        let answer = answer.unwrap_or_else(|| Err(Error::no_answer(Moment::now().since(sent))));
        let valid_for = match &answer {
            Ok(Renewal::Renewed { valid_for }) => Some(*valid_for),
            Ok(Renewal::Held) => None,
            Ok(Renewal::Lost(_)) => return answer,
            Err(error)
                if kind == RenewalKind::Downgrade && error.kind() == ErrorKind::Unsupported =>
            {
                return answer;
            }
            Err(error) => {
                self.at_risk(error, schedule);
                return answer;
            }
        };
        if !self.hold.renewed(sent, valid_for) {
            // Confirmed after the deadline. The loss has been reported and is final.
            return Ok(Renewal::Lost(LossReason::Expired));
        }
        schedule.failures = 0;
        // A lease that was cut short by `max_hold` is not renewed.
        schedule.due = (lease == ttl).then(|| sent.add(valid_for.unwrap_or(lease).min(lease) / 3));
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

/// The request to send as a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RenewalKind {
    Renew,
    Downgrade,
}

/// When to renew next.
pub(super) struct RenewalSchedule {
    /// When the last renewal was sent. Before the first renewal: when the granted attempt was sent.
    sent: Moment,
    /// `None` if `max_hold` allows no further renewal.
    due: Option<Moment>,
    /// The lease that renewals request.
    lease: Duration,
    /// The number of failed renewals since the last successful one.
    failures: u32,
}

impl RenewalSchedule {
    pub(super) fn new(sent: Moment, lease: Duration) -> Self {
        let due = Some(sent.add(lease / 3));
        Self { sent, due, lease, failures: 0 }
    }

    /// Returns the timeout of the next renewal. It doubles with each of the first three failures, because the store may be
    /// slow.
    fn answer_timeout(&self, lease: Duration) -> Duration {
        (lease / 6 * 2_u32.pow(self.failures.min(3))).max(MIN_PAUSE)
    }

    /// Schedules the retry of a failed renewal.
    fn failed(&mut self, deadline: Option<Moment>) {
        let now = Moment::now();
        let limit = self.lease / 60 * 2_u32.pow(self.failures.min(2));
        let mut pause = Backoff::new(limit, limit).next();
        if let Some(deadline) = deadline {
            // Leaves time for the retry.
            pause = pause.min(deadline.since(now) / 2);
        }
        self.failures += 1;
        self.due = Some(now.add(pause.max(MIN_PAUSE)));
    }
}
