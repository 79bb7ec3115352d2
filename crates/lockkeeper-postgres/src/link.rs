//! One connection: its session, how long that lasts, and who sits on it.

use std::collections::HashSet;
use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use lockkeeper_core::{Error, Result};
use tokio::runtime;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};
use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{CancelToken, Client, Row};
use tokio_util::sync::CancellationToken;

use crate::error::{config, is_cancelled, translate, unavailable};
use crate::key::Key;
use crate::pooled::Pooled;
use crate::pooler;
use crate::seat::{Leaving, Left, Visit};
use crate::sql::{self, Arguments, Statement};
use crate::together::Together;

/// No session is ended sooner than after this much silence: connecting would take up what is left.
const SHORTEST_SESSION: Duration = Duration::from_secs(1);
/// How long the first answers of a new connection may take.
const FIRST_ANSWERS: Duration = Duration::from_secs(30);
/// How often the preparation of a statement is sent again that was hit by a late cancel.
const PREPARE_TRIES: usize = 5;
/// The longest time that PostgreSQL counts: 24 days.
const LONGEST_SESSION: Duration = Duration::from_millis(i32::MAX as u64);
/// The oldest version that can end a silent session.
const OLDEST_VERSION: i32 = 140_000;
/// A command that has had no answer for this long makes others look for another connection.
pub(crate) const STUCK: Duration = Duration::from_secs(5);

/// How long a command for a lease of `ttl` may go unanswered before another connection is preferred. A third of
/// the lease leaves time for two more tries.
pub(crate) fn patience_for(ttl: Duration) -> Duration {
    STUCK.min(session_for(ttl) / 3)
}

/// How long the server may take to confirm that a lock was given back, at the least and at the most, when no
/// other claim relies on its session.
const LEAST_FAREWELL: Duration = Duration::from_secs(1);
const MOST_FAREWELL: Duration = Duration::from_secs(5);

/// How long a session must last in silence to carry a lease of `ttl`.
pub(crate) fn session_for(ttl: Duration) -> Duration {
    ttl.clamp(SHORTEST_SESSION, LONGEST_SESSION)
}

/// An argument of a question, on its way.
pub(crate) type Argument = Box<dyn ToSql + Send + Sync>;

/// A connection and its session.
pub(crate) struct Link {
    wire: Wire,
    /// The session's process on the server.
    pub(crate) pid: i32,
    /// When the session began, by the server's clock, in seconds: with the process id, what identifies it.
    pub(crate) started: f64,
    /// The server's timeline: it cannot change while the connection lasts.
    pub(crate) timeline: u64,
    /// Where the connection's task runs. It ends with that runtime.
    pub(crate) runtime: runtime::Handle,
    /// Cancelled when the connection is no more.
    pub(crate) closed: CancellationToken,
    /// How long the server lets it be silent, in milliseconds, as far as that is confirmed. It only
    /// grows: whoever relies on it keeps what it was promised.
    session: AtomicU64,
    /// Held while the session is changed, so that no two changes pass each other.
    changing: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    statements: [OnceLock<tokio_postgres::Statement>; Statement::COUNT],
    /// How many of its statements have ended because they were cancelled.
    cancels: AtomicUsize,
    pub(crate) together: Together,
    /// Told when somebody leaves, so that another may have the connection.
    freed: Arc<Notify>,
}

/// A connection, and what it takes to end it.
pub(crate) enum Wire {
    Own(Client, AbortHandle),
    Pooled(Pooled),
}

impl Wire {
    pub(crate) fn client(&self) -> &Client {
        match self {
            Wire::Own(client, _) => client,
            Wire::Pooled(pooled) => pooled.client(),
        }
    }

    /// Ends it without a farewell. One from a pool ends when it is dropped.
    fn cut(&self) {
        if let Wire::Own(_, task) = self {
            task.abort();
        }
    }
}

#[derive(Debug)]
struct State {
    /// When the last command was sent that was answered: the session has lived since then.
    alive: Instant,
    /// When the first command was sent of those that nothing has been heard of since.
    unanswered: Option<Instant>,
    label: String,
    /// The keys that are, or may be, locked by this session.
    seats: HashSet<Key>,
    /// How many questions about no lock of this session are under way.
    visitors: usize,
    /// How many of these claims are giving their locks back.
    leaving: usize,
    /// Whether it waits for a lock: then it can do nothing else.
    waits: bool,
    lock_timeout: Duration,
}

impl State {
    fn seats(&self, patience: Duration) -> Option<usize> {
        let stuck = self.unanswered.is_some_and(|sent| sent.elapsed() > patience);
        (!self.waits && !stuck).then_some(self.seats.len() + self.visitors)
    }
}

impl Link {
    /// Makes a link of a new connection, if whoever is at its other end can be trusted with locks.
    pub(crate) async fn new(
        wire: Wire,
        closed: CancellationToken,
        freed: Arc<Notify>,
    ) -> Result<Self> {
        let client = wire.client();
        let hello = client.query_typed(sql::GREET, &[]).await.map_err(translate)?;
        let hello = hello.first().ok_or_else(|| unavailable("the server says nothing"))?;
        let pid: i32 = hello.get("pid");
        if pooler::announced_pid(&client.cancel_token()).await != Some(pid) {
            return Err(config(
                "there is a pooler such as PgBouncer before the server, which may give one lock to \
                 two clients: connect to the server itself",
            ));
        }
        let version = hello.get("version");
        if version < OLDEST_VERSION {
            return Err(config(
                "the server is too old to end silent sessions: PostgreSQL 14 or newer is needed",
            ));
        }
        let timeline: Option<i64> = hello.get("timeline");
        let Some(timeline) = timeline else {
            return Err(config(
                "the server is a standby, whose locks exclude nobody elsewhere: connect to the \
                 primary, or name all hosts in the URL",
            ));
        };
        client.batch_execute(&sql::settle(version)).await.map_err(translate)?;
        let now = Instant::now();
        Ok(Self {
            pid,
            // A role that may not see its own session cannot see others of its store, either.
            started: hello.get::<_, Option<f64>>("started").unwrap_or_default(),
            timeline: timeline.unsigned_abs(),
            runtime: runtime::Handle::current(),
            closed,
            session: AtomicU64::new(0),
            changing: tokio::sync::Mutex::default(),
            state: Mutex::new(State {
                alive: now,
                unanswered: None,
                label: String::new(),
                seats: HashSet::new(),
                visitors: 0,
                leaving: 0,
                waits: false,
                lock_timeout: Duration::ZERO,
            }),
            statements: [const { OnceLock::new() }; Statement::COUNT],
            cancels: AtomicUsize::new(0),
            together: Together::default(),
            freed,
            wire,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.is_cancelled() || self.wire.client().is_closed()
    }

    /// Ends the connection, and with it whatever its session holds.
    pub(crate) fn kill(&self) {
        self.wire.cut();
        self.closed.cancel();
    }

    /// How many of its statements have ended because they were cancelled. A cancel is sent on a connection of its
    /// own and not answered, so this is the only way to know that it has arrived.
    pub(crate) fn cancels(&self) -> usize {
        self.cancels.load(Ordering::Relaxed)
    }

    pub(crate) fn cancel_token(&self) -> CancelToken {
        self.wire.client().cancel_token()
    }

    // Who sits here.

    /// Whether the session is labelled so, and long enough for a lease of `ttl`.
    pub(crate) fn suits(&self, ttl: Duration, label: &str) -> bool {
        self.session() >= session_for(ttl) && self.state().label == label
    }

    /// Whether nobody sits here or waits, whether it answers or not.
    pub(crate) fn is_unused(&self) -> bool {
        let state = self.state();
        !state.waits && state.seats.is_empty() && state.visitors == 0
    }

    /// How many sit here, unless none may join them: it waits, or has not answered for longer than `patience`.
    pub(crate) fn seats(&self, patience: Duration) -> Option<usize> {
        self.state().seats(patience)
    }

    /// The same, unless one of them has this key.
    pub(crate) fn seats_without(&self, key: Key, patience: Duration) -> Option<usize> {
        let state = self.state();
        state.seats(patience).filter(|_| !state.seats.contains(&key))
    }

    /// Keeps waiters away while a question about no lock of this session is under way. `None` if the session
    /// waits, or has not answered for longer than `patience`.
    pub(crate) fn visit(self: &Arc<Self>, patience: Duration) -> Option<Visit> {
        let mut state = self.state();
        state.seats(patience)?;
        state.visitors += 1;
        Some(Visit(self.clone()))
    }

    pub(crate) fn end_visit(&self) {
        self.state().visitors -= 1;
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.state().waits
    }

    pub(crate) fn sit(&self, key: Key, waits: bool) {
        let mut state = self.state();
        state.seats.insert(key);
        state.waits = waits;
    }

    /// The wait is over: others may join.
    pub(crate) fn stop_waiting(&self) {
        if std::mem::take(&mut self.state().waits) {
            self.freed.notify_one();
        }
    }

    pub(crate) fn leave(&self, key: Key, left: Left) {
        let mut state = self.state();
        state.seats.remove(&key);
        // Not after a look that was in vain: whoever has no connection to wait on looks, too, and would
        // tell itself.
        let emptied = left != Left::Unused && state.seats.is_empty();
        let freed = std::mem::take(&mut state.waits) || emptied;
        drop(state);
        if freed {
            self.freed.notify_one();
        }
    }

    /// Counts a claim of this session as leaving, until the answer is dropped.
    pub(crate) fn leaving(self: &Arc<Self>) -> Leaving {
        self.state().leaving += 1;
        Leaving(self.clone())
    }

    pub(crate) fn has_left(&self) {
        self.state().leaving -= 1;
    }

    /// How long to wait for the answer to a release: while other claims rely on the session, until that lapses, and
    /// else for a few seconds.
    pub(crate) fn leave_within(&self) -> Duration {
        let session = self.session();
        let state = self.state();
        let left = session.saturating_sub(state.alive.elapsed());
        if state.seats.len() > state.leaving {
            return left;
        }
        left.min((session / 3).clamp(LEAST_FAREWELL, MOST_FAREWELL))
    }

    /// Whether no claim relies on the session any more: all are leaving, or it has lapsed.
    pub(crate) fn is_done_with(&self) -> bool {
        let state = self.state();
        state.seats.len() <= state.leaving || state.alive.elapsed() >= self.session()
    }

    // The session.

    /// How long the server lets it be silent.
    pub(crate) fn session(&self) -> Duration {
        Duration::from_millis(self.session.load(Ordering::SeqCst))
    }

    /// Whether it has been silent for so long that the server has ended it, or may at any moment.
    pub(crate) fn has_lapsed(&self) -> bool {
        self.state().alive.elapsed() >= self.session()
    }

    /// Whether it has been silent for so long that it is better asked before it is used.
    pub(crate) fn is_drowsy(&self) -> bool {
        self.state().alive.elapsed() >= self.session() / 2
    }

    /// Sees to it that the session lasts for a lease of `ttl`, and never for less than it did.
    pub(crate) async fn lengthen(self: &Arc<Self>, ttl: Duration) -> Result<()> {
        if self.session() >= session_for(ttl) {
            return Ok(());
        }
        let label = self.state().label.clone();
        self.settle(ttl, &label).await
    }

    /// Sets label and length of the session, in a task of its own: others who want the same wait for it,
    /// and whoever began may be left unpolled.
    pub(crate) async fn settle(self: &Arc<Self>, ttl: Duration, label: &str) -> Result<()> {
        let (link, label) = (self.clone(), label.to_owned());
        let settled = tokio::spawn(async move { link.settle_here(ttl, &label).await });
        settled.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Sets label and length of the session. If the answer is lost, a longer one is not believed.
    pub(crate) async fn settle_here(&self, ttl: Duration, label: &str) -> Result<()> {
        let _changing = self.changing.lock().await;
        let session = self.session().max(session_for(ttl));
        // What may take longer than a session, for a machine that is gone: 1/2 + 3/6 of it.
        let idle = session.as_secs().div_ceil(2).clamp(1, 7200).to_string();
        let interval = session.as_secs().div_ceil(6).clamp(1, 600).to_string();
        let look = (session / 10).as_millis().clamp(50, 1000).to_string();
        let length = session.as_millis().to_string();
        let arguments: [&(dyn ToSql + Sync); 5] = [&length, &idle, &interval, &look, &label];
        let arguments = arguments.map(|argument| (argument, Type::TEXT));
        self.run(self.wire.client().query_typed(sql::SESSION, &arguments)).await?;
        self.session
            .store(u64::try_from(session.as_millis()).unwrap_or(u64::MAX), Ordering::SeqCst);
        label.clone_into(&mut self.state().label);
        Ok(())
    }

    /// Sets how long the server waits for a lock; zero is for ever. Only for whoever waits here.
    pub(crate) async fn limit_wait(&self, limit: Duration) -> Result<()> {
        if self.state().lock_timeout == limit {
            return Ok(());
        }
        let set = format!("SET lock_timeout = {}", limit.as_millis());
        self.run(self.wire.client().batch_execute(&set)).await?;
        self.state().lock_timeout = limit;
        Ok(())
    }

    // Talking.

    /// A sign of life, which makes the session last anew.
    pub(crate) async fn ping(&self) -> Result<()> {
        self.run(self.wire.client().batch_execute("")).await
    }

    /// Asks something that is answered at once. In a task of its own: a long answer that nobody reads
    /// holds up whatever else is asked on this connection.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        text: &'static str,
        arguments: Vec<(Argument, Type)>,
    ) -> Result<Vec<Row>> {
        let link = self.clone();
        // For as long as the task runs, even if the caller is dropped: a wait that is sent before the question would
        // hold its answer up.
        self.state().visitors += 1;
        let visit = Visit(self.clone());
        let asked = tokio::spawn(async move {
            let _visit = visit;
            let arguments = arguments.iter().map(|(value, kind)| (&**value as _, kind.clone()));
            let arguments: Vec<(&(dyn ToSql + Sync), Type)> = arguments.collect();
            link.run(link.wire.client().query_typed(text, &arguments)).await
        });
        asked.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Awaits what is answered at once. If that takes longer than a session can be silent, nobody who
    /// sits here can rely on it any more, and the connection is ended.
    async fn run<T>(
        &self,
        command: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T> {
        // A new one has no session yet that anybody could rely on: whoever opens it has a limit of his own.
        let session = self.session();
        let patience = if session.is_zero() { FIRST_ANSWERS } else { session };
        let sent = self.sending()?;
        // In a box, as whatever is done seldom: see `prepared`.
        let Ok(answer) = timeout(patience, Box::pin(command)).await else {
            self.kill();
            return Err(unavailable(format!("no answer from the server within {patience:.1?}")));
        };
        self.heard(sent, &answer);
        answer.map_err(translate)
    }

    /// Takes note that something is about to be sent, and of when.
    fn sending(&self) -> Result<Instant> {
        if self.is_closed() {
            return Err(gone());
        }
        let sent = Instant::now();
        self.state().unanswered.get_or_insert(sent);
        Ok(sent)
    }

    /// Takes note of the answer to what was sent then.
    fn heard<T>(&self, sent: Instant, answer: &Result<T, tokio_postgres::Error>) {
        if self.survives(answer) {
            self.answered(sent);
        }
    }

    /// Whether there is a session after this answer. Most errors are a sign of life.
    fn survives<T>(&self, answer: &Result<T, tokio_postgres::Error>) -> bool {
        let Err(error) = answer else { return true };
        if error.code() == Some(&SqlState::QUERY_CANCELED) {
            self.cancels.fetch_add(1, Ordering::Relaxed);
        }
        let fatal = [Some(Severity::Fatal), Some(Severity::Panic)];
        let lives =
            error.as_db_error().is_some_and(|error| !fatal.contains(&error.parsed_severity()));
        if !lives {
            // Every statement here is well typed: an error that the server did not send means that the stream is
            // closed, or that bytes were lost and its answers belong to other questions.
            self.kill();
        }
        lives
    }

    /// Takes note that the session was alive at some moment after this one.
    fn answered(&self, sent: Instant) {
        let mut state = self.state();
        state.alive = state.alive.max(sent);
        state.unanswered = None;
    }

    /// A statement that the server knows from now on.
    pub(crate) async fn prepare<'a>(
        &self,
        known: &'a OnceLock<tokio_postgres::Statement>,
        text: &str,
        types: &[Type],
    ) -> Result<&'a tokio_postgres::Statement> {
        if let Some(prepared) = known.get() {
            return Ok(prepared);
        }
        let mut tries = 1;
        loop {
            match self.run(self.wire.client().prepare_typed(text, types)).await {
                // If another was faster, its will do.
                Ok(prepared) => return Ok(known.get_or_init(|| prepared)),
                // By a cancel that was meant for the wait before it.
                Err(error) if is_cancelled(&error) && tries < PREPARE_TRIES => tries += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// A statement about a key, as the server knows it. What it takes to tell the server is in a box: it happens
    /// once, and would make every question on its way larger by some thousand bytes, which are moved more than once.
    async fn prepared(&self, statement: Statement) -> Result<&tokio_postgres::Statement> {
        let known = &self.statements[statement.index()];
        match known.get() {
            Some(prepared) => Ok(prepared),
            None => Box::pin(self.prepare(known, &statement.text(), statement.types())).await,
        }
    }

    /// Asks what is answered at once with a row or none, and awaits that for as long as it takes: it is the engine
    /// who gives up. (A timer would be a tenth of what it costs.) The inner error is one that the server gave.
    pub(crate) async fn query(
        &self,
        prepared: &tokio_postgres::Statement,
        arguments: &[&(dyn ToSql + Sync)],
    ) -> Result<Result<Option<Row>, tokio_postgres::Error>> {
        let sent = self.sending()?;
        // Not as an argument of another function, which would keep it twice: as that, and as what it awaits.
        let answer = self.wire.client().query_opt(prepared, arguments).await;
        self.heard(sent, &answer);
        match answer {
            Err(error) if self.is_closed() => Err(translate(error)),
            answer => Ok(answer),
        }
    }

    /// Does something to a key.
    pub(crate) async fn act(
        &self,
        statement: Statement,
        key: Key,
    ) -> Result<Result<Option<Row>, tokio_postgres::Error>> {
        let prepared = self.prepared(statement).await?;
        self.query(prepared, Arguments::of(&key).get()).await
    }

    /// As [`act`](Self::act), for what the server may answer in hours. Says when it was sent.
    pub(crate) async fn wait(
        &self,
        statement: Statement,
        key: Key,
    ) -> Result<(Instant, Result<Option<Row>, tokio_postgres::Error>)> {
        let prepared = self.prepared(statement).await?;
        let sent = Instant::now();
        let arguments = Arguments::of(&key);
        let answer = self.wire.client().query_opt(prepared, arguments.get()).await;
        self.survives(&answer);
        match answer {
            Err(error) if self.is_closed() => Err(translate(error)),
            answer => Ok((sent, answer)),
        }
    }

    /// Takes note of how long a wait took: the session has been idle since its end, at the earliest.
    pub(crate) fn waited(&self, sent: Instant, waited: Duration) -> Instant {
        // The server's clock may be a little faster than ours, all the while. The server states the duration,
        // so the sum may be past the end of our clock.
        let (now, ended) = (Instant::now(), sent.checked_add(waited.mul_f64(0.99)));
        let since = ended.map_or(now, |ended| ended.min(now));
        self.answered(since);
        since
    }
}

pub(crate) fn gone() -> Error {
    unavailable("the connection to the server is gone")
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Link");
        debug.field("pid", &self.pid).field("session", &self.session());
        debug.field("seats", &self.state().seats.len()).finish_non_exhaustive()
    }
}
