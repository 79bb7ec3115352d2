//! Tickets: holds as plain data.

use std::time::Duration;

use crate::backend::Mode;
use crate::fence::Fence;
use crate::name::{Label, Name};
use crate::owner::Owner;

/// A hold taken out of its guard, to carry across processes.
///
/// Made by [`Guard::detach`](crate::Guard::detach), made a guard again by
/// [`Keeper::adopt`](crate::Keeper::adopt). With the `serde` feature it can be written and read. Who
/// has it can renew and release the lock: treat it like a key, and adopt it once.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[must_use = "nobody renews a detached lock: it ends with its lease unless the ticket is adopted"]
#[non_exhaustive]
pub struct Ticket {
    /// The name of the lock.
    pub name: Name,
    /// The id that the store knows the hold by.
    pub owner: Owner,
    /// Who holds, for people.
    pub label: Label,
    /// How it is held.
    pub mode: Mode,
    /// How long each renewal makes it last.
    pub ttl: Duration,
    /// Its fencing token.
    pub fence: Option<Fence>,
}
