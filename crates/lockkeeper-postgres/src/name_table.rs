//! The table of names: tells other processes the names, labels, ages and fences of the locks that this process holds or
//! waits for. The server knows only a hash of each name.
//!
//! `pg_locks` is the truth about who holds and who waits. The table only describes these locks. So it may be late, incomplete
//! or missing, and no lock depends on it:
//!
//! - A lock that is released within [`MIN_AGE`] is never written. A longer one costs a row in a statement that it shares with
//!   all others of the process.
//! - A statement is limited to some milliseconds, because the locks of its session have to wait for it. After a failure the
//!   table is not used for [`PAUSE`].
//! - The table of another role is not used, because its triggers would run with the rights of this role. Each message checks
//!   that again, in the transaction that uses the table.
//! - A row names its session. Inspection ignores rows whose lock or session no longer exists, for example after a crash of
//!   the client. Rows of ended sessions are removed by the next writer of any process.
//!
//! The store has no timer for it. The engine calls [`Claim::changed`](lockkeeper_core::Claim::changed) of a hold that has
//! lasted for 10 ms, and the linger of a [`Coalescer`] collects the claims of the next [`MIN_AGE`].

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::coalescer::{Batch, BatchSender, Coalescer, Limits};
use lockkeeper_core::{Error, ErrorKind, Result};
use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use crate::config::ObjectName;
use crate::error::{code, unavailable};
use crate::local_claims::{Changes, Description, LocalClaims, RowId};
use crate::sessions::{Argument, QueryPermit, SessionPool};

const CREATE: &str = include_str!("name_table/create.sql");
const LIMITS: &str = include_str!("name_table/limits.sql");
const OWNER: &str = include_str!("name_table/owner.sql");
const LOCK: &str = include_str!("name_table/lock.sql");
const REMOVE: &str = include_str!("name_table/remove.sql");
const INSERT: &str = include_str!("name_table/insert.sql");
const PURGE: &str = include_str!("name_table/purge.sql");
const CHECK: &str = include_str!("name_table/check.sql");

/// How long a lock is held or waited for before it is written.
pub(crate) const MIN_AGE: Duration = Duration::from_millis(40);
/// The pause after a failure.
const PAUSE: Duration = Duration::from_secs(10);
/// The limits of a write: for each lock on the table, and for each statement.
const LOCK_TIMEOUT: Duration = Duration::from_millis(20);
const TIMEOUT: Duration = Duration::from_millis(200);
/// The same for the creation of the table.
const CREATE_LOCK_TIMEOUT: Duration = Duration::from_millis(200);
const CREATE_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a query of inspection waits for a lock on the table. Its session may hold locks.
const READ_LOCK_TIMEOUT: Duration = Duration::from_millis(100);
/// The limit of the query.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the creation of the table is retried after a conflict with a concurrent one.
const MAX_CREATIONS: usize = 3;
/// The maximum number of rows per statement.
const MAX_ROWS: usize = 128;
/// The interval at which a writing process removes the rows of ended sessions.
const PURGE_INTERVAL: Duration = Duration::from_secs(30);

/// What works without the table.
pub(crate) const WITHOUT: &str = "without a prefix, locks of other processes are listed by key";

/// The table of names.
#[derive(Debug, Clone)]
pub(crate) struct NameTable {
    table: ObjectName,
    /// Writes of this process, one at a time.
    writes: Coalescer<Writer>,
    local_claims: Arc<LocalClaims>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Whether a write is scheduled.
    scheduled: AtomicBool,
    times: Mutex<Times>,
}

#[derive(Debug, Default)]
struct Times {
    paused_until: Option<Instant>,
    purged: Option<Instant>,
    has_warned: bool,
    /// Whether this process has written rows.
    has_written: bool,
}

impl State {
    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the table and this role's rights on it allow, from `check.sql`.
#[derive(Debug)]
pub(crate) struct Rights {
    pub(crate) exists: bool,
    pub(crate) usable: bool,
    pub(crate) creatable: bool,
    role: String,
    /// The owner of the relation with this name, if this role does not trust it.
    distrusted: Option<String>,
    /// The kind of relation, as `DROP` names it.
    kind: String,
}

impl Rights {
    /// Describes what is in the place of the table, if this role must not use it.
    pub(crate) fn distrust(&self) -> Option<String> {
        let (kind, owner, role) = (self.kind.to_lowercase(), self.distrusted.as_ref()?, &self.role);
        Some(format!(
            "it is a {kind} that belongs to the role {owner:?}, and to use it could run code of that role as {role:?}"
        ))
    }
}

impl NameTable {
    pub(crate) fn new(
        table: ObjectName,
        sessions: Arc<SessionPool>,
        local_claims: Arc<LocalClaims>,
    ) -> Self {
        let state = Arc::<State>::default();
        let writer = Writer {
            table: table.clone(),
            sessions,
            local_claims: local_claims.clone(),
            state: state.clone(),
        };
        let limits =
            Limits { max_direct: 0, max_in_flight: 1, max_batch: usize::MAX, linger: MIN_AGE };
        Self { table, writes: Coalescer::new(writer, limits), local_claims, state }
    }

    /// Schedules a write, unless one is scheduled. Does nothing outside of a runtime, and while the table is not used after a
    /// failure.
    pub(crate) fn schedule(&self) {
        if self.state.scheduled.load(Ordering::Relaxed) {
            return;
        }
        let paused_until = self.state.times().paused_until;
        let Ok(runtime) = Handle::try_current() else { return };
        if paused_until.is_some_and(|until| Instant::now() < until) {
            self.local_claims.collapse_changes();
            return;
        }
        if self.state.scheduled.swap(true, Ordering::SeqCst) {
            return;
        }
        let scheduled = Scheduled(self.state.clone());
        let (names, writes) = (self.clone(), self.writes.clone());
        runtime.spawn(async move {
            let last = loop {
                match writes.send(()).await {
                    Ok(Left::Some) => {}
                    last => break last,
                }
            };
            drop(scheduled);
            // A claim that was recorded just before that did not schedule a write.
            if last.is_ok() && names.local_claims.have_changes() {
                names.schedule();
            }
        });
    }

    /// Sends a query that reads the table, `{table}` in `text`, in the transaction that checks the table. The message of that
    /// can return no rows, so a cursor keeps them. Does not create the table: if this role owned it, other roles, which may
    /// be those with the locks, could not write it.
    pub(crate) async fn query(&self, permit: &QueryPermit, text: &str) -> Result<Vec<Row>> {
        static READS: AtomicU64 = AtomicU64::new(0);
        let cursor = format!("lockkeeper_names_{}", READS.fetch_add(1, Ordering::Relaxed));
        let declare = format!(
            "{}{}DECLARE {cursor} NO SCROLL CURSOR WITH HOLD FOR {}",
            limits(READ_LOCK_TIMEOUT, READ_TIMEOUT),
            lock(&self.table),
            fill(text, &self.table)
        );
        let permit = permit.clone();
        // The task closes the cursor even if the caller is dropped.
        let task = tokio::spawn(async move {
            permit.execute(declare).await.map_err(explain_distrust)?;
            let rows = permit.query_within(READ_LOCK_TIMEOUT, format!("FETCH ALL FROM {cursor}"));
            let rows = rows.await?;
            permit.execute(format!("CLOSE {cursor}")).await?;
            Ok(rows)
        });
        task.await.unwrap_or_else(|_| Err(unavailable("the runtime is shutting down")))
    }

    /// Returns an error that describes why the table cannot be read, and states the SQL for an administrator. Returns none if
    /// the table is only missing because it is created when the first name is written: no process has written one.
    pub(crate) async fn explain(&self, permit: &QueryPermit, error: &Error) -> Option<Error> {
        let rights = match self.rights(permit).await {
            Ok(rights) => rights,
            Err(error) => return Some(error),
        };
        let can_be_written = if rights.exists { rights.usable } else { rights.creatable };
        if is_missing(error) && can_be_written {
            return None;
        }
        let (kind, advice) = if rights.usable {
            (ErrorKind::Unavailable, "try again".to_owned())
        } else {
            (ErrorKind::Unsupported, self.advice(&rights))
        };
        let reason = rights.distrust().unwrap_or_else(|| error.to_string());
        let what = format!("the names of locks are in the table {}", self.table);
        Some(Error::new(
            kind,
            format!("{what}, which cannot be read: {reason}: {advice}; {WITHOUT}"),
        ))
    }

    /// Returns what this role may do with the table.
    pub(crate) async fn rights(&self, permit: &QueryPermit) -> Result<Rights> {
        let table: Argument = Box::new(self.table.to_string());
        let schema: Argument = Box::new(self.table.schema.clone());
        let arguments = vec![(table, Type::TEXT), (schema, Type::TEXT)];
        let rows = permit.query(fill(CHECK, &self.table), arguments).await?;
        let row = rows.first().ok_or_else(|| unavailable("the server sent no answer"))?;
        Ok(Rights {
            exists: row.get("exists"),
            usable: row.get("usable"),
            creatable: row.get("creatable"),
            role: row.get("role"),
            distrusted: row.get("distrusted"),
            kind: row.get("kind"),
        })
    }

    /// Returns the name of the table.
    pub(crate) fn name(&self) -> &ObjectName {
        &self.table
    }

    /// Returns what to do if the table cannot be used: the SQL for an administrator.
    pub(crate) fn advice(&self, rights: &Rights) -> String {
        let (table, role) = (&self.table, rights.role.replace('"', "\"\""));
        let grant = format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO \"{role}\"");
        let mut create = String::new();
        if rights.distrusted.is_some() {
            create = format!("DROP {} {table}; ", rights.kind);
        }
        if rights.distrusted.is_some() || !rights.exists {
            create = create + &one_line(&fill(CREATE, &self.table)) + "; ";
        }
        format!(
            "run as a superuser or as the owner of the database: {create}{grant}; or set names_table=schema.table to another table, or \
             names_table=off"
        )
    }
}

/// The mark that a write is scheduled, until it is dropped.
struct Scheduled(Arc<State>);

impl Drop for Scheduled {
    fn drop(&mut self) {
        self.0.scheduled.store(false, Ordering::SeqCst);
    }
}

/// Whether rows are left to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Left {
    None,
    Some,
}

/// Writes the claims of this process to the table.
#[derive(Debug)]
struct Writer {
    table: ObjectName,
    sessions: Arc<SessionPool>,
    local_claims: Arc<LocalClaims>,
    state: Arc<State>,
}

impl BatchSender for Writer {
    type Item = ();
    type Answer = Left;

    async fn send(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<Left>>> {
        let Some(requests) = batch.close().map(<[()]>::len) else { return Ok(Vec::new()) };
        let written = self.write().await;
        if let Err(error) = &written {
            self.pause(error);
        }
        written.map(|left| vec![Ok(left); requests])
    }

    fn runtime(&self) -> Handle {
        Handle::current()
    }
}

impl Writer {
    /// Writes what has changed, with several statements if there are many rows.
    async fn write(&self) -> Result<Left> {
        loop {
            let changes = self.local_claims.take_changes(MIN_AGE, MAX_ROWS);
            if changes.added.is_empty() && changes.removed.is_empty() {
                return Ok(if changes.has_young { Left::Some } else { Left::None });
            }
            let local_claims = &self.local_claims;
            let mut unwritten = Unwritten { local_claims, changes, not_made: true };
            let Changes { added, removed, .. } = &unwritten.changes;
            let permit = self.sessions.any_query_permit().await?;
            let last_purge = self.state.times().purged;
            let purges = last_purge.is_none_or(|last| last.elapsed() >= PURGE_INTERVAL);
            let statements = self.statements(added, removed, purges);
            unwritten.not_made = false;
            let mut written = permit.execute(statements.clone()).await;
            for _ in 0..MAX_CREATIONS {
                if written.as_ref().err().is_some_and(is_missing) {
                    unwritten.not_made = true;
                    create(&self.table, &permit).await?;
                    unwritten.not_made = false;
                    if self.state.times().has_written {
                        // The table was dropped with rows of this process.
                        self.local_claims.write_all_again();
                    }
                    written = permit.execute(statements.clone()).await;
                }
            }
            unwritten.not_made = written.as_ref().err().is_some_and(|error| code(error).is_some());
            written.map_err(explain_distrust)?;
            unwritten.changes = Changes::default();
            let mut times = self.state.times();
            times.has_written = true;
            if purges {
                times.purged = Some(Instant::now());
            }
        }
    }

    fn statements(
        &self,
        added: &[(RowId, Description)],
        removed: &[RowId],
        purges: bool,
    ) -> String {
        let mut rows = String::new();
        let mut statements = limits(LOCK_TIMEOUT, TIMEOUT) + &lock(&self.table);
        if !removed.is_empty() {
            for id in removed {
                write_row(&mut rows, id, None);
            }
            statements += &fill(REMOVE, &self.table).replace("{rows}", &rows);
            rows.clear();
        }
        if !added.is_empty() {
            for (id, lock) in added {
                write_row(&mut rows, id, Some(lock));
            }
            statements += &fill(INSERT, &self.table).replace("{rows}", &rows);
        }
        if purges {
            statements += &fill(PURGE, &self.table);
        }
        statements
    }

    fn pause(&self, error: &Error) {
        let mut times = self.state.times();
        times.paused_until = Some(Instant::now() + PAUSE);
        let is_first = !std::mem::replace(&mut times.has_warned, true);
        drop(times);
        if is_first {
            tracing::info!(%error, table = %self.table, "cannot write the names of locks, so other processes cannot list them; `lockkeeper doctor` states what to do");
        } else {
            tracing::debug!(%error, table = %self.table, "cannot write the names of locks");
        }
    }
}

/// Changes that are being written. If the write fails, or is dropped with its runtime, they are written again.
struct Unwritten<'a> {
    local_claims: &'a LocalClaims,
    changes: Changes,
    /// Whether it is certain that they were not made.
    not_made: bool,
}

impl Drop for Unwritten<'_> {
    fn drop(&mut self) {
        self.local_claims.put_back(std::mem::take(&mut self.changes), self.not_made);
    }
}

/// Creates the table, once per database. If several clients create it at the same time, this may return before it exists: the
/// next statement shows that.
async fn create(table: &ObjectName, permit: &QueryPermit) -> Result<()> {
    let limits = limits(CREATE_LOCK_TIMEOUT, CREATE_TIMEOUT);
    let created = permit.execute(limits + &fill(CREATE, table)).await;
    let concurrent = [
        SqlState::UNIQUE_VIOLATION,
        SqlState::DUPLICATE_TABLE,
        SqlState::DUPLICATE_OBJECT,
        SqlState::LOCK_NOT_AVAILABLE,
    ];
    match created {
        Err(error) if !code(&error).is_some_and(|code| concurrent.contains(code)) => Err(error),
        _ => Ok(()),
    }
}

fn is_missing(error: &Error) -> bool {
    code(error) == Some(&SqlState::UNDEFINED_TABLE)
}

/// Adds the reason to the error of a failed check of the table's owner.
fn explain_distrust(error: Error) -> Error {
    if code(&error) == Some(&SqlState::DIVISION_BY_ZERO) {
        let message = "the table belongs to a role that could run code as this one";
        return Error::new(ErrorKind::Unsupported, message).with_source(error);
    }
    error
}

/// Returns the statements that check the table for those that follow.
fn lock(table: &ObjectName) -> String {
    fill(LOCK, table)
}

/// Returns the statements that limit those that follow.
fn limits(lock: Duration, statement: Duration) -> String {
    let limits = LIMITS.replace("{lock_timeout}", &lock.as_millis().to_string());
    limits.replace("{statement_timeout}", &statement.as_millis().to_string())
}

fn fill(text: &str, table: &ObjectName) -> String {
    text.replace("{owner}", OWNER).replace("{table}", &table.to_string())
}

fn one_line(statement: &str) -> String {
    let lines = statement.lines().filter(|line| !line.starts_with("--"));
    let words: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
    words.join(" ").replace("( ", "(").replace(" )", ")")
}

/// Appends a row of `VALUES`. Bytes are written as hexadecimal digits, and everything else is a number, so no value can end
/// its literal.
fn write_row(rows: &mut String, id: &RowId, lock: Option<&Description>) {
    let separator = if rows.is_empty() { "" } else { ", " };
    let RowId { pid, session_start, key } = id;
    let (classid, objid, objsubid) = key.in_pg_locks();
    let _ = write!(
        rows,
        "{separator}({pid}::int, '{session_start:?}'::float8, {classid}::oid, {objid}::oid, {objsubid}::smallint"
    );
    if let Some(lock) = lock {
        let age = lock.since.elapsed().as_secs_f64();
        let fence = lock.fence.map_or_else(|| "NULL".to_owned(), |fence| fence.get().to_string());
        let _ = write!(rows, ", {}, '{age:?}'::float8, ", lock.granted);
        for text in [lock.name.as_str(), lock.label.as_str()] {
            rows.push_str("'\\x");
            for byte in text.bytes() {
                let _ = write!(rows, "{byte:02x}");
            }
            rows.push_str("'::bytea, ");
        }
        let _ = write!(rows, "'{}'::uuid, {fence}::bigint", lock.owner);
    }
    rows.push(')');
}
