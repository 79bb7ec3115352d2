//! What the engine tells the world outside of what it does: events, spans and metrics, in one place.
//!
//! The engine says what happens, to the [`Watch`] that every hold has. Events are always there. Spans and
//! metrics are behind the features `spans` and `metrics`; where both are off, a watch is of no size and
//! all that it is told compiles to nothing.
//!
//! Subscribers and recorders are foreign code. Nothing in here is called with a hold's state locked, and what
//! panics is [`contained`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::engine::hold::Hold;
use crate::error::Error;
use crate::fence::Fence;
use crate::loss::LossReason;

#[cfg(any(feature = "metrics", feature = "spans"))]
mod watch;
#[cfg(not(any(feature = "metrics", feature = "spans")))]
#[path = "observe/no_watch.rs"]
mod watch;

#[cfg(feature = "metrics")]
mod meters;
#[cfg(all(feature = "spans", not(feature = "metrics")))]
#[path = "observe/no_meters.rs"]
mod meters;

#[cfg(feature = "spans")]
mod spans;
#[cfg(all(feature = "metrics", not(feature = "spans")))]
#[path = "observe/no_spans.rs"]
mod spans;

#[cfg(feature = "metrics")]
pub use meters::describe_metrics;
pub(crate) use watch::Watch;

/// Tells somebody, whose panic is not to harm a lock: guards tell when they are dropped, perhaps in a panic
/// already, and the steward, on whom all guards depend, tells too. The panic hook has reported it by then.
fn contained<T>(tell: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(tell)).ok()
}

/// A waiter bears a failure of the store.
pub(crate) fn asking_again(hold: &Hold, error: &Error) {
    hold.watch.in_span(|| {
        tracing::debug!(name = %hold.name.escape_debug(), %error, "asking again");
    });
}

/// A renewal failed, and the hold goes on.
pub(crate) fn renewal_failed(hold: &Hold, error: &Error) {
    let (store, name) = (hold.context.backend.name(), hold.name.escape_debug());
    hold.watch.in_span(|| {
        tracing::warn!(store, %name, %error, "renewal failed, lock at risk");
    });
    Watch::renewal_failed(hold);
}

/// A hold is lost.
pub(crate) fn lost(hold: &Hold, fence: Option<Fence>, reason: LossReason) {
    let (store, name) = (hold.context.backend.name(), hold.name.escape_debug());
    let fence = fence.map(Fence::get);
    hold.watch.in_span(|| {
        tracing::warn!(store, %name, fence, %reason, "lock lost");
    });
}

/// The store never said that it has obeyed a release.
pub(crate) fn release_unconfirmed(hold: &Hold) {
    let (store, name) = (hold.context.backend.name(), hold.name.escape_debug());
    contained(|| tracing::warn!(store, %name, "release never confirmed, lock left to expire"));
}

/// An acquire is given up because nobody polls it.
pub(crate) fn given_up(hold: &Hold) {
    let (store, name) = (hold.context.backend.name(), hold.name.escape_debug());
    contained(|| tracing::warn!(store, %name, "an acquire is given up that nobody polls"));
}

/// The machine has slept.
pub(crate) fn slept(slept: Duration) {
    contained(|| tracing::info!(?slept, "the machine has slept"));
}
