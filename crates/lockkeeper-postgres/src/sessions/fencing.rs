//! Where fences come from, and the preparation of sessions that draw them.
//!
//! All clients of a database have to draw from the same source. `docs/design/postgres.md` states why a fence is never
//! repeated, although the server returns most of them before they are on disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use lockkeeper_core::{Fence, Result};
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::connection::{Connection, SessionFences, connection_closed};
use super::statements::{FIND_SEQUENCE, FLUSH_SEQUENCE, LOCK_TRANSACTION_IDS, OPEN_SEQUENCE};
use crate::config::{FenceSource, ObjectName};
use crate::error::{code, config, unavailable};
use crate::names::RESERVED_CLASS;

/// The bits of a fence below the server's timeline.
const VALUE_BITS: u32 = 48;
const MAX_VALUE: u64 = (1 << VALUE_BITS) - 1;
/// How far a fence that a client returns may be above the last one that is known to be on disk. A crash loses no more.
const MAX_UNFLUSHED: u64 = 8192;
/// The keys of locks that no claim locks, with [`RESERVED_CLASS`]. A third one is the sequence's id, which is higher.
const CREATION_KEY: i32 = 0;
const TRANSACTION_IDS_KEY: i32 = 1;

/// Where the fences of a store come from, and the highest one that it was granted.
#[derive(Debug)]
pub(crate) struct Fencing {
    pub(crate) source: FenceSource,
    sequence: ObjectName,
    highest: AtomicU64,
    /// The highest fence of the sequence that is known to be on disk.
    flushed: AtomicU64,
    /// Whether a background task flushes the sequence.
    is_flushing: AtomicBool,
    /// Distinguishes it from those of other stores that use the same connections.
    id: u64,
}

impl Fencing {
    pub(crate) fn new(source: FenceSource, sequence: ObjectName) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let id = COUNT.fetch_add(1, Ordering::Relaxed);
        let (highest, flushed) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { source, sequence, highest, flushed, is_flushing: AtomicBool::new(false), id }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.source != FenceSource::Off
    }

    /// Returns the highest fence that the store was granted, or zero. A fence that is drawn from now on is higher.
    pub(crate) fn highest(&self) -> u64 {
        self.highest.load(Ordering::Relaxed)
    }

    /// Returns the fence with this value, which was drawn after [`highest`](Self::highest) had returned `before`.
    ///
    /// # Errors
    ///
    /// `Config` if it is not higher: the source was reset. The fence of a shared lock may be equal.
    pub(crate) fn accept(
        &self,
        connection: &Connection,
        value: i64,
        (before, shared): (u64, bool),
    ) -> Result<Fence> {
        let fence = number(connection, value);
        if fence > before || shared && fence == before {
            self.highest.fetch_max(fence, Ordering::Relaxed);
            return Fence::new(fence).ok_or_else(|| unavailable("the server sent no fence"));
        }
        let cause = match self.source {
            FenceSource::Sequence if before >> VALUE_BITS == fence >> VALUE_BITS => format!(
                "the sequence {0} was reset: run SELECT setval('{0}', {1}), or",
                self.sequence,
                before & MAX_VALUE
            ),
            _ => "the server was replaced or restored from a backup:".to_owned(),
        };
        Err(config(format!(
            "the server drew the fence {fence}, and this client was granted {before} before: {cause} reset the fences \
             that resources have stored and open the store again"
        )))
    }

    /// Limits how many fences a crash of the server can lose: flushes the sequence if this fence is too far above the last one
    /// that is on disk. Before that, it flushes in the background, so that few claims wait for a flush.
    pub(crate) async fn limit_unflushed(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        fence: Fence,
    ) -> Result<()> {
        let unflushed = fence.get().saturating_sub(self.flushed.load(Ordering::Relaxed));
        if self.source != FenceSource::Sequence || unflushed <= MAX_UNFLUSHED / 2 {
            return Ok(());
        }
        if unflushed > MAX_UNFLUSHED {
            // Boxed because it is rare and would enlarge the future of every claim.
            return Box::pin(self.flush(connection)).await;
        }
        if !self.is_flushing.swap(true, Ordering::Relaxed) {
            let (fencing, connection) = (self.clone(), connection.clone());
            tokio::spawn(async move {
                if let Err(error) = fencing.flush(&connection).await {
                    tracing::debug!(%error, "could not flush the sequence of fences");
                }
            });
        }
        Ok(())
    }

    /// Flushes the fences that have been drawn to disk.
    async fn flush(&self, connection: &Connection) -> Result<()> {
        let sequence = connection.sequence();
        let answer = connection.query_typed(FLUSH_SEQUENCE, &[(&sequence, Type::OID)]).await;
        self.is_flushing.store(false, Ordering::Relaxed);
        connection.check_sequence(answer.as_ref().err().and_then(code));
        let last: Option<i64> = only_row(answer?)?.get("fence");
        self.record_flushed(connection, last);
        Ok(())
    }

    fn record_flushed(&self, connection: &Connection, value: Option<i64>) {
        let fence = number(connection, value.unwrap_or_default());
        self.flushed.fetch_max(fence, Ordering::Relaxed);
    }

    /// Returns whether a session can draw fences, or need not.
    pub(crate) fn is_prepared(&self, connection: &Connection) -> bool {
        !self.is_on() || connection.fences().is_some_and(|fences| fences.fencing == self.id)
    }

    /// Calls [`prepare_here`](Self::prepare_here) in a background task, because other claims wait for it.
    pub(super) async fn prepare(self: &Arc<Self>, connection: &Arc<Connection>) -> Result<()> {
        let (fencing, connection) = (self.clone(), connection.clone());
        let task = tokio::spawn(async move { fencing.prepare_here(&connection).await });
        task.await.unwrap_or_else(|_| Err(connection_closed()))
    }

    /// Prepares a session to draw fences.
    pub(super) async fn prepare_here(&self, connection: &Connection) -> Result<()> {
        let _reconfiguring = connection.reconfiguring.lock().await;
        if self.is_prepared(connection) {
            return Ok(());
        }
        let sequence = match self.source {
            FenceSource::Off => return Ok(()),
            FenceSource::Sequence => self.open_sequence(connection).await?,
            FenceSource::TransactionIds => {
                self.check(connection).await?;
                let keys = [RESERVED_CLASS, TRANSACTION_IDS_KEY];
                let keys = [0, 1].map(|place| (&keys[place] as _, Type::INT4));
                connection.query_typed(LOCK_TRANSACTION_IDS, &keys).await?;
                // Another client may have created a sequence meanwhile. After that, it looks for this lock.
                self.check(connection).await.inspect_err(|_| connection.close())?;
                0
            }
        };
        connection.set_fences(Some(SessionFences { fencing: self.id, sequence }));
        Ok(())
    }

    /// Returns the id of the sequence, or `None` if this role can create it.
    fn judge(&self, row: &Row) -> Result<Option<u32>> {
        let (id, other): (Option<u32>, Option<String>) = (row.get("oid"), row.get("other"));
        let (sequence, role): (_, &str) = (&self.sequence, row.get("role"));
        if let Some(other) = other {
            return Err(config(format!(
                "another sequence, {other}, has fences of this database, and all clients must use the same one: set \
                 fence_sequence={other}, or drop it if no client uses it"
            )));
        }
        let is_on = |column| row.get::<_, Option<bool>>(column).unwrap_or_default();
        let schema = if is_on("schema_exists") {
            ""
        } else {
            &format!("CREATE SCHEMA \"{}\"; ", sequence.schema)
        };
        let sql = format!("{schema}{}", self.creation(row));
        match id {
            None if is_on("may_create") => Ok(None),
            None => Err(config(format!(
                "the role {role} may not create the sequence that fences are drawn from: let an administrator run {sql}; \
                 or name another with fence_sequence="
            ))),
            Some(_) if !is_on("is_valid") => Err(config(format!(
                "the sequence {sequence} has other options than one for fences: name another with fence_sequence=; \
                 or, if nothing else uses it, run DROP SEQUENCE {sequence}; {sql}"
            ))),
            Some(_) if !is_on("may_draw") => Err(config(format!(
                "the role {role} may not draw fences: let an administrator run GRANT USAGE ON SEQUENCE {sequence} TO \
                 \"{}\"",
                role.replace('"', "\"\"")
            ))),
            Some(id) => Ok(Some(id)),
        }
    }

    /// Returns the SQL that creates the sequence. It starts above the transaction ids, and above the fences of an earlier
    /// sequence of that name.
    fn creation(&self, row: &Row) -> String {
        let (sequence, start): (_, i64) = (&self.sequence, row.get("start"));
        format!(
            "CREATE SEQUENCE IF NOT EXISTS {sequence} MINVALUE {start} MAXVALUE {MAX_VALUE}; \
             GRANT USAGE ON SEQUENCE {sequence} TO PUBLIC"
        )
    }

    /// Checks whether a session can draw fences, without creating the sequence.
    ///
    /// # Errors
    ///
    /// `Config` with the SQL for an administrator if it cannot.
    pub(crate) async fn check(&self, connection: &Connection) -> Result<()> {
        match self.source {
            FenceSource::Off => Ok(()),
            FenceSource::TransactionIds => {
                self.check_transaction_ids(&self.find(connection).await?)
            }
            FenceSource::Sequence => self.judge(&self.find(connection).await?).map(drop),
        }
    }

    /// Refuses transaction ids if the database has a sequence, whose fences are higher.
    fn check_transaction_ids(&self, row: &Row) -> Result<()> {
        let is_own = row.get::<_, Option<bool>>("is_valid").unwrap_or_default();
        let own = is_own.then(|| format!("{}.{}", self.sequence.schema, self.sequence.name));
        let Some(found) = row.get::<_, Option<String>>("other").or(own) else { return Ok(()) };
        Err(config(format!(
            "fences of this database come from the sequence {found}, and those of fence=xid would be lower: remove \
             fence=xid, or drop the sequence if no client uses it"
        )))
    }

    async fn find(&self, connection: &Connection) -> Result<Row> {
        let (schema, name) = (&self.sequence.schema, &self.sequence.name);
        let max = MAX_VALUE.cast_signed();
        let arguments: [(&(dyn ToSql + Sync), Type); 3] =
            [(schema, Type::TEXT), (name, Type::TEXT), (&max, Type::INT8)];
        only_row(connection.query_typed(FIND_SEQUENCE, &arguments).await?)
    }

    /// Prepares a session to draw fences from the sequence, which is created if it does not exist. Returns its id.
    async fn open_sequence(&self, connection: &Connection) -> Result<u32> {
        let before = self.highest();
        let row = self.find(connection).await?;
        let id = match self.judge(&row)? {
            Some(id) => id,
            None => self.create_sequence(connection, &row).await?,
        };
        let keys = [RESERVED_CLASS, CREATION_KEY, TRANSACTION_IDS_KEY];
        let advance = MAX_UNFLUSHED.cast_signed() + 1;
        let mut arguments: Vec<(&(dyn ToSql + Sync), Type)> = vec![(&id, Type::OID)];
        arguments.extend(keys.iter().map(|key| (key as _, Type::INT4)));
        arguments.push((&advance, Type::INT8));
        let opened = connection.query_typed(OPEN_SEQUENCE, &arguments).await;
        // It may hold the exclusive lock, without which other clients cannot prepare their sessions.
        let row = only_row(opened.inspect_err(|_| connection.close())?)?;
        if !row.get::<_, bool>("no_transaction_ids") {
            return Err(config(
                "a client with fence=xid is connected, and would draw lower fences than a sequence: open the stores of \
                 all clients with the same fence=",
            ));
        }
        let last: Option<i64> = row.get("fence");
        self.accept(connection, last.unwrap_or_default(), (before, true))?;
        self.record_flushed(connection, last);
        // `limit_unflushed` flushes when it is necessary.
        connection.batch_execute("SET synchronous_commit = off").await?;
        Ok(id)
    }

    async fn create_sequence(&self, connection: &Connection, row: &Row) -> Result<u32> {
        // One transaction, in which concurrent clients create it one after the other. It does not wait for a standby.
        let (creation, class) = (self.creation(row), RESERVED_CLASS);
        let sql = format!(
            "SET LOCAL synchronous_commit = local; SELECT pg_advisory_xact_lock({class}, {CREATION_KEY}); {creation}"
        );
        let created = connection.batch_execute(&sql).await;
        if let Some(id) = self.judge(&self.find(connection).await?)? {
            return Ok(id);
        }
        created?;
        Err(config(format!(
            "the sequence {} cannot be created: something else has this name: name another with fence_sequence=",
            self.sequence
        )))
    }
}

/// Returns the fence with this value as a number.
fn number(connection: &Connection, value: i64) -> u64 {
    (connection.timeline & 0x7fff) << VALUE_BITS | value.cast_unsigned() & MAX_VALUE
}

fn only_row(rows: Vec<Row>) -> Result<Row> {
    rows.into_iter().next().ok_or_else(|| unavailable("the server sent no answer"))
}
