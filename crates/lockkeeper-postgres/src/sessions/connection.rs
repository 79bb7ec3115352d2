//! A connection to the server: its session, its statements, and its idle timeout.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use lockkeeper_core::{Error, Result};
use tokio::runtime;
use tokio::time::{Instant, timeout};
use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{CancelToken, Row};
use tokio_util::sync::CancellationToken;

use super::pooler;
use super::statements::{self, Arguments, Statement};
use super::transport::Transport;
use crate::error::{config, is_cancelled, translate, unavailable};
use crate::names::AdvisoryKey;

/// The shortest idle timeout of a session. A shorter one would end sessions while another connection is being opened.
const MIN_IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// The longest idle timeout that PostgreSQL accepts: 24 days.
const MAX_IDLE_TIMEOUT: Duration = Duration::from_millis(i32::MAX as u64);
/// The timeout for statements on a new connection.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// How many times the preparation of a statement is sent if late cancel requests end it.
const MAX_PREPARE_ATTEMPTS: usize = 5;
/// PostgreSQL 14, the first version with `idle_session_timeout`.
const MIN_VERSION: i32 = 140_000;
/// A connection on which a statement has gone unanswered for this long is not used for new claims.
pub(crate) const MAX_RESPONSE_TIME: Duration = Duration::from_secs(5);

/// Returns how long a statement may go unanswered before a claim of `ttl` prefers another connection. A third of the lease
/// leaves time for two more attempts.
pub(crate) fn response_time_for(ttl: Duration) -> Duration {
    MAX_RESPONSE_TIME.min(idle_timeout_for(ttl) / 3)
}

/// Returns the idle timeout that a session needs for a lease of `ttl`.
pub(crate) fn idle_timeout_for(ttl: Duration) -> Duration {
    ttl.clamp(MIN_IDLE_TIMEOUT, MAX_IDLE_TIMEOUT)
}

/// A connection and its session on the server.
pub(crate) struct Connection {
    transport: Transport,
    /// The session's process on the server.
    pub(crate) pid: i32,
    /// When the session started, in seconds by the server's clock. Together with the process id it identifies the
    /// session.
    pub(crate) started: f64,
    /// The server's timeline. It cannot change while the connection lasts.
    pub(crate) timeline: u64,
    /// The runtime of the connection's task. The connection ends with that runtime.
    pub(crate) runtime: runtime::Handle,
    /// Cancelled when the connection has closed.
    pub(crate) closed: CancellationToken,
    /// The idle timeout that the server has confirmed, in milliseconds. It only grows, so that every claim on this
    /// session keeps the validity that it was granted.
    idle_timeout: AtomicU64,
    /// Held while the session is reconfigured, so that changes are applied one after the other, and while a query relies on
    /// its own lock timeout.
    pub(super) reconfiguring: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    statements: [OnceLock<tokio_postgres::Statement>; Statement::COUNT],
    /// How many statements have failed because they were cancelled.
    cancelled: AtomicUsize,
}

#[derive(Debug)]
struct State {
    /// A time at which the session was alive: when the last answered statement was sent.
    last_alive: Instant,
    /// When the oldest statement was sent that has not been answered.
    unanswered_since: Option<Instant>,
    label: String,
    lock_timeout: Duration,
    /// What the session draws fences from, if it is prepared for that.
    fences: Option<SessionFences>,
}

/// What a session is prepared to draw fences from.
#[derive(Debug, Clone, Copy)]
pub(super) struct SessionFences {
    /// The id of the store's `Fencing`.
    pub(super) fencing: u64,
    /// The id of the sequence, or zero.
    pub(super) sequence: u32,
}

impl Connection {
    /// Checks that locks on the server are safe, and configures the session.
    pub(crate) async fn handshake(
        transport: Transport,
        closed: CancellationToken,
    ) -> Result<Arc<Self>> {
        let client = transport.client();
        let answer = client.query_typed(statements::HANDSHAKE, &[]).await.map_err(translate)?;
        let answer = answer.first().ok_or_else(|| unavailable("the server sent no answer"))?;
        let pid: i32 = answer.get("pid");
        if pooler::announced_pid(&client.cancel_token()).await != Some(pid) {
            return Err(config(
                "a pooler such as PgBouncer is in front of the server, and may grant one lock to two \
                 clients: connect to the server directly",
            ));
        }
        let version = answer.get("version");
        if version < MIN_VERSION {
            return Err(config(
                "the server is too old, it has no idle_session_timeout: PostgreSQL 14 or newer is required",
            ));
        }
        let timeline: Option<i64> = answer.get("timeline");
        let Some(timeline) = timeline else {
            return Err(config(
                "the server is a standby, whose locks do not exclude clients of the primary: connect to the \
                 primary, or name all hosts in the URL",
            ));
        };
        client.batch_execute(&statements::defaults(version)).await.map_err(translate)?;
        Ok(Arc::new(Self {
            pid,
            // NULL if the role may not read its own session. Then it cannot read the other sessions of this store either,
            // and `confirm_wait.sql` uses the lock table.
            started: answer.get::<_, Option<f64>>("started").unwrap_or_default(),
            timeline: timeline.unsigned_abs(),
            runtime: runtime::Handle::current(),
            closed,
            idle_timeout: AtomicU64::new(0),
            reconfiguring: tokio::sync::Mutex::default(),
            state: Mutex::new(State {
                last_alive: Instant::now(),
                unanswered_since: None,
                label: String::new(),
                lock_timeout: Duration::ZERO,
                fences: None,
            }),
            statements: [const { OnceLock::new() }; Statement::COUNT],
            cancelled: AtomicUsize::new(0),
            transport,
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.is_cancelled() || self.transport.client().is_closed()
    }

    /// Closes the connection. The server ends the session and frees its locks.
    pub(crate) fn close(&self) {
        self.transport.close();
        self.closed.cancel();
    }

    /// Returns how many statements have failed because they were cancelled. A cancel request is sent on its own
    /// connection and not answered, so this count is the only evidence that it has arrived.
    pub(crate) fn cancelled_statements(&self) -> usize {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(crate) fn cancel_token(&self) -> CancelToken {
        self.transport.client().cancel_token()
    }

    // The lifetime of the session.

    /// Returns the idle timeout of the session on the server.
    pub(crate) fn idle_timeout(&self) -> Duration {
        Duration::from_millis(self.idle_timeout.load(Ordering::SeqCst))
    }

    /// Returns the longest time for which the session may have been idle.
    pub(crate) fn idle_for(&self) -> Duration {
        self.state().last_alive.elapsed()
    }

    /// Returns whether the idle timeout has passed: the server has ended the session, or may do so at any time.
    pub(crate) fn has_expired(&self) -> bool {
        self.idle_for() >= self.idle_timeout()
    }

    /// Returns whether the session must be checked before it is used, because it may have been idle for long.
    pub(crate) fn needs_ping(&self) -> bool {
        self.idle_for() >= self.idle_timeout() / 2
    }

    /// Returns whether a statement has gone unanswered for longer than `limit`.
    pub(crate) fn is_unresponsive(&self, limit: Duration) -> bool {
        self.state().unanswered_since.is_some_and(|sent| sent.elapsed() > limit)
    }

    /// Returns whether the session has this label and an idle timeout of at least `ttl`.
    pub(crate) fn is_configured_for(&self, ttl: Duration, label: &str) -> bool {
        self.idle_timeout() >= idle_timeout_for(ttl) && self.state().label == label
    }

    /// Returns what the session is prepared to draw fences from.
    pub(super) fn fences(&self) -> Option<SessionFences> {
        self.state().fences
    }

    pub(super) fn set_fences(&self, fences: Option<SessionFences>) {
        self.state().fences = fences;
    }

    /// Extends the idle timeout of the session to `ttl`. Never shortens it.
    pub(crate) async fn extend_idle_timeout(self: &Arc<Self>, ttl: Duration) -> Result<()> {
        if self.idle_timeout() >= idle_timeout_for(ttl) {
            return Ok(());
        }
        let label = self.state().label.clone();
        self.configure(ttl, &label).await
    }

    /// Sets label and idle timeout of the session in a background task. Other claims wait for `reconfiguring`, and must not
    /// depend on the polling of this future.
    pub(crate) async fn configure(self: &Arc<Self>, ttl: Duration, label: &str) -> Result<()> {
        let (connection, label) = (self.clone(), label.to_owned());
        let task = tokio::spawn(async move { connection.configure_here(ttl, &label).await });
        task.await.unwrap_or_else(|_| Err(connection_closed()))
    }

    /// Sets label and idle timeout of the session. If the answer is lost, the client continues to rely on the old timeout
    /// only.
    pub(crate) async fn configure_here(&self, ttl: Duration, label: &str) -> Result<()> {
        let _reconfiguring = self.reconfiguring.lock().await;
        let idle_timeout = self.idle_timeout().max(idle_timeout_for(ttl));
        // Keepalives detect a dead client machine after 1/2 + 3/6 of the idle timeout.
        let keepalive_idle = idle_timeout.as_secs().div_ceil(2).clamp(1, 7200).to_string();
        let keepalive_interval = idle_timeout.as_secs().div_ceil(6).clamp(1, 600).to_string();
        let check_interval = (idle_timeout / 10).as_millis().clamp(50, 1000).to_string();
        let millis = idle_timeout.as_millis().to_string();
        let arguments: [&(dyn ToSql + Sync); 5] =
            [&millis, &keepalive_idle, &keepalive_interval, &check_interval, &label];
        let arguments = arguments.map(|argument| (argument, Type::TEXT));
        self.run(self.transport.client().query_typed(statements::CONFIGURE, &arguments)).await?;
        let millis = u64::try_from(idle_timeout.as_millis()).unwrap_or(u64::MAX);
        self.idle_timeout.store(millis, Ordering::SeqCst);
        label.clone_into(&mut self.state().label);
        Ok(())
    }

    /// Sets how long the server waits for a lock. Zero means no limit. Only the claim that waits on this session may
    /// call it, or the owner of a `QueryPermit`, which resets it.
    pub(crate) async fn set_lock_timeout(&self, limit: Duration) -> Result<()> {
        if self.state().lock_timeout == limit {
            return Ok(());
        }
        let set = format!("SET lock_timeout = {}", limit.as_millis());
        self.run(self.transport.client().batch_execute(&set)).await?;
        self.state().lock_timeout = limit;
        Ok(())
    }

    // Statements.

    /// Sends an empty statement, which restarts the idle timeout. Its answer proves that the session is alive.
    pub(crate) async fn ping(&self) -> Result<()> {
        self.batch_execute("").await
    }

    /// Sends statements that return nothing. They share a transaction, unless they control transactions themselves.
    pub(super) async fn batch_execute(&self, text: &str) -> Result<()> {
        self.run(self.transport.client().batch_execute(text)).await
    }

    /// Sends an unprepared statement, and returns its rows.
    pub(crate) async fn query_typed(
        &self,
        text: &str,
        arguments: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>> {
        self.run(self.transport.client().query_typed(text, arguments)).await
    }

    /// Awaits a statement that the server answers without waiting for locks. Closes the connection if the answer takes longer
    /// than the idle timeout, because no claim can rely on the session then.
    async fn run<T>(
        &self,
        statement: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T> {
        let idle_timeout = self.idle_timeout();
        // A new session has no idle timeout yet, and no claim relies on it. Opening it has its own timeout.
        let limit = if idle_timeout.is_zero() { HANDSHAKE_TIMEOUT } else { idle_timeout };
        let sent = self.start_statement()?;
        // Boxed because it is rare: see `prepared`.
        let Ok(answer) = timeout(limit, Box::pin(statement)).await else {
            self.close();
            return Err(unavailable(format!("the server did not answer within {limit:.1?}")));
        };
        self.finish_statement(sent, &answer);
        answer.map_err(translate)
    }

    /// Records that a statement is about to be sent, and returns when.
    fn start_statement(&self) -> Result<Instant> {
        if self.is_closed() {
            return Err(connection_closed());
        }
        let sent = Instant::now();
        self.state().unanswered_since.get_or_insert(sent);
        Ok(sent)
    }

    /// Records the answer to a statement that was sent at `sent`.
    fn finish_statement<T>(&self, sent: Instant, answer: &Result<T, tokio_postgres::Error>) {
        if self.is_alive_after(answer) {
            self.record_alive(sent);
        }
    }

    /// Returns whether the session is alive after this answer. Most errors do not end it.
    fn is_alive_after<T>(&self, answer: &Result<T, tokio_postgres::Error>) -> bool {
        let Err(error) = answer else { return true };
        if error.code() == Some(&SqlState::QUERY_CANCELED) {
            self.cancelled.fetch_add(1, Ordering::Relaxed);
        }
        let fatal = [Some(Severity::Fatal), Some(Severity::Panic)];
        let is_alive =
            error.as_db_error().is_some_and(|error| !fatal.contains(&error.parsed_severity()));
        if !is_alive {
            // An error that the server did not send means that the stream is closed, or that it is corrupt and answers may
            // belong to other statements. Errors of type conversion cannot occur here.
            self.close();
        }
        is_alive
    }

    /// Records that the session was alive after `sent`.
    fn record_alive(&self, sent: Instant) {
        let mut state = self.state();
        state.last_alive = state.last_alive.max(sent);
        state.unanswered_since = None;
    }

    /// Prepares a statement on the server, once.
    pub(crate) async fn prepare<'a>(
        &self,
        prepared: &'a OnceLock<tokio_postgres::Statement>,
        text: &str,
        types: &[Type],
    ) -> Result<&'a tokio_postgres::Statement> {
        if let Some(statement) = prepared.get() {
            return Ok(statement);
        }
        let mut attempts = 1;
        loop {
            match self.run(self.transport.client().prepare_typed(text, types)).await {
                // If a concurrent preparation was faster, its statement is used.
                Ok(statement) => return Ok(prepared.get_or_init(|| statement)),
                // A late cancel request, meant for the wait before it, ended the preparation.
                Err(error) if is_cancelled(&error) && attempts < MAX_PREPARE_ATTEMPTS => {
                    attempts += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns a prepared statement about a key. The preparation is boxed, because it happens once and would enlarge every
    /// future that sends a statement.
    pub(crate) async fn prepared(
        &self,
        statement: Statement,
    ) -> Result<&tokio_postgres::Statement> {
        let prepared = &self.statements[statement.index()];
        match prepared.get() {
            Some(prepared) => Ok(prepared),
            None => Box::pin(self.prepare(prepared, &statement.text(), statement.types())).await,
        }
    }

    /// Sends a statement that the server answers without waiting for locks, with at most one row. It has no timeout, because
    /// the engine has one and timers are costly. The inner error is one that the server sent; the connection is still open.
    pub(crate) async fn query(
        &self,
        prepared: &tokio_postgres::Statement,
        arguments: &[&(dyn ToSql + Sync)],
    ) -> Result<Result<Option<Row>, tokio_postgres::Error>> {
        let sent = self.start_statement()?;
        // Awaited here: a future that is passed to a function is stored twice.
        let answer = self.transport.client().query_opt(prepared, arguments).await;
        self.finish_statement(sent, &answer);
        self.check_sequence(answer.as_ref().err().and_then(tokio_postgres::Error::code));
        match answer {
            Err(error) if self.is_closed() => Err(translate(error)),
            answer => Ok(answer),
        }
    }

    /// Lets the next claim prepare the session again if a statement that uses the sequence has failed with this code, because
    /// the sequence may have been dropped.
    pub(super) fn check_sequence(&self, code: Option<&SqlState>) {
        if code.is_some_and(is_about_a_relation) {
            self.set_fences(None);
        }
    }

    /// Returns the sequence from which the session draws fences. No sequence has the id zero.
    pub(super) fn sequence(&self) -> u32 {
        self.fences().map_or(0, |fences| fences.sequence)
    }

    /// Sends a statement about a key.
    pub(crate) async fn execute(
        &self,
        statement: Statement,
        key: AdvisoryKey,
    ) -> Result<Result<Option<Row>, tokio_postgres::Error>> {
        let prepared = self.prepared(statement).await?;
        let sequence = self.sequence();
        let mut arguments = Arguments::of(&key);
        if statement.has_sequence() {
            arguments = arguments.with_sequence(&sequence);
        }
        self.query(prepared, arguments.get()).await
    }

    /// Sends a statement that waits, perhaps for hours. Returns the answer, and when the statement was sent.
    pub(crate) async fn wait(
        &self,
        statement: Statement,
        key: AdvisoryKey,
    ) -> Result<(Instant, Result<Option<Row>, tokio_postgres::Error>)> {
        let prepared = self.prepared(statement).await?;
        let (sent, sequence) = (Instant::now(), self.sequence());
        let mut arguments = Arguments::of(&key);
        if statement.has_sequence() {
            arguments = arguments.with_sequence(&sequence);
        }
        let answer = self.transport.client().query_opt(prepared, arguments.get()).await;
        self.is_alive_after(&answer);
        self.check_sequence(answer.as_ref().err().and_then(tokio_postgres::Error::code));
        match answer {
            Err(error) if self.is_closed() => Err(translate(error)),
            answer => Ok((sent, answer)),
        }
    }

    /// Records the end of a wait that took `waited` on the server. Returns the earliest time at which the wait can have
    /// ended, from which the session's idle timeout counts.
    pub(crate) fn record_wait(&self, sent: Instant, waited: Duration) -> Instant {
        // The server's clock may run slightly faster than this machine's. The duration is input, so the sum may overflow.
        let (now, ended) = (Instant::now(), sent.checked_add(waited.mul_f64(0.99)));
        let idle_since = ended.map_or(now, |ended| ended.min(now));
        self.record_alive(idle_since);
        idle_since
    }
}

/// Returns whether this is the code of an error that a sequence causes if it was dropped or may not be used any more. A relation
/// that was dropped is an internal error if it is named by its id.
fn is_about_a_relation(code: &SqlState) -> bool {
    let codes = [
        SqlState::INTERNAL_ERROR,
        SqlState::UNDEFINED_TABLE,
        SqlState::UNDEFINED_OBJECT,
        SqlState::WRONG_OBJECT_TYPE,
        SqlState::INSUFFICIENT_PRIVILEGE,
    ];
    codes.contains(code)
}

pub(crate) fn connection_closed() -> Error {
    unavailable("the connection to the server is closed")
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("pid", &self.pid)
            .field("idle_timeout", &self.idle_timeout())
            .finish_non_exhaustive()
    }
}
