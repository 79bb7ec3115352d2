//! The metric `lockkeeper_ticks_total`, by job and outcome.

use crate::outcome::Outcome;

/// Counts a tick.
pub(crate) fn count(job: &str, outcome: &Outcome) {
    let labels = [("job", job.to_owned()), ("outcome", outcome.name().to_owned())];
    metrics::counter!("lockkeeper_ticks_total", &labels).increment(1);
}
