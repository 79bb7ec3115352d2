//! Releases a hold that only the store has.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::blocking_runtime::block_on;
use crate::contract::{ClaimSpec, Mode, Release};
use crate::engine::context::KeeperContext;
use crate::engine::hold::ReleaseOutcome;
use crate::error::{Error, Result};
use crate::locks::keeper::Keeper;
use crate::locks::ticket::Ticket;
use crate::name::{Label, Name};
use crate::owner::Owner;
use crate::release::release_until_confirmed;

impl Keeper {
    /// Releases an exclusive hold by its owner id.
    ///
    /// Sends the release only. To adopt the hold first would renew it: if the release then failed, the lock would stay
    /// for longer than its holder asked for.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the store did not confirm it. The release is sent again in the
    /// background until the store confirms it, for the keeper's ttl at most.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the lock is released even if this is dropped: in the background then.
    pub(crate) async fn release_detached(
        &self,
        context: &Arc<KeeperContext>,
        name: Name,
        owner: Owner,
    ) -> Result<ReleaseOutcome> {
        let (ttl, label) = (self.options().lease()?, self.options().label()?);
        send_release(context, name, owner, label, Mode::Exclusive, ttl).await
    }

    /// Releases a [detached](crate::Guard::detach) hold, without adopting it.
    ///
    /// Sends the release only, and no renewal. The hold is found by its name and owner, in the locks or, for permits, in
    /// the semaphores. The fence, and whether a lock is held shared, are not compared with those of the hold.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption) if the ticket cannot be one, before anything is asked;
    /// [`Unsupported`](crate::ErrorKind::Unsupported) on a store without leases;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the store did not confirm it. The release is sent again in the
    /// background until the store confirms it, for the ticket's ttl at most.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the lock is released even if this is dropped: in the background then.
    pub async fn release_ticket(&self, ticket: Ticket) -> Result<ReleaseOutcome> {
        self.release_ticket_on(self.context.live(), ticket).await
    }

    /// Releases a [detached](crate::Guard::detach) hold, without adopting it. Does what
    /// [`release_ticket`](Self::release_ticket) does, in [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`release_ticket`](Self::release_ticket).
    pub fn blocking_release_ticket(&self, ticket: Ticket) -> Result<ReleaseOutcome> {
        block_on(self.release_ticket_on(self.context.for_blocking(), ticket))
    }

    async fn release_ticket_on(
        &self,
        context: &Arc<KeeperContext>,
        ticket: Ticket,
    ) -> Result<ReleaseOutcome> {
        let capabilities = context.capabilities;
        let checked = if capabilities.leases {
            ticket.check(capabilities.fences)
        } else {
            Err(Error::unsupported("leases, and so no tickets"))
        };
        checked.map_err(|error| error.at(context.backend.name(), "release", &ticket.name))?;
        let Ticket { name, owner, label, mode, ttl, .. } = ticket;
        send_release(context, name, owner, label, mode, ttl).await
    }
}

async fn send_release(
    context: &Arc<KeeperContext>,
    name: Name,
    owner: Owner,
    label: Label,
    mode: Mode,
    ttl: Duration,
) -> Result<ReleaseOutcome> {
    let (store, of) = (context.backend.name(), name.clone());
    let at = |error: Error| error.at(store, "release", &of);
    context.check(mode).map_err(at)?;
    let background = context.background().map_err(at)?.clone();
    let spec = ClaimSpec { owner, label, mode, ..ClaimSpec::new(name, ttl, background.clone()) };
    let mut claim = context.backend.claim(spec).map_err(at)?;
    let (reply, answer) = oneshot::channel();
    background.spawn(async move {
        // The first answer is the caller's; what comes later is for the store only.
        let reply = Mutex::new(Some(reply));
        let tell = |answer| {
            let reply = reply.lock().unwrap_or_else(PoisonError::into_inner).take();
            reply.map(|reply| reply.send(answer))
        };
        let released =
            release_until_confirmed(&mut *claim, ttl, |error| drop(tell(Err(error.clone()))));
        match released.await {
            Some(Release::Released) => drop(tell(Ok(ReleaseOutcome::Released))),
            Some(Release::WasNotHeld) => drop(tell(Ok(ReleaseOutcome::AlreadyLost))),
            None => tracing::warn!(owner = %owner, "release not confirmed: its lease ends it"),
        }
    });
    answer.await.unwrap_or_else(|_| Err(KeeperContext::runtime_gone())).map_err(at)
}
