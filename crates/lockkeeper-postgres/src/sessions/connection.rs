//! One connection to the server: its session, the statements it sends, and how long the session lasts.

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

/// The shortest idle timeout of a session. A shorter one would end sessions while others connect.
const MIN_IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// The longest idle timeout that PostgreSQL accepts: 24 days.
const MAX_IDLE_TIMEOUT: Duration = Duration::from_millis(i32::MAX as u64);
/// How long the first answers of a new connection may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often the preparation of a statement is sent that late cancel requests hit.
const MAX_PREPARE_ATTEMPTS: usize = 5;
/// The oldest version with `idle_session_timeout`.
const MIN_VERSION: i32 = 140_000;
/// A connection that has not answered a statement for this long is not chosen for new claims.
pub(crate) const MAX_RESPONSE_TIME: Duration = Duration::from_secs(5);

/// Returns how long a statement for a lease of `ttl` may go unanswered before another connection is preferred. A third
/// of the lease leaves time for two more attempts.
pub(crate) fn response_time_for(ttl: Duration) -> Duration {
    MAX_RESPONSE_TIME.min(idle_timeout_for(ttl) / 3)
}

/// Returns the idle timeout that a session needs to carry a lease of `ttl`.
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
    /// Held while the session is reconfigured, so that changes are applied one after the other.
    reconfiguring: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    statements: [OnceLock<tokio_postgres::Statement>; Statement::COUNT],
    /// How many statements have failed because they were cancelled.
    cancelled: AtomicUsize,
}

#[derive(Debug)]
struct State {
    /// When the last statement was sent that has been answered: the session was alive then.
    last_alive: Instant,
    /// When the oldest statement was sent that has not been answered.
    unanswered_since: Option<Instant>,
    label: String,
    lock_timeout: Duration,
}

impl Connection {
    /// Checks that the server can be trusted with locks, and prepares the session.
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
                "there is a pooler such as PgBouncer before the server, which may give one lock to \
                 two clients: connect to the server itself",
            ));
        }
        let version = answer.get("version");
        if version < MIN_VERSION {
            return Err(config(
                "the server is too old to end silent sessions: PostgreSQL 14 or newer is needed",
            ));
        }
        let timeline: Option<i64> = answer.get("timeline");
        let Some(timeline) = timeline else {
            return Err(config(
                "the server is a standby, whose locks exclude no client of other servers: connect to the \
                 primary, or name all hosts in the URL",
            ));
        };
        client.batch_execute(&statements::defaults(version)).await.map_err(translate)?;
        Ok(Arc::new(Self {
            pid,
            // NULL for a role that may not see its own session. It cannot see other sessions of this store, either.
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

    /// Closes the connection. The server ends its session and frees all locks of it.
    pub(crate) fn close(&self) {
        self.transport.close();
        self.closed.cancel();
    }

    /// Returns how many statements have failed because they were cancelled. A cancel request is sent on a connection
    /// of its own and not answered, so this is the only way to know that it has arrived.
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

    /// Returns for how long the session has been idle, at most.
    pub(crate) fn idle_for(&self) -> Duration {
        self.state().last_alive.elapsed()
    }

    /// Returns whether the server has ended the session for being idle, or may do so at any moment.
    pub(crate) fn has_expired(&self) -> bool {
        self.idle_for() >= self.idle_timeout()
    }

    /// Returns whether the session has been idle for so long that it is checked before it is used.
    pub(crate) fn needs_ping(&self) -> bool {
        self.idle_for() >= self.idle_timeout() / 2
    }

    /// Returns whether a statement has gone unanswered for longer than `limit`.
    pub(crate) fn is_unresponsive(&self, limit: Duration) -> bool {
        self.state().unanswered_since.is_some_and(|sent| sent.elapsed() > limit)
    }

    /// Returns whether the session has this label and carries a lease of `ttl`.
    pub(crate) fn is_configured_for(&self, ttl: Duration, label: &str) -> bool {
        self.idle_timeout() >= idle_timeout_for(ttl) && self.state().label == label
    }

    /// Makes the session carry a lease of `ttl`. Never shortens its idle timeout.
    pub(crate) async fn extend_idle_timeout(self: &Arc<Self>, ttl: Duration) -> Result<()> {
        if self.idle_timeout() >= idle_timeout_for(ttl) {
            return Ok(());
        }
        let label = self.state().label.clone();
        self.configure(ttl, &label).await
    }

    /// Sets label and idle timeout of the session, in a task of its own: other claims wait for the same change, and the
    /// future of the claim that started it may not be polled.
    pub(crate) async fn configure(self: &Arc<Self>, ttl: Duration, label: &str) -> Result<()> {
        let (connection, label) = (self.clone(), label.to_owned());
        let task = tokio::spawn(async move { connection.configure_here(ttl, &label).await });
        task.await.unwrap_or_else(|_| Err(connection_closed()))
    }

    /// Sets label and idle timeout of the session. If the answer is lost, the old idle timeout counts.
    pub(crate) async fn configure_here(&self, ttl: Duration, label: &str) -> Result<()> {
        let _reconfiguring = self.reconfiguring.lock().await;
        let idle_timeout = self.idle_timeout().max(idle_timeout_for(ttl));
        // Keepalive finds a dead client machine after 1/2 + 3/6 of the idle timeout.
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

    /// Sets how long the server waits for a lock; zero is without limit. Only called by the claim that waits on this
    /// session.
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

    /// Sends an empty statement. Its answer shows that the session is alive, and restarts its idle timeout.
    pub(crate) async fn ping(&self) -> Result<()> {
        self.run(self.transport.client().batch_execute("")).await
    }

    /// Sends a statement that is not prepared, and returns its rows.
    pub(crate) async fn query_typed(
        &self,
        text: &'static str,
        arguments: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>> {
        self.run(self.transport.client().query_typed(text, arguments)).await
    }

    /// Awaits a statement that the server answers at once. One that takes longer than the idle timeout closes the
    /// connection: no claim can rely on the session any more.
    async fn run<T>(
        &self,
        statement: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T> {
        let idle_timeout = self.idle_timeout();
        // A new session is not configured, and no claim relies on it. Opening it has a timeout of its own.
        let limit = if idle_timeout.is_zero() { HANDSHAKE_TIMEOUT } else { idle_timeout };
        let sent = self.start_statement()?;
        // Boxed, as everything that is rare: see `prepared`.
        let Ok(answer) = timeout(limit, Box::pin(statement)).await else {
            self.close();
            return Err(unavailable(format!("no answer from the server within {limit:.1?}")));
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
            // Every statement here is well typed: an error that the server did not send means that the stream is
            // closed, or that bytes were lost and its answers belong to other statements.
            self.close();
        }
        is_alive
    }

    /// Records that the session was alive at some moment after `sent`.
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
                // By a cancel request that was meant for the wait before it.
                Err(error) if is_cancelled(&error) && attempts < MAX_PREPARE_ATTEMPTS => {
                    attempts += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns a prepared statement about a key. The preparation is boxed: it happens once, and would add some thousand
    /// bytes to every future that sends a statement, which are moved more than once.
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

    /// Sends a statement that the server answers at once with one row or none. It has no timeout: the engine has one.
    /// (A timer would be a tenth of the cost of a statement.) The inner error is one that the server sent.
    pub(crate) async fn query(
        &self,
        prepared: &tokio_postgres::Statement,
        arguments: &[&(dyn ToSql + Sync)],
    ) -> Result<Result<Option<Row>, tokio_postgres::Error>> {
        let sent = self.start_statement()?;
        // Not passed to another function, whose future would store it twice: as an argument and as what it awaits.
        let answer = self.transport.client().query_opt(prepared, arguments).await;
        self.finish_statement(sent, &answer);
        match answer {
            Err(error) if self.is_closed() => Err(translate(error)),
            answer => Ok(answer),
        }
    }

    /// Sends a statement about a key.
    pub(crate) async fn execute(
        &self,
        statement: Statement,
        key: AdvisoryKey,
    ) -> Result<Result<Option<Row>, tokio_postgres::Error>> {
        let prepared = self.prepared(statement).await?;
        self.query(prepared, Arguments::of(&key).get()).await
    }

    /// Sends a statement as [`execute`](Self::execute) does, for a wait that may take hours. Also returns when it was
    /// sent.
    pub(crate) async fn wait(
        &self,
        statement: Statement,
        key: AdvisoryKey,
    ) -> Result<(Instant, Result<Option<Row>, tokio_postgres::Error>)> {
        let prepared = self.prepared(statement).await?;
        let sent = Instant::now();
        let arguments = Arguments::of(&key);
        let answer = self.transport.client().query_opt(prepared, arguments.get()).await;
        self.is_alive_after(&answer);
        match answer {
            Err(error) if self.is_closed() => Err(translate(error)),
            answer => Ok((sent, answer)),
        }
    }

    /// Records the end of a wait that took `waited` on the server, and returns the moment since when the session has
    /// been idle, at the earliest.
    pub(crate) fn record_wait(&self, sent: Instant, waited: Duration) -> Instant {
        // The server's clock may be a little faster than ours. The server states the duration, so the sum may be
        // past the end of our clock.
        let (now, ended) = (Instant::now(), sent.checked_add(waited.mul_f64(0.99)));
        let idle_since = ended.map_or(now, |ended| ended.min(now));
        self.record_alive(idle_since);
        idle_since
    }
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
