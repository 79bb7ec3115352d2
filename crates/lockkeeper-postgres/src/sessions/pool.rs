//! The session pool, which assigns sessions to claims.
//!
//! Claims that hold or try a lock share sessions. A claim that waits has its own session for as long as it waits. Two claims
//! on one key never share a session, because the server grants a session a lock that it already holds.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{Label, Result};
use tokio::runtime::{self, Handle};
use tokio::sync::Notify;
use tokio_postgres::{Config, NoTls};

use super::connection::{Connection, MAX_RESPONSE_TIME, idle_timeout_for, response_time_for};
use super::fencing::Fencing;
use super::pooled::{self, Pool};
use super::session::{Purpose, QueryPermit, Session, SessionSlot};
use super::tls::Tls;
use crate::config::Options;
use crate::error::{translate, unavailable};
use crate::names::{AdvisoryKey, NO_KEY};

mod opening;
#[cfg(test)]
mod tests;

use opening::Opening;

/// The TTL of sessions that are opened for queries only.
const DEFAULT_TTL: Duration = Duration::from_secs(30);
/// How many claims share a session before another session is opened.
const MAX_SHARED: usize = 64;

/// Where connections come from.
pub(crate) enum Source {
    Server {
        config: Box<Config>,
        tls: Tls,
    },
    #[cfg_attr(not(feature = "deadpool"), expect(dead_code, reason = "no pools in this build"))]
    Pool(Pool),
}

/// All sessions of a store.
pub(crate) struct SessionPool {
    source: Source,
    options: Options,
    table: Mutex<Table>,
    /// Notified when a claim that found no session may find one.
    freed: Arc<Notify>,
}

#[derive(Default)]
struct Table {
    sessions: Vec<Arc<Session>>,
    /// How many sessions are being opened.
    opening: usize,
    /// How many of these are for waiters.
    opening_for_waiters: usize,
    /// The shared session that is being opened, by the runtime to which it will belong. Claims that arrive meanwhile share
    /// it.
    shared_opening: HashMap<runtime::Id, Opening>,
}

/// A claim's request for a session.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SessionRequest<'a> {
    pub(crate) key: AdvisoryKey,
    pub(crate) ttl: Duration,
    pub(crate) label: &'a str,
    /// What a claim draws its fences from. Queries have none.
    pub(crate) fencing: Option<&'a Arc<Fencing>>,
}

/// The answer of the pool to a request.
enum Checkout {
    Slot(SessionSlot, SessionMatch),
    /// A session is being opened, which may have a slot afterwards.
    Opening(Opening),
    Exhausted,
}

/// Whether a session has the label and idle timeout of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SessionMatch {
    Exact,
    /// The session has to be configured before it is used.
    NeedsConfiguration,
}

impl SessionPool {
    pub(crate) fn new(source: Source, options: Options) -> Self {
        Self { source, options, table: Mutex::default(), freed: Arc::default() }
    }

    /// Waits until a claim that found no session may find one.
    pub(crate) async fn freed(&self) {
        self.freed.notified().await;
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn max_sessions(&self) -> usize {
        match &self.source {
            Source::Server { .. } => self.options.max_connections,
            Source::Pool(pool) => pooled::max_size(pool).min(self.options.max_connections),
        }
    }

    /// Returns a slot on which to try and hold a lock. Returns `None` if the limit is reached, and every session waits or has
    /// a claim on that key.
    pub(crate) async fn shared_slot(
        self: &Arc<Self>,
        request: SessionRequest<'_>,
    ) -> Result<Option<SessionSlot>> {
        let mut failed = None;
        loop {
            match self.checkout_shared(request, failed.is_none()) {
                Checkout::Slot(slot, matched) => {
                    if let Some(slot) = self.prepare_slot(slot, matched, request).await? {
                        return Ok(Some(slot));
                    }
                }
                // If it cannot be opened, the next iteration uses an existing session.
                Checkout::Opening(opening) => failed = opening.done().await.err(),
                Checkout::Exhausted => return failed.map_or(Ok(None), Err),
            }
        }
    }

    /// Returns a slot on an unshared session on which to wait. Returns `None` if the limit is reached. One session always
    /// remains for holds, tries and the confirmation of waits. Otherwise waiters would block all other claims, and their
    /// waits would fail after a TTL, because they could not be confirmed.
    pub(crate) async fn exclusive_slot(
        self: &Arc<Self>,
        request: SessionRequest<'_>,
    ) -> Result<Option<SessionSlot>> {
        loop {
            match self.checkout_exclusive(request) {
                Checkout::Slot(slot, matched) => {
                    if let Some(slot) = self.prepare_slot(slot, matched, request).await? {
                        return Ok(Some(slot));
                    }
                }
                Checkout::Opening(opening) => match opening.done().await {
                    Ok(()) => {}
                    // The server may accept fewer connections than the limit. If it is down, the next try fails.
                    Err(error) if error.is_retryable() => return Ok(None),
                    Err(error) => return Err(error),
                },
                Checkout::Exhausted => return Ok(None),
            }
        }
    }

    /// Returns a permit to send queries on any session that does not hold `key`.
    pub(crate) async fn query_permit_without(
        self: &Arc<Self>,
        key: AdvisoryKey,
    ) -> Result<QueryPermit> {
        let label = Label::default();
        let (ttl, label) = (DEFAULT_TTL, label.as_str());
        let slot = self.shared_slot(SessionRequest { key, ttl, label, fencing: None }).await?;
        self.replace_by_permit(slot)
    }

    /// Returns a permit to send queries on any session that responds.
    pub(crate) async fn query_permit(
        self: &Arc<Self>,
        request: SessionRequest<'_>,
    ) -> Result<QueryPermit> {
        let (here, response_time) = (Handle::current().id(), response_time_for(request.ttl));
        let find = |table: &Table| {
            let mut usable = table.sessions.iter().filter(|session| {
                let connection = &session.connection;
                connection.runtime.id() == here
                    && !connection.is_closed()
                    && !connection.needs_ping()
            });
            usable.find_map(|session| QueryPermit::acquire(session, response_time))
        };
        if let Some(permit) = find(&self.table()) {
            return Ok(permit);
        }
        let slot =
            self.shared_slot(SessionRequest { key: NO_KEY, fencing: None, ..request }).await?;
        self.replace_by_permit(slot)
    }

    /// Returns a permit to send queries on any session that responds, for work that no claim waits for.
    pub(crate) async fn any_query_permit(self: &Arc<Self>) -> Result<QueryPermit> {
        let (key, ttl, label) = (NO_KEY, DEFAULT_TTL, Label::default());
        self.query_permit(SessionRequest { key, ttl, label: label.as_str(), fencing: None }).await
    }

    /// Replaces a slot by a permit, so that no waiter can take the session between the two.
    fn replace_by_permit(&self, slot: Option<SessionSlot>) -> Result<QueryPermit> {
        let slot = slot.ok_or_else(|| self.exhausted())?;
        let permit = QueryPermit::acquire(&slot.session, Duration::MAX);
        slot.end_unused();
        permit.ok_or_else(|| self.exhausted())
    }

    pub(crate) fn exhausted(&self) -> lockkeeper_core::Error {
        unavailable(format!(
            "connection limit reached ({}): raise max_connections",
            self.max_sessions()
        ))
    }

    fn checkout_shared(self: &Arc<Self>, request: SessionRequest<'_>, may_open: bool) -> Checkout {
        let mut table = self.table();
        let here = Handle::current().id();
        table.sessions.retain(|session| !session.connection.is_closed());
        let users_within = |session: &Arc<Session>, response_time| {
            let is_here = session.connection.runtime.id() == here;
            if is_here { session.users_without(request.key, response_time) } else { None }
        };
        let users = |session: &Arc<Session>| users_within(session, response_time_for(request.ttl));
        let slot = |session: &Arc<Session>, matched| {
            Checkout::Slot(SessionSlot::new(session, request.key, Purpose::Hold), matched)
        };
        let is_exact = |session: &&Arc<Session>| {
            users(session).is_some_and(|users| users < MAX_SHARED)
                && expires_in_time(session, request.ttl)
                && self.matches(session, &request) == SessionMatch::Exact
        };
        if let Some(session) = table.sessions.iter().find(is_exact) {
            return slot(session, SessionMatch::Exact);
        }
        // An unused session can change its label, but not shorten its idle timeout.
        let is_unused = |session: &&Arc<Session>| {
            users(session) == Some(0) && expires_in_time(session, request.ttl)
        };
        if let Some(session) = table.sessions.iter().find(is_unused) {
            return slot(session, SessionMatch::NeedsConfiguration);
        }
        if may_open {
            let opening = table.shared_opening.get(&here);
            let opening = opening.filter(|opening| opening.is_in_progress()).cloned();
            if let Some(opening) = opening.as_ref().filter(|opening| !opening.is_late(request.ttl))
            {
                return Checkout::Opening(opening.clone());
            }
            if self.make_room(&mut table, 0, None) {
                let (opening, task) = self.open(&mut table, request, Purpose::Hold);
                table.shared_opening.insert(here, opening.clone());
                return start(table, opening, task);
            }
            if let Some(opening) = opening {
                return Checkout::Opening(opening);
            }
        }
        // No session can be opened, and all are full or configured differently: uses the one with the fewest users.
        let usable = table
            .sessions
            .iter()
            .filter_map(|session| Some((users_within(session, MAX_RESPONSE_TIME)?, session)));
        match usable.min_by_key(|(users, _)| *users) {
            Some((_, session)) => slot(session, self.matches(session, &request)),
            None => Checkout::Exhausted,
        }
    }

    fn checkout_exclusive(self: &Arc<Self>, request: SessionRequest<'_>) -> Checkout {
        let mut table = self.table();
        let here = Handle::current().id();
        table.sessions.retain(|session| !session.connection.is_closed());
        let waiting = table.sessions.iter().filter(|session| session.is_waiting()).count()
            + table.opening_for_waiters;
        if waiting + 1 >= self.max_sessions() {
            return Checkout::Exhausted;
        }
        let users = |session: &Arc<Session>| {
            let users = session.users(response_time_for(request.ttl));
            users.filter(|_| session.connection.runtime.id() == here)
        };
        // A wait is confirmed over another session of this runtime. Without one, the claim polls instead.
        let can_be_confirmed = |waiting: &Arc<Session>| {
            let mut sessions = table.sessions.iter();
            sessions.any(|session| !Arc::ptr_eq(session, waiting) && users(session).is_some())
        };
        let is_usable = |session: &&Arc<Session>| {
            users(session) == Some(0)
                && expires_in_time(session, request.ttl)
                && can_be_confirmed(session)
        };
        if let Some(session) = table.sessions.iter().find(is_usable) {
            let matched = self.matches(session, &request);
            return Checkout::Slot(SessionSlot::new(session, request.key, Purpose::Wait), matched);
        }
        // If no session is usable for holds, tries and confirmations, leaves room within the limit for one.
        let kept = table.sessions.iter().find(|session| users(session).is_some()).cloned();
        let spare = usize::from(kept.is_none());
        if self.make_room(&mut table, spare, kept.as_ref()) {
            let (opening, task) = self.open(&mut table, request, Purpose::Wait);
            return start(table, opening, task);
        }
        Checkout::Exhausted
    }

    /// Returns whether `spare` + 1 more sessions may be opened. Closes unused sessions to make room, except `kept`.
    fn make_room(&self, table: &mut Table, spare: usize, kept: Option<&Arc<Session>>) -> bool {
        let max = self.max_sessions();
        let is_kept = |session: &Arc<Session>| kept.is_some_and(|kept| Arc::ptr_eq(kept, session));
        let is_spare = |session: &Arc<Session>| session.is_unused() && !is_kept(session);
        while table.sessions.len() + table.opening + spare >= max {
            let Some(unused) = table.sessions.iter().position(is_spare) else {
                return false;
            };
            table.sessions.swap_remove(unused);
        }
        true
    }

    fn label<'a>(&'a self, request: &SessionRequest<'a>) -> &'a str {
        self.options.application_name.as_deref().unwrap_or(request.label)
    }

    fn matches(&self, session: &Session, request: &SessionRequest<'_>) -> SessionMatch {
        if session.connection.is_configured_for(request.ttl, self.label(request)) {
            SessionMatch::Exact
        } else {
            SessionMatch::NeedsConfiguration
        }
    }

    /// Configures, prepares or checks the session of a slot for its claim. Returns `None` if the session has ended.
    async fn prepare_slot(
        &self,
        slot: SessionSlot,
        matched: SessionMatch,
        request: SessionRequest<'_>,
    ) -> Result<Option<SessionSlot>> {
        let connection = slot.session.connection.clone();
        let slot = UnusedSlot(Some(slot));
        let answer = match matched {
            SessionMatch::NeedsConfiguration => {
                connection.configure(request.ttl, self.label(&request)).await
            }
            SessionMatch::Exact if connection.needs_ping() => connection.ping().await,
            SessionMatch::Exact => Ok(()),
        };
        let answer = match (answer, request.fencing) {
            (Ok(()), Some(fencing)) if !fencing.is_prepared(&connection) => {
                fencing.prepare(&connection).await
            }
            (answer, _) => answer,
        };
        match answer {
            Ok(()) => Ok(slot.into_slot()),
            Err(_) if connection.is_closed() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends a request to cancel the statement of a connection.
    pub(crate) async fn cancel(&self, connection: &Connection) -> Result<()> {
        let token = connection.cancel_token();
        match &self.source {
            Source::Server { tls, .. } => tls.cancel(&token).await,
            // The TLS settings of the pool are not known here. If the server requires TLS, this fails.
            Source::Pool(_) => token.cancel_query(NoTls).await.map_err(translate),
        }
    }
}

/// Unlocks the table, and then spawns the task that opens a session. In this order: a runtime that is shutting down drops
/// the task inside `spawn`, and dropping its reservation locks the table.
fn start(
    table: MutexGuard<'_, Table>,
    opening: Opening,
    task: impl Future<Output = ()> + Send + 'static,
) -> Checkout {
    drop(table);
    tokio::spawn(task);
    Checkout::Opening(opening)
}

/// Returns whether the idle timeout of a session is at most twice as long as a lease of `ttl` needs. With a longer one, which
/// is never shortened, the lock of a dead client would stay locked for too long.
fn expires_in_time(session: &Session, ttl: Duration) -> bool {
    session.connection.idle_timeout() / 2 <= idle_timeout_for(ttl)
}

impl fmt::Debug for SessionPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.table();
        f.debug_struct("SessionPool").field("sessions", &table.sessions).finish_non_exhaustive()
    }
}

/// A slot on which no lock statement was sent. Dropping it leaves the session open.
struct UnusedSlot(Option<SessionSlot>);

impl UnusedSlot {
    fn into_slot(mut self) -> Option<SessionSlot> {
        self.0.take()
    }
}

impl Drop for UnusedSlot {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.end_unused();
        }
    }
}
