//! Replaces `tick_metrics` without the feature `metrics`. Counts nothing.

use crate::outcome::Outcome;

pub(crate) fn count(_job: &str, outcome: &Outcome) {
    let _ = outcome.name();
}
