//! What happens to one claim, told as spans and as metrics.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::spans::{self, Span};
use super::{contained, meters};
use crate::clock::Moment;
use crate::contract::{Mode, Renewal};
use crate::engine::context::KeeperContext;
use crate::engine::driver::Plan;
use crate::engine::hold::{Ending, Hold, Verdict};
use crate::error::{Error, ErrorKind, Result};
use crate::loss::LossReason;

/// Follows one claim from the first ask to the end of its hold.
///
/// It keeps count of the phase by itself, so that every acquire has one outcome and every hold one end,
/// whoever comes first: a grant and the caller's going may cross on two threads.
#[derive(Debug)]
pub(crate) struct Watch(Mutex<Phase>);

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
    manner: Manner,
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
enum Manner {
    Once,
    Patiently,
    ByTicket,
}

impl Watch {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Phase::New))
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        // What panics while it is locked is a subscriber, and that changes no phase.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the phase, whichever it is.
    fn end_phase(&self) -> Phase {
        std::mem::replace(&mut *self.phase(), Phase::Over)
    }

    /// The store was not even asked.
    pub(crate) fn turned_away(context: &KeeperContext, mode: Mode, error: &Error) {
        contained(|| {
            let outcome = match error.kind() {
                ErrorKind::Closed => "closed",
                ErrorKind::Unavailable => "failed",
                _ => "rejected",
            };
            meters::acquired(context.backend.name(), mode, outcome, None);
        });
    }

    /// The first ask is about to be sent.
    pub(crate) fn asking(&self, hold: &Hold, plan: Plan, since: Moment) {
        contained(|| {
            let manner = match plan.wait {
                _ if plan.adopt => Manner::ByTicket,
                Some(Duration::ZERO) => Manner::Once,
                _ => Manner::Patiently,
            };
            let asking = Asking { since, manner, contended: false, span: spans::wait(hold) };
            *self.phase() = Phase::Asking(asking);
        });
    }

    /// Others hold the lock. Told at every such answer; the first counts.
    pub(crate) fn contended(&self, hold: &Hold) {
        contained(|| {
            let first = match &mut *self.phase() {
                Phase::Asking(asking) => !std::mem::replace(&mut asking.contended, true),
                _ => false,
            };
            if first {
                meters::contended(hold);
            }
        });
    }

    /// The lock is held from now on. To be told before anybody can know of it and end it.
    pub(crate) fn granted(&self, hold: &Hold) {
        contained(|| {
            let now = Moment::now();
            let span = spans::hold(hold);
            let asking = {
                let mut phase = self.phase();
                // The caller may have gone at this very moment.
                if !matches!(*phase, Phase::Asking(_)) {
                    return;
                }
                std::mem::replace(&mut *phase, Phase::Holding(Holding { since: now, span }))
            };
            if let Phase::Asking(asking) = asking {
                let outcome = match asking.manner {
                    Manner::ByTicket => "adopted",
                    _ if asking.contended => "granted_after_wait",
                    _ => "granted_at_once",
                };
                asking.span.record_fence(hold);
                asking.end(hold, outcome, now);
            }
        });
    }

    /// The caller is about to be told that it did not get the lock.
    pub(crate) fn not_granted(&self, hold: &Hold, verdict: &Verdict) {
        contained(|| {
            // If the caller has gone, that was the outcome.
            if let Phase::Asking(asking) = self.end_phase() {
                let outcome = match verdict {
                    Verdict::NotInTime { .. } if asking.manner == Manner::Once => "not_acquired",
                    Verdict::NotInTime { .. } => "timed_out",
                    Verdict::Failed(error) if error.kind() == ErrorKind::Closed => "closed",
                    Verdict::Failed(error) if error.kind() == ErrorKind::Undecided => "undecided",
                    Verdict::Failed(_) | Verdict::Granted => "failed",
                };
                asking.end(hold, outcome, Moment::now());
            }
        });
    }

    /// The guard, or the acquire, is gone; so much was left of the lease.
    pub(crate) fn ended(&self, hold: &Hold, ending: Ending, left: Option<Duration>) {
        contained(|| match self.end_phase() {
            Phase::Asking(asking) => asking.end(hold, "cancelled", Moment::now()),
            Phase::Holding(holding) => {
                let outcome = match ending {
                    Ending::Release => "released",
                    Ending::Drop => "dropped",
                    Ending::Detach => "detached",
                };
                if let (Some(left), Ending::Release | Ending::Drop) = (left, ending) {
                    meters::remaining(hold, left);
                }
                holding.end(hold, outcome);
            }
            Phase::New | Phase::Over => {}
        });
    }

    /// The hold is lost; or nobody drives any more an acquire that is still on its way.
    pub(crate) fn lost(&self, hold: &Hold, reason: LossReason) {
        contained(|| match self.end_phase() {
            Phase::Asking(asking) => {
                let outcome = match reason {
                    LossReason::RuntimeShutdown => "closed",
                    _ => "failed",
                };
                asking.end(hold, outcome, Moment::now());
            }
            Phase::Holding(holding) => {
                meters::lost(hold, reason);
                holding.span.record("reason", reason.as_str());
                holding.end(hold, "lost");
            }
            Phase::New | Phase::Over => {}
        });
    }

    /// A renewal is about to be sent.
    pub(crate) fn renewing(&self, hold: &Hold) -> Renewing {
        let span = contained(|| spans::renew(hold, &self.span()));
        Renewing(span.unwrap_or_else(Span::none))
    }

    pub(crate) fn renewal_failed(hold: &Hold) {
        contained(|| {
            meters::renewal_failed(hold);
        });
    }

    /// Makes an event part of the phase's span.
    pub(crate) fn in_span(&self, event: impl FnOnce()) {
        contained(|| {
            self.span().in_scope(event);
        });
    }

    fn span(&self) -> Span {
        match &*self.phase() {
            Phase::Asking(Asking { span, .. }) | Phase::Holding(Holding { span, .. }) => {
                span.clone()
            }
            Phase::New | Phase::Over => Span::none(),
        }
    }
}

impl Asking {
    fn end(self, hold: &Hold, outcome: &'static str, now: Moment) {
        let (store, mode) = (hold.context.backend.name(), hold.asked_mode);
        meters::acquired(store, mode, outcome, Some(now.since(self.since)));
        self.span.record("outcome", outcome);
    }
}

impl Holding {
    fn end(self, hold: &Hold, outcome: &'static str) {
        meters::held(hold, outcome, Moment::now().since(self.since));
        self.span.record("outcome", outcome);
    }
}

/// A renewal on its way.
pub(crate) struct Renewing(Span);

impl Renewing {
    pub(crate) fn answered(self, hold: &Hold, answer: &Result<Renewal>) {
        contained(move || {
            let outcome = match answer {
                Ok(Renewal::Renewed { .. } | Renewal::Held) => "renewed",
                Ok(Renewal::Lost(_)) => "lost",
                Err(_) if hold.ending().is_some() => "given_up",
                Err(_) => "failed",
            };
            self.0.record("outcome", outcome);
        });
    }
}

/// How a mode is called in labels and fields.
pub(super) fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
        Mode::Permits { .. } => "permits",
    }
}
