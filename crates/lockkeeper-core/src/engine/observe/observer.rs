//! What happens to one claim, reported as spans and as metrics.

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

/// Whether there is anything to report to.
const ENABLED: bool = metrics::ENABLED || spans::ENABLED;

/// Follows one claim from the first attempt to the end of its hold.
///
/// It keeps track of the phase itself, so that every acquire has one outcome and every hold one end, whichever is
/// reported first: a grant and the drop of the acquire may race on two threads.
#[derive(Debug)]
pub(crate) struct Observer {
    /// One, or none in a build that reports nothing, so that it takes no space there.
    phase: [Mutex<Phase>; ENABLED as usize],
}

#[derive(Debug)]
enum Phase {
    New,
    Asking(Asking),
    Holding(Holding),
    Over,
}

#[derive(Debug)]
struct Asking {
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

/// How a lock is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AcquireKind {
    /// One attempt.
    Try,
    /// With a wait.
    Wait,
    /// By a ticket.
    Adopt,
}

/// Reports; nothing in a build without spans and metrics.
fn report(report: impl FnOnce()) {
    if ENABLED {
        contained(report);
    }
}

/// An acquire was rejected before the store was asked.
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
        // A subscriber may panic while it is locked, and that changes no phase.
        self.phase.first().map(|phase| phase.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn replace(&self, next: Phase) -> Phase {
        self.phase().map_or(Phase::Over, |mut phase| std::mem::replace(&mut *phase, next))
    }

    /// The first attempt is about to be sent.
    pub(crate) fn asking(&self, subject: Subject<'_>, kind: AcquireKind, since: Moment) {
        report(|| {
            let asking = Asking { since, kind, contended: false, span: spans::wait(subject) };
            self.replace(Phase::Asking(asking));
        });
    }

    /// Another claim holds the lock. Reported at every such answer; the first counts.
    pub(crate) fn contended(&self, subject: Subject<'_>) {
        report(|| {
            let first = match self.phase().as_deref_mut() {
                Some(Phase::Asking(asking)) => !std::mem::replace(&mut asking.contended, true),
                _ => false,
            };
            if first {
                metrics::contended(subject);
            }
        });
    }

    /// The lock is held from now on. To be reported before the grant can be seen, and ended.
    pub(crate) fn granted(&self, subject: Subject<'_>, fence: impl FnOnce() -> Option<Fence>) {
        report(|| {
            let (now, fence) = (Moment::now(), fence());
            let span = spans::hold(subject, fence);
            let Some(mut phase) = self.phase() else { return };
            // The acquire may have been dropped at this very moment.
            if !matches!(*phase, Phase::Asking(_)) {
                return;
            }
            let holding = Phase::Holding(Holding { since: now, span });
            let asking = std::mem::replace(&mut *phase, holding);
            drop(phase);
            if let Phase::Asking(asking) = asking {
                let outcome = match asking.kind {
                    AcquireKind::Adopt => "adopted",
                    _ if asking.contended => "granted_after_wait",
                    _ => "granted_at_once",
                };
                asking.span.record("fence", fence.map(Fence::get));
                asking.end(subject, outcome, now);
            }
        });
    }

    /// The caller is about to be told that it did not get the lock.
    pub(crate) fn not_granted(&self, subject: Subject<'_>, outcome: &AcquireOutcome) {
        report(|| {
            // If the acquire was dropped, that was the outcome.
            if let Phase::Asking(asking) = self.replace(Phase::Over) {
                let outcome = match outcome {
                    AcquireOutcome::NotInTime { .. } if asking.kind == AcquireKind::Try => {
                        "not_acquired"
                    }
                    AcquireOutcome::NotInTime { .. } => "timed_out",
                    AcquireOutcome::Failed(error) if error.kind() == ErrorKind::Closed => "closed",
                    AcquireOutcome::Failed(error) if error.kind() == ErrorKind::Undecided => {
                        "undecided"
                    }
                    AcquireOutcome::Failed(_) | AcquireOutcome::Granted => "failed",
                };
                asking.end(subject, outcome, Moment::now());
            }
        });
    }

    /// The guard, or the acquire, has ended; so much was left of the lease.
    pub(crate) fn ended(&self, subject: Subject<'_>, ending: Ending, left: Option<Duration>) {
        report(|| match self.replace(Phase::Over) {
            Phase::Asking(asking) => asking.end(subject, "cancelled", Moment::now()),
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
            Phase::New | Phase::Over => {}
        });
    }

    /// The hold is lost; or an acquire that has not ended is no longer driven.
    pub(crate) fn lost(&self, subject: Subject<'_>, reason: LossReason) {
        report(|| match self.replace(Phase::Over) {
            Phase::Asking(asking) => {
                let outcome = match reason {
                    LossReason::RuntimeShutdown => "closed",
                    _ => "failed",
                };
                asking.end(subject, outcome, Moment::now());
            }
            Phase::Holding(holding) => {
                metrics::lost(subject, reason);
                holding.span.record("reason", reason.as_str());
                holding.end(subject, "lost");
            }
            Phase::New | Phase::Over => {}
        });
    }

    /// A renewal is about to be sent.
    pub(crate) fn renewing(&self, subject: Subject<'_>, fence: Option<Fence>) -> Renewing {
        if !spans::ENABLED {
            return Renewing(Span::none());
        }
        let span = contained(|| spans::renew(subject, fence, &self.span()));
        Renewing(span.unwrap_or_else(Span::none))
    }

    /// Makes an event part of the phase's span.
    pub(crate) fn in_span(&self, event: impl FnOnce()) {
        contained(|| self.span().in_scope(event));
    }

    fn span(&self) -> Span {
        match self.phase().as_deref() {
            Some(Phase::Asking(Asking { span, .. }) | Phase::Holding(Holding { span, .. })) => {
                span.clone()
            }
            Some(Phase::New | Phase::Over) | None => Span::none(),
        }
    }
}

impl Asking {
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

/// A renewal that was sent.
pub(crate) struct Renewing(Span);

impl Renewing {
    /// Reports the answer. `ending`: the hold has ended in the meantime.
    pub(crate) fn answered(self, answer: &Result<Renewal>, ending: Option<Ending>) {
        report(|| {
            let outcome = match answer {
                Ok(Renewal::Renewed { .. } | Renewal::Held) => "renewed",
                Ok(Renewal::Lost(_)) => "lost",
                Err(_) if ending.is_some() => "given_up",
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
