//! Counters and histograms of the `metrics` crate. Without the feature `metrics` they are empty.
//!
//! Labels have few values: store, mode, outcome. Names and holders are not labels, because a program may have a lock for each
//! order, and the number of time series would grow without limit. Spans carry both.
//!
//! Metrics are looked up at each use. A cached handle would keep the recorder of its first use, which is a no-op if the
//! keeper was created before a recorder was installed.

use std::time::Duration;

#[cfg(feature = "metrics")]
use metrics::{Unit, describe_counter, describe_histogram};

use super::{Subject, mode_name};
use crate::contract::Mode;
use crate::loss::LossReason;

pub(super) const ENABLED: bool = cfg!(feature = "metrics");

const ACQUISITIONS: &str = "lockkeeper_acquisitions_total";
const CONTENDED: &str = "lockkeeper_contended_total";
const WAIT: &str = "lockkeeper_wait_seconds";
const HOLD: &str = "lockkeeper_hold_seconds";
const REMAINING: &str = "lockkeeper_remaining_lease_seconds";
const LOSSES: &str = "lockkeeper_losses_total";
const RENEWALS_FAILED: &str = "lockkeeper_renewals_failed_total";

/// Registers the descriptions and units of all Lockkeeper metrics with the recorder of the `metrics` crate.
///
/// Call it once, after the recorder was installed: a recorder that is installed later does not receive them. Metrics are
/// recorded even if it is never called.
///
/// # Examples
///
/// ```
/// lockkeeper_core::describe_metrics();
/// ```
#[cfg(feature = "metrics")]
pub fn describe_metrics() {
    describe_counter!(ACQUISITIONS, Unit::Count, "Acquires that have ended, by outcome.");
    describe_counter!(CONTENDED, Unit::Count, "Acquires that found the lock contended.");
    describe_histogram!(WAIT, Unit::Seconds, "Time from first attempt to outcome.");
    describe_histogram!(HOLD, Unit::Seconds, "Time from grant to release or loss.");
    describe_histogram!(REMAINING, Unit::Seconds, "Remaining lease at release.");
    describe_counter!(LOSSES, Unit::Count, "Holds that were lost, by reason.");
    describe_counter!(RENEWALS_FAILED, Unit::Count, "Renewals that failed or got no answer.");
}

/// Adds one to a counter.
#[cfg(feature = "metrics")]
macro_rules! count {
    ($metric:expr, $store:expr, $mode:expr $(, $label:literal => $value:expr)*) => {
        metrics::counter!($metric, "store" => $store, "mode" => $mode $(, $label => $value)*)
            .increment(1)
    };
}

/// Adds a time to a histogram.
#[cfg(feature = "metrics")]
macro_rules! record {
    ($time:expr, $metric:expr, $store:expr, $mode:expr $(, $label:literal => $value:expr)*) => {
        metrics::histogram!($metric, "store" => $store, "mode" => $mode $(, $label => $value)*)
            .record($time)
    };
}

#[cfg(not(feature = "metrics"))]
macro_rules! count {
    ($metric:expr, $store:expr, $mode:expr $(, $label:literal => $value:expr)*) => {
        let _ = ($metric, $store, $mode $(, $value)*);
    };
}

#[cfg(not(feature = "metrics"))]
macro_rules! record {
    ($time:expr, $($counted:tt)*) => {
        let _ = $time;
        count!($($counted)*);
    };
}

/// Records the end of an acquire. `waited` is `None` if no attempt was sent.
pub(super) fn acquired(
    store: &'static str,
    mode: Mode,
    outcome: &'static str,
    waited: Option<Duration>,
) {
    let mode = mode_name(mode);
    count!(ACQUISITIONS, store, mode, "outcome" => outcome);
    if let Some(waited) = waited {
        record!(waited, WAIT, store, mode, "outcome" => outcome);
    }
}

pub(super) fn contended(Subject { store, mode, .. }: Subject<'_>) {
    count!(CONTENDED, store, mode_name(mode));
}

pub(super) fn held(
    Subject { store, mode, .. }: Subject<'_>,
    outcome: &'static str,
    time: Duration,
) {
    record!(time, HOLD, store, mode_name(mode), "outcome" => outcome);
}

pub(super) fn remaining(Subject { store, mode, .. }: Subject<'_>, left: Duration) {
    record!(left, REMAINING, store, mode_name(mode));
}

pub(super) fn lost(Subject { store, mode, .. }: Subject<'_>, reason: LossReason) {
    count!(LOSSES, store, mode_name(mode), "reason" => reason.as_str());
}

pub(super) fn renewal_failed(Subject { store, mode, .. }: Subject<'_>) {
    count!(RENEWALS_FAILED, store, mode_name(mode));
}
