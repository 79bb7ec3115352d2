//! Spans of `tracing`: wait, hold, renew.
//!
//! Spans are entered only around events, and not around polls: different tasks poll a claim in turn, and a hold belongs to
//! no task. Without the feature `spans` all of them are [`Span::none`].

use tracing::field::Empty;
use tracing::{Span, debug_span, trace_span};

use super::{Subject, mode_name};
use crate::fence::Fence;
use crate::text::visible;

/// Known at compile time, so that a build without spans has no code for them.
pub(super) const ENABLED: bool = cfg!(feature = "spans");

/// Opens a span with the fields of a subject, if spans are enabled.
macro_rules! span {
    ($span:ident!($subject:expr, $($parent:ident: $value:expr,)? $name:literal), $($fields:tt)*) => {
        if ENABLED {
            $span!(
                target: "lockkeeper",
                $($parent: $value,)?
                $name,
                store = $subject.store,
                name = %$subject.name.escape_debug(),
                mode = mode_name($subject.mode),
                label = %visible($subject.label.as_str()),
                $($fields)*
            )
        } else {
            Span::none()
        }
    };
}

/// Opens the span from the first attempt to the outcome, inside the caller's span.
pub(super) fn wait(subject: Subject<'_>) -> Span {
    span!(debug_span!(subject, "lockkeeper.wait"), fence = Empty, outcome = Empty)
}

/// Opens the span from the grant until it is released or lost, inside the caller's span.
pub(super) fn hold(subject: Subject<'_>, fence: Option<Fence>) -> Span {
    let fence = fence.map(Fence::get);
    span!(debug_span!(subject, "lockkeeper.hold"), fence = fence, outcome = Empty, reason = Empty)
}

/// Opens the span from a renewal to its answer, inside the span of the hold.
pub(super) fn renew(subject: Subject<'_>, fence: Option<Fence>, parent: &Span) -> Span {
    let fence = fence.map(Fence::get);
    span!(trace_span!(subject, parent: parent, "lockkeeper.renew"), fence = fence, outcome = Empty)
}
