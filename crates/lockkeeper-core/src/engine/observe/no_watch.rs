//! The twin of `watch.rs` for builds without spans and metrics: nothing.

use std::time::Duration;

use crate::clock::Moment;
use crate::contract::{Mode, Renewal};
use crate::engine::context::KeeperContext;
use crate::engine::driver::Plan;
use crate::engine::hold::{Ending, Hold, Verdict};
use crate::error::{Error, Result};
use crate::loss::LossReason;

#[derive(Debug)]
pub(crate) struct Watch;

#[allow(clippy::unused_self, reason = "the signatures are those of the watch that does something")]
impl Watch {
    pub(crate) fn new() -> Self {
        Self
    }

    pub(crate) fn turned_away(_: &KeeperContext, _: Mode, _: &Error) {}

    pub(crate) fn asking(&self, _: &Hold, _: Plan, _: Moment) {}

    pub(crate) fn contended(&self, _: &Hold) {}

    pub(crate) fn granted(&self, _: &Hold) {}

    pub(crate) fn not_granted(&self, _: &Hold, _: &Verdict) {}

    pub(crate) fn ended(&self, _: &Hold, _: Ending, _: Option<Duration>) {}

    pub(crate) fn lost(&self, _: &Hold, _: LossReason) {}

    pub(crate) fn renewing(&self, _: &Hold) -> Renewing {
        Renewing
    }

    pub(crate) fn renewal_failed(_: &Hold) {}

    pub(crate) fn in_span(&self, event: impl FnOnce()) {
        super::contained(event);
    }
}

pub(crate) struct Renewing;

#[allow(clippy::unused_self, reason = "as above")]
impl Renewing {
    pub(crate) fn answered(self, _: &Hold, _: &Result<Renewal>) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_that_is_off_takes_no_room() {
        assert_eq!(size_of::<Watch>(), 0);
        assert_eq!(size_of::<Renewing>(), 0);
    }
}
