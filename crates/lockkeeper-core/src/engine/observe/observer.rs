//! Reports the life of one claim as spans and metrics.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing::Span;

use super::{Subject, contained, metrics, spans};
use crate::clock::Moment;
use crate::contract::{Mode, Renewal};
use crate::engine::outcome::{AcquireOutcome, Ending};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;
use crate::loss::LossReason;

/// Whether spans or metrics are compiled in.
const ENABLED: bool = metrics::ENABLED || spans::ENABLED;

/// Reports one claim from the first attempt to the end of its hold.
///
/// It keeps the phase of the claim, so that every acquire has one outcome and every hold has one end. The first report
/// counts: a grant and the drop of the acquire may race on two threads.
#[derive(Debug)]
pub(crate) struct Observer {
    /// An array of one phase. It is empty in a build without spans and metrics, so that the observer has no size there.
    phase: [Mutex<Phase>; ENABLED as usize],
}

#[derive(Debug)]
enum Phase {
    New,
    Acquiring(Acquiring),
    Holding(Holding),
    Ended,
}

#[derive(Debug)]
struct Acquiring {
    since: Moment,
    kind: AcquireKind,
    contended: bool,
    span: Span,
}

#[derive(Debug)]
struct Holding {
    since: Moment,
    span: Span,
}

/// How a lock is acquired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AcquireKind {
    /// One attempt.
    Try,
    /// Attempts, and a wait for other holders.
    Wait,
    /// By a ticket, with a renewal.
    Adopt,
}

/// Runs a report. Does nothing in a build without spans and metrics.
fn report(report: impl FnOnce()) {
    if ENABLED {
        contained(report);
    }
}

/// Reports an acquire that was rejected before the first attempt.
pub(crate) fn rejected(store: &'static str, mode: Mode, error: &Error) {
    report(|| {
        let outcome = match error.kind() {
            ErrorKind::Closed => "closed",
            ErrorKind::Unavailable => "failed",
            _ => "rejected",
        };
        metrics::acquired(store, mode, outcome, None);
    });
}

impl Observer {
    pub(crate) fn new() -> Self {
        Self { phase: std::array::from_fn(|_| Mutex::new(Phase::New)) }
    }

    fn phase(&self) -> Option<MutexGuard<'_, Phase>> {
        // A subscriber may panic while the mutex is locked (`Span::clone`). That does not change the phase.
        self.phase.first().map(|phase| phase.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn replace(&self, next: Phase) -> Phase {
        self.phase().map_or(Phase::Ended, |mut phase| std::mem::replace(&mut *phase, next))
    }

    /// Reports that the first attempt is about to be sent.
    pub(crate) fn acquiring(&self, subject: Subject<'_>, kind: AcquireKind, since: Moment) {
        report(|| {
            let acquiring = Acquiring { since, kind, contended: false, span: spans::wait(subject) };
            self.replace(Phase::Acquiring(acquiring));
        });
    }

    /// Reports an attempt that was contended or undecided. Called for each one; the first counts.
    pub(crate) fn contended(&self, subject: Subject<'_>) {
        report(|| {
            let first = match self.phase().as_deref_mut() {
                Some(Phase::Acquiring(acquiring)) => {
                    !std::mem::replace(&mut acquiring.contended, true)
                }
                _ => false,
            };
            if first {
                metrics::contended(subject);
            }
        });
    }

    /// Reports a grant. Must be called before another thread can see the grant and end the hold.
    pub(crate) fn granted(&self, subject: Subject<'_>, fence: impl FnOnce() -> Option<Fence>) {
        report(|| {
            let (now, fence) = (Moment::now(), fence());
            let span = spans::hold(subject, fence);
            let Some(mut phase) = self.phase() else { return };
            // Another thread may have dropped the acquire just now.
            if !matches!(*phase, Phase::Acquiring(_)) {
                return;
            }
            let holding = Phase::Holding(Holding { since: now, span });
            let acquiring = std::mem::replace(&mut *phase, holding);
            drop(phase);
            if let Phase::Acquiring(acquiring) = acquiring {
                let outcome = match acquiring.kind {
                    AcquireKind::Adopt => "adopted",
                    _ if acquiring.contended => "granted_after_wait",
                    _ => "granted_at_once",
                };
                acquiring.span.record("fence", fence.map(Fence::get));
                acquiring.end(subject, outcome, now);
            }
        });
    }

    /// Reports the outcome of an acquire that was not granted, before the caller gets it.
    pub(crate) fn not_granted(&self, subject: Subject<'_>, outcome: &AcquireOutcome) {
        report(|| {
            // If the acquire was dropped first, that is its outcome.
            if let Phase::Acquiring(acquiring) = self.replace(Phase::Ended) {
                let outcome = match outcome {
                    AcquireOutcome::NotAcquired { .. } if acquiring.kind == AcquireKind::Try => {
                        "not_acquired"
                    }
                    AcquireOutcome::NotAcquired { .. } => "timed_out",
                    AcquireOutcome::Failed(error) if error.kind() == ErrorKind::Closed => "closed",
                    AcquireOutcome::Failed(error) if error.kind() == ErrorKind::Undecided => {
                        "undecided"
                    }
                    AcquireOutcome::Failed(_) | AcquireOutcome::Granted => "failed",
                };
                acquiring.end(subject, outcome, Moment::now());
            }
        });
    }

    /// Reports the end of the guard or of the acquire, with the time that was left of the lease.
    pub(crate) fn ended(&self, subject: Subject<'_>, ending: Ending, left: Option<Duration>) {
        report(|| match self.replace(Phase::Ended) {
            Phase::Acquiring(acquiring) => acquiring.end(subject, "cancelled", Moment::now()),
            Phase::Holding(holding) => {
                let outcome = match ending {
                    Ending::Release => "released",
                    Ending::Drop => "dropped",
                    Ending::Detach => "detached",
                };
                if let (Some(left), Ending::Release | Ending::Drop) = (left, ending) {
                    metrics::remaining(subject, left);
                }
                holding.end(subject, outcome);
            }
            Phase::New | Phase::Ended => {}
        });
    }

    /// Reports that the hold is lost, or that an acquire without an outcome is no longer driven.
    pub(crate) fn lost(&self, subject: Subject<'_>, reason: LossReason) {
        report(|| match self.replace(Phase::Ended) {
            Phase::Acquiring(acquiring) => {
                let outcome = match reason {
                    LossReason::RuntimeShutdown => "closed",
                    _ => "failed",
                };
                acquiring.end(subject, outcome, Moment::now());
            }
            Phase::Holding(holding) => {
                metrics::lost(subject, reason);
                holding.span.record("reason", reason.as_str());
                holding.end(subject, "lost");
            }
            Phase::New | Phase::Ended => {}
        });
    }

    /// Reports that a renewal is about to be sent.
    pub(crate) fn renewing(&self, subject: Subject<'_>, fence: Option<Fence>) -> Renewing {
        if !spans::ENABLED {
            return Renewing(Span::none());
        }
        let span = contained(|| spans::renew(subject, fence, &self.span()));
        Renewing(span.unwrap_or_else(Span::none))
    }

    /// Emits an event inside the span of the phase.
    pub(crate) fn in_span(&self, event: impl FnOnce()) {
        contained(|| self.span().in_scope(event));
    }

    fn span(&self) -> Span {
        match self.phase().as_deref() {
            Some(
                Phase::Acquiring(Acquiring { span, .. }) | Phase::Holding(Holding { span, .. }),
            ) => span.clone(),
            Some(Phase::New | Phase::Ended) | None => Span::none(),
        }
    }
}

impl Acquiring {
    fn end(self, subject: Subject<'_>, outcome: &'static str, now: Moment) {
        let Subject { store, mode, .. } = subject;
        metrics::acquired(store, mode, outcome, Some(now.since(self.since)));
        self.span.record("outcome", outcome);
    }
}

impl Holding {
    fn end(self, subject: Subject<'_>, outcome: &'static str) {
        metrics::held(subject, outcome, Moment::now().since(self.since));
        self.span.record("outcome", outcome);
    }
}

/// A renewal in flight.
pub(crate) struct Renewing(Span);

impl Renewing {
    /// Reports the answer. `ending` is set if the hold has ended in the meantime.
    pub(crate) fn answered(self, answer: &Result<Renewal>, ending: Option<Ending>) {
        report(|| {
            let outcome = match answer {
                Ok(Renewal::Renewed { .. } | Renewal::Held) => "renewed",
                Ok(Renewal::Lost(_)) => "lost",
                Err(_) if ending.is_some() => "cancelled",
                Err(_) => "failed",
            };
            self.0.record("outcome", outcome);
        });
    }
}

#[cfg(all(test, not(any(feature = "metrics", feature = "spans"))))]
mod tests {
    use super::*;

    #[test]
    fn an_observer_that_reports_nothing_takes_no_space() {
        assert_eq!(size_of::<Observer>(), 0);
    }
}
