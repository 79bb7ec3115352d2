//! A session that claims share: which keys they lock on it, and whether it waits for one.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::Result;
use lockkeeper_core::coalescer::Coalescer;
use tokio::sync::Notify;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::batch::{self, TrySender};
use super::connection::{Connection, connection_closed};
use super::heartbeat::{Heartbeats, RenewalCause};
use crate::names::AdvisoryKey;

/// How long the server may take to confirm a release, at the least and at the most, when no other claim relies on the
/// session.
const MIN_RELEASE_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// A session, and the claims that use it.
pub(crate) struct Session {
    pub(crate) connection: Arc<Connection>,
    usage: Mutex<Usage>,
    /// Fenced tries, which share statements when there are many.
    pub(crate) tries: Coalescer<TrySender>,
    /// Renewals, which share heartbeats.
    pub(crate) heartbeats: Heartbeats,
    /// Notified when the session may be free for a claim that found none.
    freed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Usage {
    /// The keys that this session has locked, or may have.
    keys: HashSet<AdvisoryKey>,
    /// How many queries are in flight that concern no lock of this session.
    queries: usize,
    /// How many of its claims are being released.
    releases: usize,
    /// Whether the session waits for a lock. It can do nothing else until the wait ends.
    waits: bool,
}

/// What a slot is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To try or hold a lock, beside other claims.
    Hold,
    /// To wait for a lock, alone.
    Wait,
}

impl Session {
    pub(crate) fn new(connection: Arc<Connection>, freed: Arc<Notify>) -> Self {
        let tries = batch::coalescer(connection.clone());
        let heartbeats = Heartbeats::new(connection.clone());
        Self { connection, usage: Mutex::default(), tries, heartbeats, freed }
    }

    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether no claim or query uses the session, whether or not it responds.
    pub(crate) fn is_unused(&self) -> bool {
        let usage = self.usage();
        !usage.waits && usage.keys.is_empty() && usage.queries == 0
    }

    /// Returns how many claims and queries use the session. Returns `None` if no other may join them: the session waits
    /// for a lock, or has not answered for longer than `response_time`.
    pub(crate) fn users(&self, response_time: Duration) -> Option<usize> {
        let unresponsive = self.connection.is_unresponsive(response_time);
        let usage = self.usage();
        (!usage.waits && !unresponsive).then_some(usage.keys.len() + usage.queries)
    }

    /// Returns the same, or `None` if a claim on this key is among them.
    pub(crate) fn users_without(&self, key: AdvisoryKey, response_time: Duration) -> Option<usize> {
        self.users(response_time).filter(|_| !self.usage().keys.contains(&key))
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.usage().waits
    }

    /// Ends the wait: other claims may join.
    pub(crate) fn stop_waiting(&self) {
        if std::mem::take(&mut self.usage().waits) {
            self.freed.notify_one();
        }
    }

    /// Returns how long to wait for the answer to a release. While other claims rely on the session, that is until the
    /// session expires; otherwise a few seconds.
    pub(crate) fn release_timeout(&self) -> Duration {
        let idle_timeout = self.connection.idle_timeout();
        let left = idle_timeout.saturating_sub(self.connection.idle_for());
        if self.is_relied_on() {
            return left;
        }
        left.min((idle_timeout / 3).clamp(MIN_RELEASE_TIMEOUT, MAX_RELEASE_TIMEOUT))
    }

    /// Returns whether the session can be ended: all its claims are being released, or it has expired.
    pub(crate) fn can_be_ended(&self) -> bool {
        !self.is_relied_on() || self.connection.has_expired()
    }

    fn is_relied_on(&self) -> bool {
        let usage = self.usage();
        usage.keys.len() > usage.releases
    }

    /// Renews a lock of `ttl` that this session holds.
    pub(crate) async fn renew(&self, ttl: Duration, cause: RenewalCause) -> Result<()> {
        // A lock that is alone has no other to wait for. After half of the TTL without an answer there is no time to wait:
        // the engine may give a late renewal less time than the linger.
        let is_alone = self.usage().keys.len() <= 1;
        let is_late = self.connection.idle_for() >= ttl / 2;
        let cause = if is_alone || is_late { RenewalCause::Requested } else { cause };
        self.heartbeats.renew(ttl, cause).await
    }

    fn free(&self, key: AdvisoryKey, outcome: SlotOutcome) {
        let mut usage = self.usage();
        usage.keys.remove(&key);
        // A slot that was not used does not notify: a claim that found no session to wait on polls with such
        // slots, and would notify itself.
        let emptied = outcome != SlotOutcome::Unused && usage.keys.is_empty();
        let freed = std::mem::take(&mut usage.waits) || emptied;
        drop(usage);
        if freed {
            self.freed.notify_one();
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Session");
        debug.field("connection", &self.connection);
        debug.field("keys", &self.usage().keys.len()).finish_non_exhaustive()
    }
}

/// A claim's right to lock a key on a session. No other claim on that key has a slot there: a session is granted a lock
/// again that it holds.
///
/// Dropped without [`leave`](Self::leave) or [`vacate`](Self::vacate), it closes the connection, because the session
/// may hold the lock.
#[derive(Debug)]
pub(crate) struct SessionSlot {
    pub(crate) session: Arc<Session>,
    pub(crate) key: AdvisoryKey,
    outcome: SlotOutcome,
}

/// How a slot was used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotOutcome {
    /// The session may hold the lock.
    Unknown,
    /// Nothing was locked.
    Unused,
    /// What was locked has been unlocked.
    Unlocked,
}

impl SessionSlot {
    pub(crate) fn new(session: &Arc<Session>, key: AdvisoryKey, purpose: Purpose) -> Self {
        let mut usage = session.usage();
        usage.keys.insert(key);
        usage.waits = purpose == Purpose::Wait;
        drop(usage);
        Self { session: session.clone(), key, outcome: SlotOutcome::Unknown }
    }

    /// Gives up a slot on which nothing is locked.
    pub(crate) fn leave(mut self) {
        self.outcome = SlotOutcome::Unused;
    }

    /// Gives up a slot on which a lock was held and has been unlocked.
    pub(crate) fn vacate(mut self) {
        self.outcome = SlotOutcome::Unlocked;
    }
}

impl Drop for SessionSlot {
    fn drop(&mut self) {
        if self.outcome == SlotOutcome::Unknown {
            self.session.connection.close();
        }
        self.session.free(self.key, self.outcome);
    }
}

/// An argument of a query.
pub(crate) type Argument = Box<dyn ToSql + Send + Sync>;

/// A permit to send queries that concern no lock of the session. While it exists, no claim starts to wait there.
#[derive(Debug)]
pub(crate) struct QueryPermit(pub(crate) Arc<Session>);

impl QueryPermit {
    /// Returns a permit unless the session waits for a lock, or has not answered for longer than `response_time`.
    pub(crate) fn acquire(session: &Arc<Session>, response_time: Duration) -> Option<Self> {
        session.users(response_time)?;
        let mut usage = session.usage();
        if usage.waits {
            return None;
        }
        usage.queries += 1;
        Some(Self(session.clone()))
    }

    /// Sends a query that the server answers at once. It runs in a task of its own: a long answer that is not read
    /// blocks all other answers on the connection.
    pub(crate) async fn query(
        &self,
        text: &'static str,
        arguments: Vec<(Argument, Type)>,
    ) -> Result<Vec<Row>> {
        // For as long as the task runs, even if the caller is dropped: a wait that was sent before the query would
        // delay its answer.
        let permit = self.clone();
        let task = tokio::spawn(async move {
            let arguments = arguments.iter().map(|(value, kind)| (&**value as _, kind.clone()));
            let arguments: Vec<(&(dyn ToSql + Sync), Type)> = arguments.collect();
            permit.0.connection.query_typed(text, &arguments).await
        });
        task.await.unwrap_or_else(|_| Err(connection_closed()))
    }
}

impl Clone for QueryPermit {
    fn clone(&self) -> Self {
        self.0.usage().queries += 1;
        Self(self.0.clone())
    }
}

impl Drop for QueryPermit {
    fn drop(&mut self) {
        self.0.usage().queries -= 1;
    }
}

/// Counts a claim of a session as being released, until it is dropped.
#[derive(Debug)]
pub(crate) struct ReleaseInProgress(Arc<Session>);

impl ReleaseInProgress {
    pub(crate) fn new(session: &Arc<Session>) -> Self {
        session.usage().releases += 1;
        Self(session.clone())
    }
}

impl Drop for ReleaseInProgress {
    fn drop(&mut self) {
        self.0.usage().releases -= 1;
    }
}
