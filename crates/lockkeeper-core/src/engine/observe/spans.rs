//! Spans of `tracing`: wait, hold, renew.
//!
//! They are opened and closed, and entered only around events: the task that polls a claim changes, and a hold is not
//! something that a task is inside of. Without the feature `spans` all of them are [`Span::none`].

use tracing::field::Empty;
use tracing::{Span, debug_span, trace_span};

use super::{Subject, mode_name};
use crate::fence::Fence;
use crate::text::visible;

/// Decided at compile time, so that a build without spans has no code for them.
pub(super) const ENABLED: bool = cfg!(feature = "spans");

/// From the first attempt to the outcome, inside of the caller's span.
pub(super) fn wait(subject: Subject<'_>) -> Span {
    if !ENABLED {
        return Span::none();
    }
    debug_span!(
        target: "lockkeeper",
        "lockkeeper.wait",
        store = subject.store,
        name = %subject.name.escape_debug(),
        mode = mode_name(subject.mode),
        label = %visible(subject.label.as_str()),
        fence = Empty,
        outcome = Empty,
    )
}

/// From the grant until it is released or lost, inside of the caller's span.
pub(super) fn hold(subject: Subject<'_>, fence: Option<Fence>) -> Span {
    if !ENABLED {
        return Span::none();
    }
    debug_span!(
        target: "lockkeeper",
        "lockkeeper.hold",
        store = subject.store,
        name = %subject.name.escape_debug(),
        mode = mode_name(subject.mode),
        label = %visible(subject.label.as_str()),
        fence = fence.map(Fence::get),
        outcome = Empty,
        reason = Empty,
    )
}

/// From the request to its answer, inside of the hold's span.
pub(super) fn renew(subject: Subject<'_>, fence: Option<Fence>, parent: &Span) -> Span {
    if !ENABLED {
        return Span::none();
    }
    trace_span!(
        target: "lockkeeper",
        parent: parent,
        "lockkeeper.renew",
        store = subject.store,
        name = %subject.name.escape_debug(),
        mode = mode_name(subject.mode),
        label = %visible(subject.label.as_str()),
        fence = fence.map(Fence::get),
        outcome = Empty,
    )
}
