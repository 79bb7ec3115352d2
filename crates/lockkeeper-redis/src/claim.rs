//! A claim on Redis. An exclusive claim acquires a free lock [without a script](uncontended). Every other request is one
//! script.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper_core::{
    Attempt, BoxFuture, Change, Claim, ClaimSpec, Error, ErrorKind, Fence, Grant, Holder, Kind,
    LossReason, Mode, Release, Renewal, Result, Retry,
};
use redis::Value;

use crate::client::node::Node as _;
use crate::client::session::Session;
use crate::error::{config, unavailable, unexpected};
use crate::names::Keys;

mod calls;
pub(crate) mod commands;
mod inbox;
pub(crate) mod node;
pub(crate) mod notifications;
pub(crate) mod peers;
pub(crate) mod record;
pub(crate) mod renewals;
pub(crate) mod store;
pub(crate) mod uncontended;

use commands::{Action, Command, DOWNGRADE, millis};
use inbox::Inbox;
use notifications::{Notification, Secret};
use peers::Peer;
use record::READERS;
use store::Store;
use uncontended::{Free, Outcome, Uncontended};

/// How long after an uncontended grant a release expects no waiters. Later, waiters of another process are likely. Those of
/// this process are known for longer, see [`uncontended::RecentContention`].
const EXPECTS_NO_WAITERS: Duration = Duration::from_millis(100);
/// The scripts count in floating point, which is exact below this.
const MAX_FENCE: u64 = 1 << 53;

pub(crate) struct RedisClaim {
    store: Arc<Store>,
    spec: ClaimSpec,
    keys: Keys,
    /// The constant part of its record: all fields up to `ttl`.
    front: Arc<str>,
    /// The secret of the last attempt, if it was answered "contended" and no grant has used it yet.
    contended: Option<Secret>,
    /// The records of this claim that may be in the queue: that of the last attempt, and those whose reply was lost.
    records: Vec<String>,
    /// When the claim began to wait, by the server's clock in microseconds.
    since: Option<u64>,
    holds: bool,
    /// When the claim was granted the lock without a script. `None` if the script granted it.
    uncontended_at: Option<Instant>,
    /// The fence of the last grant, or of the ticket.
    fence: Option<Fence>,
    /// The fence that a quorum set for the hold, because it granted a higher one than this server.
    quorum_fence: Option<Fence>,
    /// Set when a downgrade is sent: from then on the hold may be a shared one.
    downgraded: bool,
    inbox: Inbox,
}

impl RedisClaim {
    /// # Errors
    ///
    /// [`InvalidName`](ErrorKind::InvalidName) if the key template cannot have the name.
    pub(crate) fn new(store: Arc<Store>, spec: ClaimSpec) -> Result<Self> {
        let keys = Keys::new(&store.template, spec.mode.kind(), &spec.name)?;
        let inbox = Inbox::new(&spec, &keys);
        let (front, fence) = (record::front(&spec).into(), spec.ticket);
        let (contended, records) = (None, Vec::new());
        Ok(Self {
            store,
            spec,
            keys,
            front,
            contended,
            records,
            since: None,
            holds: false,
            uncontended_at: None,
            fence,
            quorum_fence: None,
            downgraded: false,
            inbox,
        })
    }

    /// Sends an attempt as a script, with a new record and secret.
    async fn send_attempt(
        &mut self,
        floor: u64,
        known: Option<Fence>,
        mut is_unconfirmed: bool,
    ) -> Result<(Arc<Session>, Value, Secret)> {
        let mut route = self.store.topology.route(&self.keys).await?;
        loop {
            self.inbox.register_at(route.node());
            let secret = Secret::random();
            let session = match route.node().client().session().await {
                Ok(session) => session,
                Err(error) => {
                    route.redirect(error).await?;
                    continue;
                }
            };
            let ClaimSpec { mode, queue, ttl, .. } = self.spec;
            let now = session.clock().now();
            let since = *self.since.get_or_insert(now);
            let waiting = record::waiting(since, now, floor, ttl, secret);
            let tail = record::tail(&session, self.spec.label.as_str());
            let records = self.records.clone();
            if queue {
                // Before it is sent: the reply may be lost.
                self.records.push([&*self.front, &waiting, &tail].concat());
            }
            let action = Action::Attempt {
                mode,
                queue,
                is_unconfirmed,
                ttl,
                floor,
                known,
                waiting,
                tail,
                session,
            };
            let (keys, front) = (self.keys.clone(), self.front.clone());
            let command = Command { keys, front, action, records };
            let (session, reply) = match route.node().commands.run(command).await {
                Ok(Some(replied)) => replied,
                Ok(None) => continue,
                Err(error) => {
                    route.redirect(error).await?;
                    continue;
                }
            };
            // Only the last record can be in the queue, if any.
            self.records.drain(..self.records.len().saturating_sub(1));
            // The script has reached its cleanup limit, and there is more to remove: call it again.
            if matches!(&reply, Value::BulkString(text) if text == b"again") {
                // Another client's release may have granted this claim the lock since.
                is_unconfirmed = false;
                continue;
            }
            if refusal(&reply).is_some() {
                route.node().contention.note(&self.keys);
            }
            return Ok((session, reply, secret));
        }
    }

    /// Returns the fence that this server granted, if known, and the one that the quorum set, if it may be higher.
    fn fences(&self) -> (Option<Fence>, Option<Fence>) {
        if self.spec.ticket.is_some() {
            // The fence of the ticket has not been compared with that of the hold.
            return (None, self.quorum_fence);
        }
        (self.fence, self.quorum_fence.filter(|fence| Some(*fence) > self.fence))
    }

    /// Frees the lock if the claim holds it and it has no waiters. Returns false if only a full release can decide.
    ///
    /// If it has waiters, this costs another request. A guard that is dropped as the program ends has no time for that, so a
    /// waiter would wait for the end of the lease.
    async fn free(&self) -> Result<bool> {
        let expects_no_waiters =
            self.uncontended_at.is_some_and(|at| at.elapsed() < EXPECTS_NO_WAITERS);
        if !self.holds || self.downgraded || !expects_no_waiters {
            return Ok(false);
        }
        let ((fence, quorum_fence), mut route) =
            (self.fences(), self.store.topology.route(&self.keys).await?);
        loop {
            let node = route.node();
            let stores_fence = |now| commands::may_be_ahead(quorum_fence, fence, now);
            if node.contention.has(&self.keys) || node.client().time().is_none_or(stores_fence) {
                return Ok(false);
            }
            let notifies_unqueued = self.store.notifies_unqueued();
            let (keys, front) = (self.keys.clone(), self.front.clone());
            let release = Free { keys, front, fence, quorum_fence, notifies_unqueued };
            match node.commands.free(release).await {
                Ok(None) => {}
                Ok(Some(true)) => return Ok(true),
                Ok(Some(false)) => {
                    node.contention.note(&self.keys);
                    return Ok(false);
                }
                Err(error) => route.redirect(error).await?,
            }
        }
    }

    async fn send_release(&self) -> Result<Value> {
        if self.free().await? {
            return Ok(Value::Int(1));
        }
        let notifies_unqueued = self.store.notifies_unqueued();
        let (fence, quorum_fence) = self.fences();
        let kind = self.spec.mode.kind();
        let action = Action::Release { kind, notifies_unqueued, fence, quorum_fence };
        let (front, records) = (self.front.clone(), self.records.clone());
        let command = Command { keys: self.keys.clone(), front, action, records };
        let mut route = self.store.topology.route(&self.keys).await?;
        loop {
            match route.node().commands.run(command.clone()).await {
                Ok(Some((_, reply))) => return Ok(reply),
                // Not sent: its call also contained an attempt from before the reconnect. Retry on the new session.
                Ok(None) => {}
                Err(error) => route.redirect(error).await?,
            }
        }
    }

    /// Tries to acquire a free lock without a script. Returns `None` if a script is needed: the lock was contended recently,
    /// the claim is not exclusive or may have a hold or a queue entry, the server's clock may be below `floor`, or `TIME` does
    /// not work outside a script.
    async fn acquire_if_free(&mut self, floor: u64) -> Result<Option<(Arc<Session>, Outcome)>> {
        if self.spec.mode != Mode::Exclusive || self.holds || !self.records.is_empty() {
            return Ok(None);
        }
        let mut route = self.store.topology.route(&self.keys).await?;
        loop {
            let node = route.node();
            // An attempt that does not queue needs no script to be refused.
            if self.spec.queue && node.contention.has(&self.keys) {
                return Ok(None);
            }
            // The script may have to refuse this floor. `SET` would change the lock before that.
            if node.client().time().is_none_or(|now| now < floor) {
                return Ok(None);
            }
            let attempt = Uncontended {
                keys: self.keys.clone(),
                front: self.front.clone(),
                label: self.spec.label.clone(),
                ttl: self.spec.ttl,
                floor,
                reads_holder: !self.spec.queue,
            };
            match node.commands.attempt_uncontended(attempt).await {
                Ok(None) => {}
                Ok(Some(replied)) => {
                    if !matches!(replied.1, Outcome::Granted(_)) {
                        node.contention.note(&self.keys);
                    }
                    return Ok(Some(replied));
                }
                Err(error) => route.redirect(error).await?,
            }
        }
    }

    fn granted(&mut self, fence: Fence, fence_is_past: bool) -> Grant {
        self.holds = true;
        self.uncontended_at = None;
        self.fence = Some(fence);
        self.contended = None;
        self.since = None;
        self.records.clear();
        self.inbox.unsubscribe();
        Grant { fence: Some(fence), fence_is_past, valid_for: Some(self.spec.ttl) }
    }

    async fn attempt_once(&mut self, floor: Option<Fence>) -> Result<Attempt> {
        if let Some(floor) = floor.filter(|floor| floor.get() >= MAX_FENCE) {
            let message = format!(
                "a floor of {floor} is not a fence of this store: fences on Redis are below 2^53"
            );
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
        let uncontended = self.acquire_if_free(floor).await?;
        let known = self.fence.take().filter(|_| self.holds);
        // The result is unknown until the reply arrives.
        self.holds = false;
        self.contended = None;
        let is_unconfirmed = matches!(uncontended, Some((_, Outcome::Unconfirmed)));
        match uncontended {
            Some((session, Outcome::Granted(fence))) => {
                let answer = self.confirm(&session, fence, true).await;
                self.uncontended_at = Some(Instant::now());
                return answer;
            }
            Some((session, Outcome::Refused(Some((holder, left)))))
                if holder != Holder::Owner(self.spec.owner) =>
            {
                return Ok(Attempt::Contended { retry: retry(&session, left), holder });
            }
            _ => {}
        }
        let (session, reply, secret) = self.send_attempt(floor, known, is_unconfirmed).await?;
        if let Some((left, holder)) = refusal(&reply) {
            self.contended = Some(secret);
            return Ok(Attempt::Contended { retry: retry(&session, left), holder });
        }
        let (fence, is_past) = read_fence(&reply).ok_or_else(|| unexpected(&reply))?;
        self.confirm(&session, fence, is_past).await
    }

    /// Checks whether a grant counts, and releases it if it does not.
    async fn confirm(&mut self, session: &Session, fence: Fence, is_past: bool) -> Result<Attempt> {
        self.fence = Some(fence);
        // Checked again: the server may have restarted since, and this may be another session.
        let counts = match self.check_uptime(session) {
            Ok(()) => session.replicated(self.store.min_replicas).await,
            Err(error) => Err(error),
        };
        if let Err(error) = counts {
            // Release it, so that no other claim waits until it expires.
            self.release_all().await?;
            return Err(error);
        }
        Ok(Attempt::Granted(self.granted(fence, is_past)))
    }

    /// Returns an error if the server started less than `min_uptime` ago: it may have granted the lock before the restart,
    /// and lost its data.
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
        // An uncontended claim registers when it first waits for a change. Boxed, because every hold keeps this future.
        if self.inbox.registration().is_none() {
            let route = Box::pin(self.store.topology.route(&self.keys)).await;
            if let Ok(route) = route {
                self.inbox.register_at(route.node());
            }
        }
        let Some(at) = self.inbox.registration() else { return std::future::pending().await };
        if self.store.notifies_unqueued() && !self.spec.queue && !self.holds {
            match self.inbox.subscribe(&at).await {
                // The lock may have been released before the subscription.
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
                    return Change::Granted(self.granted(fence, false));
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
        let (keys, owner, mode) = (self.keys.clone(), self.spec.owner, self.spec.mode);
        let (fence, has_ticket) = (self.fence, self.spec.ticket.is_some());
        let renewal = renewals::Renewal { keys, owner, mode, ttl, fence, has_ticket };
        let mut route = self.store.topology.route(&self.keys).await?;
        loop {
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
        let (fence, quorum_fence) = self.fences();
        let is_unchecked = u8::from(quorum_fence.is_some());
        let fence = quorum_fence.or(fence).map_or(0, Fence::get);
        let mut route = self.store.topology.route(&self.keys).await?;
        let (session, reply) = loop {
            self.inbox.register_at(route.node());
            let replied = route.node().run(&DOWNGRADE, |call| {
                call.number(Keys::ALL.len());
                self.keys.each(&Keys::ALL, |key| {
                    call.joined(&key);
                });
                call.word(&owner).number(millis(ttl)).number(fence).number(notifies_unqueued);
                call.number(is_unchecked);
            });
            match replied.await {
                // The cleanup limit was reached: another call advances the queue.
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

    /// Releases the hold, and removes the queue entries.
    async fn release_all(&mut self) -> Result<Release> {
        let mut held = false;
        let reply = loop {
            let reply = match self.send_release().await {
                Ok(reply) => reply,
                // The hold is released, and the error concerns only the hand-off. The next attempt or release of any
                // claim repeats the hand-off.
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
        self.since = None;
        self.fence = None;
        self.quorum_fence = None;
        self.records.clear();
        match reply {
            Value::Int(0 | 1) if held || reply == Value::Int(1) => Ok(Release::Released),
            Value::Int(0) => Ok(Release::WasNotHeld),
            reply => Err(unexpected(&reply)),
        }
    }
}

/// Returns the remaining time of the blocking lease in milliseconds, and its holder, if the reply to an attempt is a
/// refusal.
fn refusal(reply: &Value) -> Option<(i64, Holder)> {
    match reply {
        Value::Int(left) => Some((*left, Holder::Unknown)),
        Value::Array(parts) => match parts.as_slice() {
            [Value::Int(left), Value::BulkString(holder)] => Some((*left, holder_of(holder))),
            _ => None,
        },
        _ => None,
    }
}

/// Reads the fence in the reply to an attempt, and whether the server's clock had reached it.
fn read_fence(reply: &Value) -> Option<(Fence, bool)> {
    let Value::BulkString(text) = reply else { return None };
    let text = std::str::from_utf8(text).ok()?;
    let (fence, is_past) = match text.strip_suffix(" ahead") {
        Some(fence) => (fence, false),
        None => (text, true),
    };
    Some((Fence::new(fence.parse().ok()?)?, is_past))
}

/// Reads the value of a holder key. A client that follows the plain recipe may have written any value.
fn holder_of(value: &[u8]) -> Holder {
    match std::str::from_utf8(value) {
        Ok(READERS) => Holder::Readers,
        value => value.ok().and_then(record::owner_of).map_or(Holder::Unknown, Holder::Owner),
    }
}

/// Returns when to retry an attempt that was refused. `left` is the remaining time of the blocking lease in milliseconds.
fn retry(session: &Session, left: i64) -> Retry {
    match u64::try_from(left) {
        // No grant can be pushed on this session. The store may have had a channel when it was opened, so
        // `Capabilities::push` may still be declared.
        _ if !session.receives_messages() => Retry::Poll,
        // One millisecond later, so that the lease has expired.
        Ok(left) => Retry::After(Duration::from_millis(left + 1)),
        Err(_) => Retry::OnNotify,
    }
}

/// The reply to a release that left something to do: the queue has more dead waiters at its head than one call
/// may remove, so the lock has not been handed off yet. Another release, by any owner, continues.
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

    fn set_fence(&mut self, fence: Fence) {
        self.quorum_fence = Some(fence);
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        Box::pin(self.release_all())
    }
}
