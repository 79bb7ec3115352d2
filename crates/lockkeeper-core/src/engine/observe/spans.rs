//! Spans of `tracing`: wait, hold, renew.
//!
//! They are opened and closed, and entered only around events: what polls a claim changes, and a hold
//! is not something that a task is inside of.

use tracing::field::Empty;

use super::watch::mode_name;
use crate::engine::hold::Hold;
use crate::fence::Fence;
use crate::text::visible;

#[derive(Debug, Clone)]
pub(super) struct Span(tracing::Span);

impl Span {
    pub(super) fn none() -> Self {
        Self(tracing::Span::none())
    }

    pub(super) fn record(&self, field: &'static str, value: &'static str) {
        self.0.record(field, value);
    }

    pub(super) fn record_fence(&self, hold: &Hold) {
        if !self.0.is_disabled() {
            self.0.record("fence", hold.fence().map(Fence::get));
        }
    }

    pub(super) fn in_scope(&self, work: impl FnOnce()) {
        self.0.in_scope(work);
    }
}

/// From the first ask to the outcome, inside of the caller's span.
pub(super) fn wait(hold: &Hold) -> Span {
    Span(tracing::debug_span!(
        target: "lockkeeper",
        "lockkeeper.wait",
        store = hold.context.backend.name(),
        name = %hold.name.escape_debug(),
        mode = mode_name(hold.asked_mode),
        label = %visible(hold.label.as_str()),
        fence = Empty,
        outcome = Empty,
    ))
}

/// From the grant until it is given back or lost, inside of the caller's span.
pub(super) fn hold(hold: &Hold) -> Span {
    Span(tracing::debug_span!(
        target: "lockkeeper",
        "lockkeeper.hold",
        store = hold.context.backend.name(),
        name = %hold.name.escape_debug(),
        mode = mode_name(hold.asked_mode),
        label = %visible(hold.label.as_str()),
        fence = hold.fence().map(Fence::get),
        outcome = Empty,
        reason = Empty,
    ))
}

/// From the question to its answer, inside of the hold's span.
pub(super) fn renew(hold: &Hold, parent: &Span) -> Span {
    Span(tracing::trace_span!(
        target: "lockkeeper",
        parent: &parent.0,
        "lockkeeper.renew",
        store = hold.context.backend.name(),
        name = %hold.name.escape_debug(),
        mode = mode_name(hold.asked_mode),
        label = %visible(hold.label.as_str()),
        fence = hold.fence().map(Fence::get),
        outcome = Empty,
    ))
}
