//! Counters and histograms of `metrics`.
//!
//! Labels have few values: the store, the mode, the outcome. A lock's name is never one of them, nor is
//! who holds it: there may be a lock for each order, and a time series for each would never end. Spans
//! carry both.
//!
//! A metric is looked up in the recorder each time. A handle that is kept would stay with the recorder
//! of its first use, which is none if the keeper was made before one was installed.

use std::time::Duration;

use metrics::{Unit, counter, describe_counter, describe_histogram, histogram};

use super::watch::mode_name;
use crate::contract::Mode;
use crate::engine::hold::Hold;
use crate::loss::LossReason;

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
pub fn describe_metrics() {
    describe_counter!(ACQUISITIONS, Unit::Count, "Acquires that have ended, by outcome.");
    describe_counter!(CONTENDED, Unit::Count, "Acquires that found others holding the lock.");
    describe_histogram!(WAIT, Unit::Seconds, "From the first ask to the outcome of an acquire.");
    describe_histogram!(HOLD, Unit::Seconds, "From a grant until it was given back or lost.");
    describe_histogram!(REMAINING, Unit::Seconds, "What was left of a lease given back in time.");
    describe_counter!(LOSSES, Unit::Count, "Holds that ended against the holder's will.");
    describe_counter!(RENEWALS_FAILED, Unit::Count, "Renewals that failed or got no answer.");
}

/// An acquire has ended, after so long; without a time if the store was never asked.
pub(super) fn acquired(
    store: &'static str,
    mode: Mode,
    outcome: &'static str,
    waited: Option<Duration>,
) {
    let mode = mode_name(mode);
    counter!(ACQUISITIONS, "store" => store, "mode" => mode, "outcome" => outcome).increment(1);
    if let Some(waited) = waited {
        histogram!(WAIT, "store" => store, "mode" => mode, "outcome" => outcome).record(waited);
    }
}

pub(super) fn contended(hold: &Hold) {
    let (store, mode) = of(hold);
    counter!(CONTENDED, "store" => store, "mode" => mode).increment(1);
}

pub(super) fn held(hold: &Hold, outcome: &'static str, time: Duration) {
    let (store, mode) = of(hold);
    histogram!(HOLD, "store" => store, "mode" => mode, "outcome" => outcome).record(time);
}

pub(super) fn remaining(hold: &Hold, left: Duration) {
    let (store, mode) = of(hold);
    histogram!(REMAINING, "store" => store, "mode" => mode).record(left);
}

pub(super) fn lost(hold: &Hold, reason: LossReason) {
    let (store, mode) = of(hold);
    counter!(LOSSES, "store" => store, "mode" => mode, "reason" => reason.as_str()).increment(1);
}

pub(super) fn renewal_failed(hold: &Hold) {
    let (store, mode) = of(hold);
    counter!(RENEWALS_FAILED, "store" => store, "mode" => mode).increment(1);
}

fn of(hold: &Hold) -> (&'static str, &'static str) {
    (hold.context.backend.name(), mode_name(hold.asked_mode))
}
