//! What a claim has once it is granted.

use std::time::Duration;

use lockkeeper_core::Fence;
use tokio::time::Instant;

use crate::sessions::{HeldModes, RenewalCause, SessionSlot};

/// A lock that was granted, and the session that holds it.
pub(super) struct Hold {
    pub(super) slot: SessionSlot,
    pub(super) fence: Option<Fence>,
    /// When the last renewal, or the grant, was requested.
    pub(super) renewed: Instant,
    /// For how long that was valid.
    pub(super) valid_for: Duration,
    /// Whether a heartbeat was announced that the next renewal shares.
    pub(super) joins: bool,
    pub(super) held_modes: HeldModes,
}

impl Hold {
    pub(super) fn new(slot: SessionSlot, fence: Option<Fence>, attempted: Instant) -> Self {
        let (renewed, valid_for) = (attempted, Duration::ZERO);
        Self { slot, fence, renewed, valid_for, joins: false, held_modes: HeldModes::One }
    }

    /// Records that a renewal starts, and returns what caused it.
    pub(super) fn start_renewal(&mut self) -> RenewalCause {
        let since_last = std::mem::replace(&mut self.renewed, Instant::now()).elapsed();
        if std::mem::take(&mut self.joins) {
            RenewalCause::Announced
        } else if since_last >= self.valid_for / 3 * 9 / 10 {
            // The engine renews after a third of the validity. Its clock is another, and may be a little ahead.
            RenewalCause::Due
        } else {
            RenewalCause::Requested
        }
    }
}
