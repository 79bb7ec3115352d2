//! Tickets: holds as plain data.

use std::time::Duration;

use crate::contract::{Fences, Mode};
use crate::error::Result;
use crate::fence::Fence;
use crate::name::{Label, Name};
use crate::options::{check_ttl, invalid};
use crate::owner::Owner;

/// A hold taken out of its guard, to carry across processes.
///
/// Made by [`Guard::detach`](crate::Guard::detach), made a guard again by
/// [`Keeper::adopt`](crate::Keeper::adopt). With the `serde` feature it can be written and read. Who
/// has it can renew and release the lock: treat it like a key, and adopt it once.
///
/// A ticket is not signed: a process that can read it can also alter it. Every field is checked when it is read and
/// adopted, and nothing in it can affect another lock or a later fence of its own. The fence is compared with that of the
/// hold where the store keeps one. A [`Quorum`](crate::Quorum) and semaphores made of [`Slots`](crate::Slots) have one
/// for each part instead: their adopted guards report the fence of the ticket, unchecked.
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

impl Ticket {
    /// Checks what can be told without asking the store. Names, labels, owners and fences are valid by their types.
    pub(crate) fn check(&self, fences: Fences) -> Result<()> {
        let fault = match (self.mode, fences, self.fence) {
            (Mode::Permits { take: 0, .. }, ..) => "it takes no permits".to_owned(),
            (Mode::Permits { take, of }, ..) if take > of => {
                format!("it takes {take} permits, of {of} in all")
            }
            (_, Fences::None, Some(_)) => "it has a fence, and this store has none".to_owned(),
            (_, Fences::Rising | Fences::Raisable, None) => "it has no fence".to_owned(),
            _ => {
                let fault = |error| invalid(format!("the ticket is not valid: {error}"));
                return check_ttl(self.ttl).map(drop).map_err(fault);
            }
        };
        Err(invalid(format!("the ticket is not valid: {fault}")))
    }
}
