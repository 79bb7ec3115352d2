//! The record of a holder or waiter, as `common.lua` describes it.

use std::time::Duration;

use lockkeeper_core::{ClaimSpec, Mode, Owner};

use super::commands::millis;
use super::notifications::Secret;
use crate::client::session::Session;

/// The value of the holder key while readers hold the lock.
pub(crate) const READERS: &str = "(readers)";

/// Returns the part of a record that does not change during the life of a claim: the fields up to `ttl`.
pub(super) fn front(spec: &ClaimSpec) -> String {
    let permits;
    let wants = match spec.mode {
        Mode::Exclusive => " x 1 1 ",
        Mode::Shared => " s 1 1 ",
        Mode::Permits { take, of } => {
            permits = format!(" p {take} {of} ");
            &permits
        }
    };
    [&spec.owner.to_string(), wants, itoa::Buffer::new().format(millis(spec.ttl)), " "].concat()
}

/// Returns the fields from `since` to `secret`, of a waiter whose queue entry expires a TTL after `now`. Times are in
/// microseconds.
pub(super) fn waiting(since: u64, now: u64, floor: u64, ttl: Duration, secret: Secret) -> String {
    let ends = (now / 1000).saturating_add(millis(ttl));
    format!("{since} {floor} {ends} {} ", secret.reveal())
}

/// Returns the fields from `since` to `secret`, of a holder whose fence is not known yet.
pub(super) fn holding(session: &Session) -> String {
    [itoa::Buffer::new().format(session.clock().now()), " 0 0 - "].concat()
}

/// Returns the fields from `channel` on.
pub(super) fn tail(session: &Session, label: &str) -> String {
    format!("{} {label}", session.channel())
}

/// Returns the owner in the front of a record, as text.
pub(super) fn owner_text(front: &str) -> &str {
    front.split_once(' ').map_or(front, |(owner, _)| owner)
}

/// Returns the owner in the value of a holder key. `None` for a client that follows the plain recipe, which may have written
/// any value.
pub(crate) fn owner_of(value: &str) -> Option<Owner> {
    value.split_once(' ')?.0.parse().ok()
}
