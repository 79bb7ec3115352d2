//! A session that claims share, with the keys that they lock on it.

use std::borrow::Cow;
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
use crate::config::FenceSource;
use crate::names::AdvisoryKey;

/// The bounds of the timeout of a release, if no other claim needs the session.
const MIN_RELEASE_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// A session, and the claims that use it.
pub(crate) struct Session {
    pub(crate) connection: Arc<Connection>,
    usage: Mutex<Usage>,
    /// Fenced tries, which share statements if many are concurrent.
    pub(crate) tries: Coalescer<TrySender>,
    /// Renewals, which share heartbeats.
    pub(crate) heartbeats: Heartbeats,
    /// The pool's notification of claims that found no session.
    freed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Usage {
    /// The keys that this session has locked, or may have.
    keys: HashSet<AdvisoryKey>,
    /// The number of [`QueryPermit`]s.
    queries: usize,
    /// The number of claims that are being released.
    releases: usize,
    /// Whether the session waits for a lock. It executes no other statement until the wait ends.
    waits: bool,
}

/// What a slot is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To try or hold a lock on a session that other claims share.
    Hold,
    /// To wait for a lock on a session that no other claim uses.
    Wait,
}

impl Session {
    pub(crate) fn new(
        connection: Arc<Connection>,
        freed: Arc<Notify>,
        fences: FenceSource,
    ) -> Self {
        let tries = batch::coalescer(connection.clone(), fences);
        let heartbeats = Heartbeats::new(connection.clone());
        Self { connection, usage: Mutex::default(), tries, heartbeats, freed }
    }

    fn usage(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether no claim or query uses the session.
    pub(crate) fn is_unused(&self) -> bool {
        let usage = self.usage();
        !usage.waits && usage.keys.is_empty() && usage.queries == 0
    }

    /// Returns how many claims and queries use the session. Returns `None` if no more may use it, because it waits for a lock
    /// or has had an unanswered statement for longer than `response_time`.
    pub(crate) fn users(&self, response_time: Duration) -> Option<usize> {
        let unresponsive = self.connection.is_unresponsive(response_time);
        let usage = self.usage();
        (!usage.waits && !unresponsive).then_some(usage.keys.len() + usage.queries)
    }

    /// Like [`users`](Self::users), but also returns `None` if a claim on this key uses the session.
    pub(crate) fn users_without(&self, key: AdvisoryKey, response_time: Duration) -> Option<usize> {
        self.users(response_time).filter(|_| !self.usage().keys.contains(&key))
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.usage().waits
    }

    /// Records the end of the wait, so that other claims may use the session.
    pub(crate) fn stop_waiting(&self) {
        if std::mem::take(&mut self.usage().waits) {
            self.freed.notify_one();
        }
    }

    /// Returns the timeout of a release: the rest of the idle timeout if other claims need the session, and otherwise a few
    /// seconds.
    pub(crate) fn release_timeout(&self) -> Duration {
        let idle_timeout = self.connection.idle_timeout();
        let left = idle_timeout.saturating_sub(self.connection.idle_for());
        if self.has_other_claims() {
            return left;
        }
        left.min((idle_timeout / 3).clamp(MIN_RELEASE_TIMEOUT, MAX_RELEASE_TIMEOUT))
    }

    /// Returns whether the session can be terminated: all its claims are being released, or it has expired.
    pub(crate) fn can_be_ended(&self) -> bool {
        !self.has_other_claims() || self.connection.has_expired()
    }

    /// Returns whether the session has claims that are not being released.
    fn has_other_claims(&self) -> bool {
        let usage = self.usage();
        usage.keys.len() > usage.releases
    }

    /// Renews a lock of `ttl` that this session holds.
    pub(crate) async fn renew(&self, ttl: Duration, cause: RenewalCause) -> Result<()> {
        // A single lock has no other renewal to share a heartbeat with. After half of the TTL without an answer, the timeout
        // of the engine may be shorter than the linger.
        let is_alone = self.usage().keys.len() <= 1;
        let is_late = self.connection.idle_for() >= ttl / 2;
        let cause = if is_alone || is_late { RenewalCause::Requested } else { cause };
        self.heartbeats.renew(ttl, cause).await
    }

    fn free(&self, key: AdvisoryKey, outcome: SlotOutcome) {
        let mut usage = self.usage();
        usage.keys.remove(&key);
        // A slot on which nothing was locked does not notify: a claim that polls because it found no session to wait on uses
        // such slots, and would notify itself.
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

/// The right of a claim to lock a key on a session. A session has one slot per key, because the server grants a session a
/// lock that it already holds.
///
/// Dropping it without [`end_unused`](Self::end_unused) or [`end_unlocked`](Self::end_unlocked) closes the connection,
/// because the session may hold the lock.
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
    /// The lock was unlocked.
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

    /// Ends a slot on which nothing was locked.
    pub(crate) fn end_unused(mut self) {
        self.outcome = SlotOutcome::Unused;
    }

    /// Ends a slot on which a lock was held and has been unlocked.
    pub(crate) fn end_unlocked(mut self) {
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

/// A permit to send queries that lock nothing. While it exists, no claim starts to wait on the session.
#[derive(Debug)]
pub(crate) struct QueryPermit(pub(crate) Arc<Session>);

impl QueryPermit {
    /// Returns a permit, unless the session waits for a lock or has had an unanswered statement for longer than
    /// `response_time`.
    pub(crate) fn acquire(session: &Arc<Session>, response_time: Duration) -> Option<Self> {
        session.users(response_time)?;
        let mut usage = session.usage();
        if usage.waits {
            return None;
        }
        usage.queries += 1;
        Some(Self(session.clone()))
    }

    /// Sends a query that the server answers without waiting for locks. It runs in its own task, because an answer that is not
    /// read blocks all other answers on the connection.
    pub(crate) async fn query(
        &self,
        text: impl Into<Cow<'static, str>>,
        arguments: Vec<(Argument, Type)>,
    ) -> Result<Vec<Row>> {
        // The task keeps a permit even if the caller is dropped: the query is still in flight, and no wait may start.
        let (permit, text) = (self.clone(), text.into());
        let task = tokio::spawn(async move {
            let arguments = arguments.iter().map(|(value, kind)| (&**value as _, kind.clone()));
            let arguments: Vec<(&(dyn ToSql + Sync), Type)> = arguments.collect();
            permit.0.connection.query_typed(&text, &arguments).await
        });
        task.await.unwrap_or_else(|_| Err(connection_closed()))
    }

    /// Sends a query that waits for locks on tables for at most `limit`, as [`query`](Self::query) does. No wait for a lock
    /// of a claim starts on the session meanwhile, which would need its own limit.
    pub(crate) async fn query_within(&self, limit: Duration, text: String) -> Result<Vec<Row>> {
        let permit = self.clone();
        let task = tokio::spawn(async move {
            let connection = &permit.0.connection;
            // Another query would use the limit that this one is about to reset.
            let _reconfiguring = connection.reconfiguring.lock().await;
            connection.set_lock_timeout(limit).await?;
            let rows = connection.query_typed(&text, &[]).await;
            connection.set_lock_timeout(Duration::ZERO).await?;
            rows
        });
        task.await.unwrap_or_else(|_| Err(connection_closed()))
    }

    /// Sends statements without arguments, as [`query`](Self::query) does.
    pub(crate) async fn execute(&self, statements: String) -> Result<()> {
        let permit = self.clone();
        let task =
            tokio::spawn(async move { permit.0.connection.batch_execute(&statements).await });
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

/// Counts a claim as being released until it is dropped.
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
