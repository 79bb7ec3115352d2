//! The outcomes of a tick, and the only place that logs and counts them.

use std::time::Duration;

use jiff::Timestamp;
use lockkeeper_core::{Error, Fence};

use crate::tick_metrics::count;

/// The outcome of a tick on this node.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The job completed.
    Ran { took: Duration },
    /// The job returned an error.
    Failed { took: Duration, error: String },
    /// The job panicked.
    Panicked { took: Duration },
    /// The job was cancelled at `at_most_for`.
    TimedOut { took: Duration },
    /// The job was cancelled because its lock was lost.
    Lost { took: Duration },
    /// Another node has claimed the tick.
    Taken,
    /// This node claimed the tick, but an earlier run holds the job's lock.
    Overlaps,
    /// The tick, and all later ones before `until`, were attempted too late.
    Missed { until: Timestamp },
    /// The store could not decide which node gets the tick or the job's lock.
    Undecided { error: Error },
    /// The store failed, or the claim was lost before the run.
    Unavailable { error: Error },
}

impl Outcome {
    /// Returns the value of the metric label `outcome`.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Ran { .. } => "ran",
            Self::Failed { .. } => "failed",
            Self::Panicked { .. } => "panicked",
            Self::TimedOut { .. } => "timed_out",
            Self::Lost { .. } => "lost",
            Self::Taken => "taken",
            Self::Overlaps => "overlaps",
            Self::Missed { .. } => "missed",
            Self::Undecided { .. } => "undecided",
            Self::Unavailable { .. } => "unavailable",
        }
    }
}

/// Logs the start of a run.
pub(crate) fn report_start(job: &str, tick: Timestamp, fence: Option<Fence>, node: &str) {
    let fence = fence.map(Fence::get);
    tracing::info!(job, scheduled_at = %tick, fence, node, "job starts");
}

/// Logs and counts the outcome of a tick.
pub(crate) fn report(job: &str, tick: Timestamp, outcome: &Outcome) {
    count(job, outcome);
    let scheduled_at = tick;
    match outcome {
        Outcome::Ran { took } => tracing::info!(job, %scheduled_at, ?took, "job done"),
        Outcome::Failed { took, error } => {
            tracing::error!(job, %scheduled_at, ?took, error, "job failed");
        }
        Outcome::Panicked { took } => tracing::error!(job, %scheduled_at, ?took, "job panicked"),
        Outcome::TimedOut { took } => {
            tracing::warn!(job, %scheduled_at, ?took, "job cancelled: it ran longer than at_most_for");
        }
        Outcome::Lost { took } => {
            tracing::warn!(job, %scheduled_at, ?took, "job cancelled: its lock was lost");
        }
        // Debug: all nodes but one log this for every tick.
        Outcome::Taken => {
            tracing::debug!(job, %scheduled_at, "tick skipped: another node claimed it");
        }
        Outcome::Overlaps => {
            let message = "tick skipped: an earlier run still holds the job's lock";
            tracing::warn!(job, %scheduled_at, "{message}");
        }
        Outcome::Missed { until } => {
            tracing::warn!(job, %scheduled_at, %until, "tick skipped: too late to run it");
        }
        Outcome::Undecided { error } => {
            tracing::warn!(job, %scheduled_at, %error, "tick skipped: the store could not decide");
        }
        Outcome::Unavailable { error } => {
            tracing::warn!(job, %scheduled_at, %error, "tick skipped: the store failed");
        }
    }
}
