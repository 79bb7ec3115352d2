//! A claim on Redis: each request is one script.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{
    Attempt, BoxFuture, Change, Claim, ClaimSpec, Error, ErrorKind, Fence, Grant, Holder, Kind,
    LossReason, Mode, Release, Renewal, Result, Retry,
};
use redis::Value;

use crate::client::session::Session;
use crate::error::{config, unavailable, unexpected};
use crate::names::Keys;

pub(crate) mod commands;
mod inbox;
pub(crate) mod node;
pub(crate) mod notifications;
pub(crate) mod peers;
pub(crate) mod renewals;
pub(crate) mod store;

use commands::{Action, Command, DOWNGRADE, Reply, millis};
use inbox::Inbox;
use notifications::{Notification, Secret};
use peers::Peer;
use store::Store;

/// The value of the holder key while readers hold the lock, as in `common.lua`.
const READERS: &str = "(readers)";

/// The scripts count in floating point, which is exact below this.
const MAX_FENCE: u64 = 1 << 53;

pub(crate) struct RedisClaim {
    store: Arc<Store>,
    spec: ClaimSpec,
    keys: Keys,
    /// The secret of the last attempt, if it was answered "contended" and no grant has used it yet.
    contended: Option<Secret>,
    holds: bool,
    /// Set when a downgrade is sent: from then on the hold may be a shared one.
    downgraded: bool,
    inbox: Inbox,
}

impl RedisClaim {
    pub(crate) fn new(store: Arc<Store>, spec: ClaimSpec) -> Self {
        let keys = Keys::new(&store.prefix, spec.mode.kind(), &spec.name);
        let inbox = Inbox::new(&spec, &keys);
        Self { store, spec, keys, contended: None, holds: false, downgraded: false, inbox }
    }

    /// Sends an attempt or a release.
    async fn send(&mut self, action: &Action) -> Result<Reply> {
        let mut route = self.store.topology.route(&self.keys).await?;
        loop {
            self.inbox.register_at(route.node());
            let (keys, owner, action) = (self.keys.clone(), self.spec.owner, action.clone());
            match route.node().commands.send(Command { keys, owner, action }).await {
                Ok(reply) => return Ok(reply),
                Err(error) => route.redirect(error).await?,
            }
        }
    }

    fn granted(&mut self, fence: Fence) -> Grant {
        self.holds = true;
        self.contended = None;
        self.inbox.unsubscribe();
        Grant { fence: Some(fence), valid_for: Some(self.spec.ttl) }
    }

    async fn attempt_once(&mut self, floor: Option<Fence>) -> Result<Attempt> {
        if let Some(floor) = floor.filter(|floor| floor.get() >= MAX_FENCE) {
            let message =
                format!("a fence of {floor} is not of Redis, whose fences are below 2^53");
            return Err(Error::new(ErrorKind::Config, message));
        }
        if let Some(error) = self.store.peer.as_ref().and_then(Peer::refusal) {
            return Err(error);
        }
        if self.spec.min_uptime.is_some() {
            let session = self.store.topology.route(&self.keys).await?.session().await?;
            self.check_uptime(&session)?;
        }
        let floor = floor.map_or(0, Fence::get);
        // Until the reply arrives, the claim holds nothing that it knows of.
        self.holds = false;
        self.contended = None;
        let secret = Secret::random();
        let (mode, queue, ttl) = (self.spec.mode, self.spec.queue, self.spec.ttl);
        let label = self.spec.label.clone();
        let action = Action::Attempt { mode, queue, ttl, floor, secret, label };
        let (session, reply) = loop {
            let reply = self.send(&action).await?;
            // The script has removed as many dead waiters and ended leases as one call may, and there are more.
            if !matches!(&reply.1, Value::BulkString(text) if text == b"again") {
                break reply;
            }
        };
        if let Some((left, holder)) = refusal(&reply) {
            self.contended = Some(secret);
            let retry = match u64::try_from(left) {
                // No grant can be pushed on this session. The store may have had a channel when it was opened, which is
                // what `Capabilities::push` says.
                _ if !session.receives_messages() => Retry::Poll,
                // Just after it has ended, not just before.
                Ok(left) => Retry::After(Duration::from_millis(left + 1)),
                Err(_) => Retry::OnNotify,
            };
            return Ok(Attempt::Contended { retry, holder });
        }
        let fence = match &reply {
            Value::BulkString(fence) => std::str::from_utf8(fence).ok(),
            _ => None,
        };
        let fence = fence.and_then(|fence| fence.parse().ok()).and_then(Fence::new);
        let fence = fence.ok_or_else(|| unexpected(&reply))?;
        // Checked again: the server may have restarted since, and this may be another session.
        let counts = match self.check_uptime(&session) {
            Ok(()) => session.replicated(self.store.min_replicas).await,
            Err(error) => Err(error),
        };
        if let Err(error) = counts {
            // The grant does not count, so no other claim should have to wait until it expires.
            self.release_all().await?;
            return Err(error);
        }
        Ok(Attempt::Granted(self.granted(fence)))
    }

    /// Refuses a server that may have lost its data too recently: it may have granted the lock before.
    fn check_uptime(&self, session: &Session) -> Result<()> {
        let Some(least) = self.spec.min_uptime.filter(|least| !least.is_zero()) else {
            return Ok(());
        };
        let address = session.identity().address();
        match session.uptime() {
            Some(uptime) if uptime >= least => Ok(()),
            Some(uptime) => Err(unavailable(format!(
                "{address}: started {uptime:.0?} ago and does not vote before it has been up for {least:.0?} (min_uptime): \
                 it may have lost its data"
            ))),
            None => Err(config(format!(
                "{address}: does not report how long it has been up: let the user run INFO (ACL +info), or set \
                 min_uptime=0s if it keeps its data over a restart"
            ))),
        }
    }

    async fn next_change(&mut self) -> Change {
        let Some(at) = self.inbox.registration() else { return std::future::pending().await };
        if self.store.notifies_unqueued() && !self.spec.queue && !self.holds {
            match self.inbox.subscribe(&at).await {
                // It may have been released before the subscription.
                Ok(true) => return Change::LookAgain,
                Ok(false) => {}
                // The engine polls.
                Err(_) => return std::future::pending().await,
            }
        }
        loop {
            match at.mailbox.next().await {
                // A grant that the reply to the attempt has reported.
                Notification::Granted { .. } if self.holds => {}
                Notification::Granted { secret, fence }
                    if self.contended == Some(secret) && self.store.min_replicas == 0 =>
                {
                    return Change::Granted(self.granted(fence));
                }
                // The grant answers an attempt before the last, is forged or replayed, or replicas have yet to
                // acknowledge it.
                Notification::Granted { .. } | Notification::Changed => return Change::LookAgain,
            }
        }
    }

    async fn renew_lease(&mut self, ttl: Duration) -> Result<Renewal> {
        if self.downgraded {
            return self.downgrade_to_shared(ttl).await;
        }
        let mode = mode_letter(self.spec.mode);
        let (keys, owner) = (self.keys.clone(), self.spec.owner);
        let renewal = renewals::Renewal { keys, owner, mode, ttl, ticket: self.spec.ticket };
        let mut route = self.store.topology.route(&self.keys).await?;
        loop {
            self.inbox.register_at(route.node());
            match route.node().renewals.renew(renewal.clone()).await {
                Ok(held) => return Ok(self.renewed(held, ttl)),
                Err(error) => route.redirect(error).await?,
            }
        }
    }

    async fn downgrade_to_shared(&mut self, ttl: Duration) -> Result<Renewal> {
        if self.spec.mode.kind() == Kind::Semaphore {
            let message = "permits cannot be downgraded";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        // Before it is sent: the reply may be lost.
        self.downgraded = true;
        let owner = self.spec.owner.to_string();
        let notifies_unqueued = u8::from(self.store.notifies_unqueued());
        let mut route = self.store.topology.route(&self.keys).await?;
        let (session, reply) = loop {
            self.inbox.register_at(route.node());
            let replied = route.node().run(&DOWNGRADE, |call| {
                self.keys.add_all_with_count_to(call);
                call.arg(&owner).arg(millis(ttl)).arg(notifies_unqueued);
            });
            match replied.await {
                // The queue takes another call to move on.
                Ok((_, Value::Int(2))) => {}
                Ok(reply) => break reply,
                Err(error) => route.redirect(error).await?,
            }
        };
        session.replicated(self.store.min_replicas).await?;
        match reply {
            Value::Int(held) => Ok(self.renewed(held == 1, ttl)),
            reply => Err(unexpected(&reply)),
        }
    }

    fn renewed(&mut self, held: bool, ttl: Duration) -> Renewal {
        self.holds = held;
        if held {
            // The fence has been compared once, and does not change.
            self.spec.ticket = None;
        }
        if held { Renewal::Renewed { valid_for: ttl } } else { Renewal::Lost(LossReason::Broken) }
    }

    /// Releases a hold or a place in the queue.
    async fn release_all(&mut self) -> Result<Release> {
        let kind = self.spec.mode.kind();
        let notifies_unqueued = self.store.notifies_unqueued();
        let action = Action::Release { kind, notifies_unqueued };
        let mut held = false;
        let reply = loop {
            let reply = match self.send(&action).await {
                Ok((_, reply)) => reply,
                // It is released. The next attempt or release of another claim hands it over.
                Err(_) if held => Value::Int(1),
                Err(error) => return Err(error),
            };
            match Again::read(&reply) {
                Some(Again { was_held }) => held |= was_held,
                None => break reply,
            }
        };
        self.holds = false;
        self.downgraded = false;
        self.contended = None;
        match reply {
            Value::Int(0 | 1) if held || reply == Value::Int(1) => Ok(Release::Released),
            Value::Int(0) => Ok(Release::WasNotHeld),
            reply => Err(unexpected(&reply)),
        }
    }
}

/// Reads how long the lease in the way lasts, and whose it is, if the reply to an attempt is a refusal.
fn refusal(reply: &Value) -> Option<(i64, Holder)> {
    match reply {
        Value::Int(left) => Some((*left, Holder::Unknown)),
        Value::Array(parts) => match parts.as_slice() {
            [Value::Int(left), Value::BulkString(holder)] => {
                let holder = match std::str::from_utf8(holder) {
                    Ok(READERS) => Holder::Readers,
                    // A client that follows the plain recipe may have written any value.
                    other => other
                        .ok()
                        .and_then(|owner| owner.parse().ok())
                        .map_or(Holder::Unknown, Holder::Owner),
                };
                Some((*left, holder))
            }
            _ => None,
        },
        _ => None,
    }
}

/// The reply to a release that left something to do: the queue has more dead waiters at its head than one call
/// may remove, so the lock has not been handed over yet. Another release, by any owner, continues.
pub(crate) struct Again {
    was_held: bool,
}

impl Again {
    pub(crate) fn read(reply: &Value) -> Option<Self> {
        match reply {
            Value::BulkString(text) if text == b"1 again" => Some(Self { was_held: true }),
            Value::BulkString(text) if text == b"0 again" => Some(Self { was_held: false }),
            _ => None,
        }
    }
}

/// The mode as a script names it.
fn mode_letter(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "x",
        Mode::Shared => "s",
        Mode::Permits { .. } => "p",
    }
}

impl Claim for RedisClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        Box::pin(self.attempt_once(floor))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(self.next_change())
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(self.renew_lease(ttl))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(self.downgrade_to_shared(ttl))
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        Box::pin(self.release_all())
    }
}
