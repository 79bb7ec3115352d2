//! Where the feature `metrics` is off, nothing is counted.

use crate::outcome::Outcome;

pub(crate) fn count(_job: &str, outcome: &Outcome) {
    let _ = outcome.name();
}
