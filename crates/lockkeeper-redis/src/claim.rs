//! A claim on Redis: each step is one script.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{
    Attempt, BoxFuture, Change, Claim, ClaimSpec, Error, ErrorKind, Fence, Grant, Holder, Kind,
    LossReason, Mode, Release, Renewal, Result, Retry,
};
use redis::{Cmd, Value};
use tokio_util::sync::CancellationToken;

use crate::backend::Store;
use crate::cluster::Nodes;
use crate::connection::Connection;
use crate::error::{config, translate, unavailable};
use crate::key::Keys;
use crate::link::Link;
use crate::mailbox::{Mailbox, News, Secret};
use crate::peers::Peer;
use crate::renewals::{self, millis};
use crate::scripts::{DOWNGRADE, RENEW, STEPS, Script};
use crate::steps::{self, Step, What};

/// Which keys most scripts take: all of them.
pub(crate) const ALL: [usize; 6] = [0, 1, 2, 3, 4, 5];

/// The value of the holder key while readers hold the lock, as in `common.lua`.
const READERS: &str = "(readers)";

/// The scripts count in floating point, which is exact below this.
const END_OF_FENCES: u64 = 1 << 53;

pub(crate) struct RedisClaim {
    store: Arc<Store>,
    spec: ClaimSpec,
    keys: Keys,
    slot: u16,
    /// The secret of the last ask, if that was answered "contended" and no grant has used it yet.
    contended: Option<Secret>,
    holds: bool,
    /// A downgrade was asked for: from then on the hold may be a shared one.
    downgraded: bool,
    post: Option<Post>,
    /// The call of a renewal that was never answered.
    unanswered: Option<CancellationToken>,
    /// For a claim that listens without a place in the queue.
    listening: Option<Listening>,
}

/// The connection on which a claim listens, and whether it is known to.
struct Listening {
    connection: Arc<Connection>,
    confirmed: bool,
}

/// Where the claim is told what happens.
struct Post {
    link: Arc<Link>,
    mailbox: Arc<Mailbox>,
}

impl RedisClaim {
    pub(crate) fn new(store: Arc<Store>, spec: ClaimSpec) -> Self {
        let keys = Keys::new(&store.prefix, spec.mode.kind(), &spec.name);
        let slot = store.nodes.slot(&keys);
        Self {
            store,
            spec,
            keys,
            slot,
            contended: None,
            holds: false,
            downgraded: false,
            post: None,
            unanswered: None,
            listening: None,
        }
    }

    /// Runs a script on this claim's keys.
    async fn run(
        &mut self,
        script: &Script,
        add: impl Fn(&mut Cmd, &Connection),
    ) -> Result<(Arc<Connection>, Value)> {
        let (store, keys, slot) = (self.store.clone(), self.keys.clone(), self.slot);
        let add = |command: &mut Cmd, connection: &Connection| {
            command.arg(ALL.len());
            keys.add_to(command, &ALL);
            add(command, connection);
        };
        store.nodes.run(slot, script, |link| self.settle_at(link), add).await
    }

    /// Asks or gives back.
    async fn take(&mut self, what: What) -> Result<(Arc<Connection>, Value)> {
        let step = Step { keys: self.keys.clone(), owner: self.spec.owner, what };
        if let Nodes::One(link) = &self.store.nodes {
            let link = link.clone();
            self.settle_at(&link);
            return steps::take(&link, step).await;
        }
        // Locks in different slots of a cluster cannot share a call.
        let (store, slot) = (self.store.clone(), self.slot);
        let add = |command: &mut Cmd, connection: &Connection| {
            steps::add_to(command, connection, std::iter::once(&step));
        };
        let asked = store.nodes.run(slot, &STEPS, |link| self.settle_at(link), add);
        let (connection, answer) = asked.await?;
        Ok((connection, steps::only(answer)))
    }

    /// Has a mailbox at the link before anything is sent over it: what is told may overtake the answer.
    fn settle_at(&mut self, link: &Arc<Link>) {
        if self.post.as_ref().is_some_and(|post| Arc::ptr_eq(&post.link, link)) {
            return;
        }
        self.move_out();
        let mailbox = link.mailboxes().add(self.spec.owner);
        self.post = Some(Post { link: link.clone(), mailbox });
    }

    fn move_out(&mut self) {
        self.stop_listening();
        if let Some(post) = self.post.take() {
            post.link.mailboxes().remove(self.spec.owner, &post.mailbox);
        }
    }

    fn granted(&mut self, fence: Fence) -> Grant {
        self.holds = true;
        self.contended = None;
        self.stop_listening();
        Grant { fence: Some(fence), valid_for: Some(self.spec.ttl) }
    }

    async fn ask(&mut self, floor: Option<Fence>) -> Result<Attempt> {
        if let Some(floor) = floor.filter(|floor| floor.get() >= END_OF_FENCES) {
            let message =
                format!("a fence of {floor} is not of Redis, whose fences are below 2^53");
            return Err(Error::new(ErrorKind::Config, message));
        }
        if let Some(error) = self.store.peer.as_ref().and_then(Peer::refusal) {
            return Err(error);
        }
        if let (Some(_), Nodes::One(link)) = (self.spec.min_uptime, &self.store.nodes) {
            let connection = link.connection().await?;
            self.check_uptime(&connection)?;
        }
        let floor = floor.map_or(0, Fence::get);
        // Whatever was believed: this asks.
        self.holds = false;
        self.contended = None;
        let secret = Secret::random();
        let (mode, queue, ttl) = (self.spec.mode, self.spec.queue, self.spec.ttl);
        let label = self.spec.label.clone();
        let what = What::Ask { mode, queue, ttl, floor, secret, label };
        let (connection, answer) = loop {
            let taken = self.take(what.clone()).await?;
            // The server has removed as much as one call may: dead waiters, ended leases.
            if !matches!(&taken.1, Value::BulkString(text) if text == b"again") {
                break taken;
            }
        };
        if let Some((left, holder)) = refusal(&answer) {
            self.contended = Some(secret);
            let retry = match u64::try_from(left) {
                // No grant can be pushed on this connection. The store may have had a channel when it was opened,
                // which is what `Capabilities::push` says.
                _ if !connection.hears() => Retry::Poll,
                // Just after it has ended, not just before.
                Ok(left) => Retry::After(Duration::from_millis(left + 1)),
                Err(_) => Retry::OnNotify,
            };
            return Ok(Attempt::Contended { retry, holder });
        }
        let fence = match &answer {
            Value::BulkString(fence) => std::str::from_utf8(fence).ok(),
            _ => None,
        };
        let fence = fence.and_then(|fence| fence.parse().ok()).and_then(Fence::new);
        let fence = fence.ok_or_else(|| unexpected(&answer))?;
        // Asked again: the server may have restarted since, and this may be another connection.
        let counts = match self.check_uptime(&connection) {
            Ok(()) => connection.replicated(self.store.min_replicas).await,
            Err(error) => Err(error),
        };
        if let Err(error) = counts {
            // It does not count, so nobody else should have to wait for it to end.
            self.give_up().await?;
            return Err(error);
        }
        Ok(Attempt::Granted(self.granted(fence)))
    }

    /// Refuses to ask a server that may have lost its data too recently: it may have granted the lock before.
    fn check_uptime(&self, connection: &Connection) -> Result<()> {
        let Some(least) = self.spec.min_uptime.filter(|least| !least.is_zero()) else {
            return Ok(());
        };
        let address = connection.identity().address();
        match connection.uptime() {
            Some(uptime) if uptime >= least => Ok(()),
            Some(uptime) => Err(unavailable(format!(
                "{address}: started {uptime:.0?} ago and does not vote before it has been up for {least:.0?} (min_uptime): \
                 it may have lost its data"
            ))),
            None => Err(config(format!(
                "{address}: does not tell how long it has been up: let the user run INFO (ACL +info), or set \
                 min_uptime=0s if it keeps its data over a restart"
            ))),
        }
    }

    async fn next_change(&mut self) -> Change {
        let Some(post) = &self.post else { return std::future::pending().await };
        let (link, mailbox) = (post.link.clone(), post.mailbox.clone());
        if self.store.tells && !self.spec.queue && !self.holds {
            match self.listen(&link, &mailbox).await {
                // It may have been given back before we listened.
                Ok(true) => return Change::LookAgain,
                Ok(false) => {}
                // The engine asks again by itself.
                Err(_) => return std::future::pending().await,
            }
        }
        loop {
            match mailbox.next().await {
                // A word that came before the answer to our own ask.
                News::Granted { .. } if self.holds => {}
                News::Granted { secret, fence }
                    if self.contended == Some(secret) && self.store.min_replicas == 0 =>
                {
                    return Change::Granted(self.granted(fence));
                }
                // The grant answers an ask before the last, is forged or replayed, or replicas have yet to
                // acknowledge it.
                News::Granted { .. } | News::Look => return Change::LookAgain,
            }
        }
    }

    /// Listens for releases, without a place in the queue; true if that is new.
    async fn listen(&mut self, link: &Arc<Link>, mailbox: &Arc<Mailbox>) -> Result<bool> {
        let connection = link.connection().await?;
        if self.listening.as_ref().is_some_and(|listening| {
            listening.confirmed && Arc::ptr_eq(&listening.connection, &connection)
        }) {
            return Ok(false);
        }
        let channel = self.keys.holder();
        link.mailboxes().listen(channel, mailbox);
        self.listening = Some(Listening { connection: connection.clone(), confirmed: false });
        connection.subscribe(channel).await.map_err(translate)?;
        self.listening = Some(Listening { connection, confirmed: true });
        Ok(true)
    }

    fn stop_listening(&mut self) {
        let (Some(listening), Some(post)) = (self.listening.take(), &self.post) else { return };
        let connection = listening.connection;
        let channel = self.keys.holder().to_owned();
        if post.link.mailboxes().stop_listening(&channel, &post.mailbox)
            && !connection.gone().is_cancelled()
        {
            let link = post.link.clone();
            self.spec.background.spawn(async move {
                // Somebody may have begun to listen in the meantime.
                if !link.mailboxes().is_listening(&channel) {
                    let _ = connection.unsubscribe(&channel).await;
                    if link.mailboxes().is_listening(&channel) {
                        let _ = connection.subscribe(&channel).await;
                    }
                }
            });
        }
    }

    async fn lengthen(&mut self, ttl: Duration) -> Result<Renewal> {
        if self.downgraded {
            return self.weaken(ttl).await;
        }
        let mode = letter(self.spec.mode);
        let (keys, owner) = (self.keys.clone(), self.spec.owner);
        let ticket = self.spec.ticket;
        let renewal = renewals::Renewal { keys, owner, mode, ttl, ticket };
        let held = if let Nodes::One(link) = &self.store.nodes {
            let link = link.clone();
            self.settle_at(&link);
            renewals::renew(&link, renewal, &mut self.unanswered).await?
        } else {
            // Holds in different slots of a cluster cannot share a call.
            let (store, slot) = (self.store.clone(), self.slot);
            let add = |command: &mut Cmd, _: &Connection| {
                renewals::add_to(command, std::iter::once(&renewal));
            };
            let (connection, answer) =
                store.nodes.run(slot, &RENEW, |link| self.settle_at(link), add).await?;
            connection.replicated(store.min_replicas).await?;
            renewals::answers(&answer).first().copied().ok_or_else(|| unexpected(&answer))?
        };
        Ok(self.renewed(held, ttl))
    }

    async fn weaken(&mut self, ttl: Duration) -> Result<Renewal> {
        if self.spec.mode.kind() == Kind::Semaphore {
            let message = "permits cannot be downgraded";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        // Before it is sent: the answer may be lost.
        self.downgraded = true;
        let (owner, tells) = (self.spec.owner.to_string(), self.store.tells);
        let (connection, answer) = loop {
            let asked = self.run(&DOWNGRADE, |command, _| {
                command.arg(&owner).arg(millis(ttl)).arg(u8::from(tells));
            });
            let taken = asked.await?;
            if taken.1 != Value::Int(2) {
                break taken;
            }
        };
        connection.replicated(self.store.min_replicas).await?;
        match answer {
            Value::Int(held) => Ok(self.renewed(held == 1, ttl)),
            answer => Err(unexpected(&answer)),
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

    async fn give_up(&mut self) -> Result<Release> {
        let (kind, tells) = (self.spec.mode.kind(), self.store.tells);
        let mut held = false;
        let answer = loop {
            let answer = match self.take(What::GiveBack { kind, tells }).await {
                Ok((_, answer)) => answer,
                // It is released. The next ask or release hands it over.
                Err(_) if held => Value::Int(1),
                Err(error) => return Err(error),
            };
            match Again::read(&answer) {
                Some(Again { was_held }) => held |= was_held,
                None => break answer,
            }
        };
        self.holds = false;
        self.downgraded = false;
        self.contended = None;
        match answer {
            Value::Int(0 | 1) if held || answer == Value::Int(1) => Ok(Release::Released),
            Value::Int(0) => Ok(Release::WasNotHeld),
            answer => Err(unexpected(&answer)),
        }
    }
}

/// How long the lease in the way lasts, and whose it is, if the answer to an ask is a refusal.
fn refusal(answer: &Value) -> Option<(i64, Holder)> {
    match answer {
        Value::Int(left) => Some((*left, Holder::Unknown)),
        Value::Array(parts) => match parts.as_slice() {
            [Value::Int(left), Value::BulkString(holder)] => {
                let holder = match std::str::from_utf8(holder) {
                    Ok(READERS) => Holder::Readers,
                    // A client that follows the plain recipe may have written anything.
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

/// The answer to a release that left something to do: the queue has more dead waiters at its head than one call
/// may remove, so the lock has not been handed over yet. Another release, by any owner, continues.
pub(crate) struct Again {
    was_held: bool,
}

impl Again {
    pub(crate) fn read(answer: &Value) -> Option<Self> {
        match answer {
            Value::BulkString(text) if text == b"1 again" => Some(Self { was_held: true }),
            Value::BulkString(text) if text == b"0 again" => Some(Self { was_held: false }),
            _ => None,
        }
    }
}

/// What a script calls the mode.
fn letter(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "x",
        Mode::Shared => "s",
        Mode::Permits { .. } => "p",
    }
}

/// What a script calls the kind.
pub(crate) fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Lock => "lock",
        Kind::Semaphore => "semaphore",
    }
}

pub(crate) fn unexpected(answer: &Value) -> Error {
    unavailable(format!("an answer that makes no sense: {answer:?}"))
}

impl Claim for RedisClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        Box::pin(self.ask(floor))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(self.next_change())
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(self.lengthen(ttl))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(self.weaken(ttl))
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        Box::pin(self.give_up())
    }
}

impl Drop for RedisClaim {
    fn drop(&mut self) {
        self.move_out();
    }
}
