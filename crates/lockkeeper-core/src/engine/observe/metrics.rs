//! Counters and histograms of the `metrics` crate. Without the feature `metrics` they are empty.
//!
//! Labels have few values: the store, the mode, the outcome. The name of a lock is never one of them, nor is its
//! holder: there may be a lock for each order, and a time series for each would grow without limit. Spans carry
//! both.
//!
//! A metric is looked up in the recorder each time. A handle that is kept would stay with the recorder of its first use,
//! which is none if the keeper was made before one was installed.

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

/// Tells the recorder of the `metrics` crate what the metrics of Lockkeeper mean, and their units.
///
/// To be called once, after a recorder was installed; one that is installed later is not told. Metrics are
/// recorded without it as well.
///
/// # Examples
///
/// ```
/// lockkeeper_core::describe_metrics();
/// ```
#[cfg(feature = "metrics")]
pub fn describe_metrics() {
    describe_counter!(ACQUISITIONS, Unit::Count, "Acquires that have ended, by outcome.");
    describe_counter!(CONTENDED, Unit::Count, "Acquires that found others holding the lock.");
    describe_histogram!(WAIT, Unit::Seconds, "From the first ask to the outcome of an acquire.");
    describe_histogram!(HOLD, Unit::Seconds, "From a grant until it was given back or lost.");
    describe_histogram!(REMAINING, Unit::Seconds, "What was left of a lease given back in time.");
    describe_counter!(LOSSES, Unit::Count, "Holds that ended against the holder's will.");
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

/// An acquire has ended, after so long; without a time if the store was never asked.
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
