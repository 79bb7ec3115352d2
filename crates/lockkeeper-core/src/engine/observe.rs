//! Events, spans and metrics, in one place.
//!
//! The engine reports to the [`Observer`] of each hold. Events are always compiled. Spans and metrics are behind the
//! features `spans` and `metrics`. Without both, an observer has no size and its methods are empty.
//!
//! Subscribers and recorders are foreign code. They are never called while the state of a hold is locked, and their
//! panics are [`contained`].

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

/// The claim that an event, span or metric is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub(crate) store: &'static str,
    pub(crate) name: &'a Name,
    pub(crate) label: &'a Label,
    /// The mode of the first attempt.
    pub(crate) mode: Mode,
}

/// Calls foreign code and catches its panic. Guards report while they are dropped, perhaps during another panic, and all
/// guards depend on the maintenance task, which reports as well. The panic hook still reports the panic.
fn contained<T>(report: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(report)).ok()
}

/// Reports a failed attempt of a waiter that retries.
pub(crate) fn retrying(observer: &Observer, subject: Subject<'_>, error: &Error) {
    observer.in_span(|| {
        tracing::debug!(name = %subject.name.escape_debug(), %error, "attempt failed, waiter retries");
    });
}

/// Reports a failed renewal. The hold continues.
pub(crate) fn renewal_failed(observer: &Observer, subject: Subject<'_>, error: &Error) {
    let (store, name) = (subject.store, subject.name.escape_debug());
    observer.in_span(|| {
        tracing::warn!(store, %name, %error, "renewal failed, lock at risk");
    });
    contained(|| metrics::renewal_failed(subject));
}

/// Reports the loss of a lock that has a guard.
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

/// Reports a release that the store did not confirm within a TTL.
pub(crate) fn release_unconfirmed(subject: Subject<'_>) {
    let (store, name) = (subject.store, subject.name.escape_debug());
    contained(
        || tracing::warn!(store, %name, "release not confirmed by the store, lock left to expire"),
    );
}

/// Reports an acquire that was abandoned because it was not polled.
pub(crate) fn abandoned_unpolled(subject: Subject<'_>, ttl: Duration) {
    let (store, name) = (subject.store, subject.name.escape_debug());
    contained(|| {
        tracing::warn!(store, %name, ?ttl, "abandoned a lock attempt whose future was not polled for one TTL");
    });
}

/// Reports that the machine was suspended.
pub(crate) fn suspended(time: Duration) {
    contained(|| tracing::info!(slept = ?time, "the machine was suspended"));
}

/// Returns the name of a mode in labels and fields.
fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
        Mode::Permits { .. } => "permits",
    }
}
