//! The state of a granted claim.

use std::time::Duration;

use lockkeeper_core::Fence;
use tokio::time::Instant;

use crate::sessions::{HeldModes, RenewalCause, SessionSlot};

/// A granted lock, and the session that holds it.
pub(super) struct Hold {
    pub(super) slot: SessionSlot,
    pub(super) fence: Option<Fence>,
    /// When the last renewal was requested; before the first one, when the granted attempt started.
    pub(super) renewed: Instant,
    /// The validity of that renewal or grant.
    pub(super) valid_for: Duration,
    /// Whether the next renewal joins an announced heartbeat.
    pub(super) joins: bool,
    pub(super) held_modes: HeldModes,
    /// Whether the hold was recorded for the table of names.
    pub(super) is_recorded: bool,
}

impl Hold {
    pub(super) fn new(slot: SessionSlot, fence: Option<Fence>, attempted: Instant) -> Self {
        let (renewed, valid_for) = (attempted, Duration::ZERO);
        Self {
            slot,
            fence,
            renewed,
            valid_for,
            joins: false,
            held_modes: HeldModes::One,
            is_recorded: false,
        }
    }

    /// Records that a renewal starts, and returns what caused it.
    pub(super) fn start_renewal(&mut self) -> RenewalCause {
        let since_last = std::mem::replace(&mut self.renewed, Instant::now()).elapsed();
        if std::mem::take(&mut self.joins) {
            RenewalCause::Announced
        } else if since_last >= self.valid_for / 3 * 9 / 10 {
            // The engine renews after a third of the validity. The factor of 9/10 allows for differences between its clock
            // and this one.
            RenewalCause::Due
        } else {
            RenewalCause::Requested
        }
    }
}
