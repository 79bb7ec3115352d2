//! The twin of `meters.rs` for builds without metrics: nothing.

use std::time::Duration;

use crate::contract::Mode;
use crate::engine::hold::Hold;
use crate::loss::LossReason;

pub(super) fn acquired(_: &'static str, _: Mode, _: &'static str, _: Option<Duration>) {}

pub(super) fn contended(_: &Hold) {}

pub(super) fn held(_: &Hold, _: &'static str, _: Duration) {}

pub(super) fn remaining(_: &Hold, _: Duration) {}

pub(super) fn lost(_: &Hold, _: LossReason) {}

pub(super) fn renewal_failed(_: &Hold) {}
