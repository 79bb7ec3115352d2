//! What became of a tick, and the one place where that is told.

use std::time::Duration;

use jiff::Timestamp;
use lockkeeper_core::{Error, Fence};

use crate::counting::count;

/// What became of a tick on this node.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The job ran here, to its end.
    Ran { took: Duration },
    /// It ran here and returned an error.
    Failed { took: Duration, error: String },
    /// It ran here and panicked.
    Panicked { took: Duration },
    /// It ran here until `at_most_for`, and was cancelled.
    TimedOut { took: Duration },
    /// It ran here until its lock was lost, and was cancelled.
    Lost { took: Duration },
    /// Another node has this tick.
    Taken,
    /// The tick is ours, and the job is still busy with an earlier one.
    Overlaps,
    /// It was too late for this tick, and for all others before `until`.
    Missed { until: Timestamp },
    /// The store could not decide which node has this tick, or which may run.
    Undecided { error: Error },
    /// The store did not answer.
    Unavailable { error: Error },
}

impl Outcome {
    /// What it is called where ticks are counted.
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

/// Tells that a job starts.
pub(crate) fn tell_start(job: &str, tick: Timestamp, fence: Option<Fence>, node: &str) {
    let fence = fence.map(Fence::get);
    tracing::info!(job, scheduled_at = %tick, fence, node, "job starts");
}

/// Tells what became of a tick. Everything that became of any tick passes through here.
pub(crate) fn tell(job: &str, tick: Timestamp, outcome: &Outcome) {
    count(job, outcome);
    let scheduled_at = tick;
    match outcome {
        Outcome::Ran { took } => tracing::info!(job, %scheduled_at, ?took, "job done"),
        Outcome::Failed { took, error } => {
            tracing::error!(job, %scheduled_at, ?took, error, "job failed");
        }
        Outcome::Panicked { took } => tracing::error!(job, %scheduled_at, ?took, "job panicked"),
        Outcome::TimedOut { took } => {
            tracing::warn!(job, %scheduled_at, ?took, "job cancelled: it took too long");
        }
        Outcome::Lost { took } => {
            tracing::warn!(job, %scheduled_at, ?took, "job cancelled: its lock is lost");
        }
        // As often as there are other nodes.
        Outcome::Taken => tracing::debug!(job, %scheduled_at, "tick skipped: another node has it"),
        Outcome::Overlaps => {
            tracing::warn!(job, %scheduled_at, "tick skipped: the job is busy with an earlier one");
        }
        Outcome::Missed { until } => {
            tracing::warn!(job, %scheduled_at, %until, "tick skipped: it is too late for it");
        }
        Outcome::Undecided { error } => {
            tracing::warn!(job, %scheduled_at, %error, "tick skipped: the store could not decide");
        }
        Outcome::Unavailable { error } => {
            tracing::warn!(job, %scheduled_at, %error, "tick skipped: the store failed");
        }
    }
}
