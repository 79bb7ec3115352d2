//! Events, spans and metrics, in one place.
//!
//! The engine reports what happens to the [`Observer`] that every hold has. Events are always compiled. Spans and
//! metrics are behind the features `spans` and `metrics`. Without both, an observer has no size and its methods are
//! empty.
//!
//! Subscribers and recorders are foreign code. They are never called with the state of a hold locked, and their panics are
//! [`contained`].

mod metrics;
mod observer;
mod spans;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::contract::Mode;
use crate::error::Error;
use crate::fence::Fence;
use crate::loss::LossReason;
use crate::name::{Label, Name};

#[cfg(feature = "metrics")]
pub use metrics::describe_metrics;
pub(crate) use observer::{AcquireKind, Observer, rejected};

/// Which claim something happened to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub(crate) store: &'static str,
    pub(crate) name: &'a Name,
    pub(crate) label: &'a Label,
    /// As it was asked for.
    pub(crate) mode: Mode,
}

/// Calls foreign code, whose panic must not affect a lock: guards report when they are dropped, perhaps during a panic, and
/// so does the maintenance task, on which all guards depend. The panic hook has reported it by then.
fn contained<T>(report: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(report)).ok()
}

/// A waiter tolerates a failure of the store.
pub(crate) fn asking_again(observer: &Observer, subject: Subject<'_>, error: &Error) {
    observer.in_span(|| {
        tracing::debug!(name = %subject.name.escape_debug(), %error, "asking again");
    });
}

/// A renewal failed, and the hold goes on.
pub(crate) fn renewal_failed(observer: &Observer, subject: Subject<'_>, error: &Error) {
    let (store, name) = (subject.store, subject.name.escape_debug());
    observer.in_span(|| {
        tracing::warn!(store, %name, %error, "renewal failed, lock at risk");
    });
    contained(|| metrics::renewal_failed(subject));
}

/// A lock that a guard had is lost.
pub(crate) fn lost(
    observer: &Observer,
    subject: Subject<'_>,
    fence: Option<Fence>,
    reason: LossReason,
) {
    let (store, name, fence) = (subject.store, subject.name.escape_debug(), fence.map(Fence::get));
    observer.in_span(|| {
        tracing::warn!(store, %name, fence, %reason, "lock lost");
    });
}

/// The store never confirmed a release.
pub(crate) fn release_unconfirmed(subject: Subject<'_>) {
    let (store, name) = (subject.store, subject.name.escape_debug());
    contained(|| tracing::warn!(store, %name, "release never confirmed, lock left to expire"));
}

/// An acquire was abandoned because it was not polled.
pub(crate) fn given_up(subject: Subject<'_>, ttl: Duration) {
    let (store, name) = (subject.store, subject.name.escape_debug());
    contained(|| {
        tracing::warn!(store, %name, ?ttl, "abandoned a lock attempt whose future was not polled for one TTL");
    });
}

/// The machine was suspended.
pub(crate) fn suspended(time: Duration) {
    contained(|| tracing::info!(slept = ?time, "the machine was suspended"));
}

/// How a mode is called in labels and fields.
fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
        Mode::Permits { .. } => "permits",
    }
}
