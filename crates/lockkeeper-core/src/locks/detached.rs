//! Releases of holds that have no guard.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::oneshot;

use crate::blocking_runtime::block_on;
use crate::contract::{ClaimSpec, Release};
use crate::engine::context::KeeperContext;
use crate::engine::hold::ReleaseOutcome;
use crate::error::{Error, Result};
use crate::locks::keeper::Keeper;
use crate::locks::ticket::Ticket;
use crate::release::release_until_confirmed;

impl Keeper {
    /// Releases a [detached](crate::Guard::detach) hold without adopting it.
    ///
    /// Sends only the release, and no renewal. The store finds the hold by name and owner, among the locks or, for
    /// permits, among the semaphores. The fence is not compared, nor whether the lock is held shared or exclusively.
    ///
    /// # Errors
    ///
    /// - [`InvalidOption`](crate::ErrorKind::InvalidOption), before any I/O, if the ticket is not valid.
    /// - [`Unsupported`](crate::ErrorKind::Unsupported) on a store without leases.
    /// - [`Unavailable`](crate::ErrorKind::Unavailable) if the store did not confirm the release. It is retried in the
    ///   background until the store confirms it, for at most the TTL of the ticket.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the release continues in the background if the future is dropped.
    pub async fn release_ticket(&self, ticket: Ticket) -> Result<ReleaseOutcome> {
        self.release_ticket_on(self.context.live(), ticket).await
    }

    /// Releases a [detached](crate::Guard::detach) hold without adopting it. The [blocking](crate::blocking) form of
    /// [`release_ticket`](Self::release_ticket).
    ///
    /// # Errors
    ///
    /// Same as [`release_ticket`](Self::release_ticket).
    pub fn blocking_release_ticket(&self, ticket: Ticket) -> Result<ReleaseOutcome> {
        block_on(self.release_ticket_on(self.context.for_blocking(), ticket))
    }

    async fn release_ticket_on(
        &self,
        context: &Arc<KeeperContext>,
        ticket: Ticket,
    ) -> Result<ReleaseOutcome> {
        let checked = ticket.check(context.capabilities);
        checked.map_err(|error| error.at(context.store, "release", &ticket.name))?;
        release_unchecked(context, ticket).await
    }
}

/// Releases the hold of a ticket that was created in this process and may lack the fence.
///
/// Sends only the release. Adopting the hold first would renew it, and a failed release would then leave it held for
/// longer than its holder intended.
pub(crate) async fn release_unchecked(
    context: &Arc<KeeperContext>,
    ticket: Ticket,
) -> Result<ReleaseOutcome> {
    let Ticket { name, owner, label, mode, ttl, fence } = ticket;
    let of = name.clone();
    let at = |error: Error| error.at(context.store, "release", &of);
    context.check(mode).map_err(at)?;
    let background = context.background().map_err(at)?.clone();
    let spec = ClaimSpec::new(name, ttl, background.clone());
    let spec = ClaimSpec { owner, label, mode, ticket: fence, ..spec };
    let mut claim = context.backend.claim(spec).map_err(at)?;
    let (reply, answer) = oneshot::channel();
    background.spawn(async move {
        // The caller gets the first answer. Retries only make sure that the store releases.
        let reply = Mutex::new(Some(reply));
        let send = |answer| {
            let reply = reply.lock().unwrap_or_else(PoisonError::into_inner).take();
            reply.map(|reply| reply.send(answer))
        };
        let released =
            release_until_confirmed(&mut *claim, ttl, |error| drop(send(Err(error.clone()))));
        match released.await {
            Some(Release::Released) => drop(send(Ok(ReleaseOutcome::Released))),
            Some(Release::WasNotHeld) => drop(send(Ok(ReleaseOutcome::AlreadyLost))),
            None => tracing::warn!(%owner, "release not confirmed: the lock is free when its lease expires"),
        }
    });
    answer.await.unwrap_or_else(|_| Err(KeeperContext::runtime_gone_error())).map_err(at)
}
