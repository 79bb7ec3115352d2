//! Tickets: holds as plain data.

use std::time::Duration;

use crate::contract::{Capabilities, Fences, Mode};
use crate::error::{Error, Result};
use crate::fence::Fence;
use crate::name::{Label, Name};
use crate::options::{check_ttl, invalid};
use crate::owner::Owner;

/// A hold that was detached from its guard as plain data, to be adopted by another process.
///
/// [`Guard::detach`](crate::Guard::detach) creates it, and [`Keeper::adopt`](crate::Keeper::adopt) turns it into a guard
/// again. With the `serde` feature it can be serialized. A process that has the ticket can renew and release the lock:
/// treat it like a credential, and adopt it once.
///
/// A ticket is not signed, so a process that can read it can also forge it. Every field is checked when the ticket is
/// deserialized and adopted, and no value of a field affects another lock or later fences. The fence is compared with
/// that of the hold if the store keeps one per hold. A [`Quorum`](crate::Quorum) and semaphores made of
/// [`Slots`](crate::Slots) keep one per part instead: their adopted guards report the fence of the ticket, unchecked.
/// Exception: the release of a ticket carries its fence to the nodes of a `Quorum`, which accept it at most half of the
/// TTL ahead of their clocks.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[must_use = "a detached lock is not renewed: it expires unless the ticket is adopted"]
#[non_exhaustive]
pub struct Ticket {
    /// The name of the lock.
    pub name: Name,
    /// The id that identifies the hold in the store.
    pub owner: Owner,
    /// A human-readable name of the holder.
    pub label: Label,
    /// The mode of the hold.
    pub mode: Mode,
    /// The TTL that each renewal sets.
    pub ttl: Duration,
    /// The fencing token.
    pub fence: Option<Fence>,
}

impl Ticket {
    /// Checks the ticket as far as possible without I/O. Names, labels, owners and fences are valid by their types.
    pub(crate) fn check(&self, store: Capabilities) -> Result<()> {
        if !store.leases {
            return Err(Self::unsupported());
        }
        let fault = match (self.mode, store.fences, self.fence) {
            (Mode::Permits { take: 0, .. }, ..) => "it takes no permits".to_owned(),
            (Mode::Permits { take, of }, ..) if take > of => {
                format!("it takes {take} of {of} permits")
            }
            (_, Fences::None, Some(_)) => "it has a fence, but this store has none".to_owned(),
            (_, Fences::Rising | Fences::Raisable, None) => "it has no fence".to_owned(),
            _ => match check_ttl(self.ttl) {
                Ok(_) => return Ok(()),
                Err(error) => error.to_string(),
            },
        };
        Err(invalid(format!("the ticket is not valid: {fault}")))
    }

    /// Returns the error for a store whose holds end with the process.
    pub(crate) fn unsupported() -> Error {
        Error::unsupported("tickets, because its locks end with the process that holds them")
    }
}
