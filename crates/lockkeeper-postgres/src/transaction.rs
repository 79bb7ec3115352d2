//! Locks that end with a transaction of the caller.

use std::time::Duration;

use lockkeeper_core::Result;
use tokio_postgres::Transaction;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use crate::error::translate;
use crate::names::{AdvisoryKey, Form};
use crate::sessions::Arguments;

const READ: &str = include_str!("transaction/read_timeouts.sql");
const SET: &str = include_str!("transaction/set_timeouts.sql");
const LOCK: &str = include_str!("transaction/lock.sql");
const SAVEPOINT: &str = "SAVEPOINT lockkeeper";
const KEEP: &str = "RELEASE SAVEPOINT lockkeeper";
const UNDO: &str = "ROLLBACK TO SAVEPOINT lockkeeper; RELEASE SAVEPOINT lockkeeper";

/// A lock that belongs to a transaction of the caller. It ends with the transaction: at commit, at rollback, or when the
/// connection closes. There is no unlock.
///
/// It excludes mutexes and readers-writer locks of the store with the same name, and is excluded by them. It needs no guard,
/// no renewal and no fence: if the lock is lost, the transaction is rolled back.
///
/// `lock_timeout` and `statement_timeout` of the transaction do not apply to the wait, and are restored afterwards. A wait
/// that ends without the lock leaves the transaction usable, with all its changes.
///
/// It does not check whether the caller is connected to a pooler or a standby. A pooler in transaction mode is safe here; a
/// standby is not.
///
/// # Cancel safety
///
/// If the future of a wait is dropped, the server continues the wait. Drop the connection, too.
///
/// # Examples
///
/// ```
/// use lockkeeper_postgres::TransactionLock;
///
/// async fn book(client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
///     let transaction = client.transaction().await?;
///     TransactionLock::new("orders/42").lock(&transaction).await?;
///     transaction.execute("UPDATE orders SET booked = true WHERE id = 42", &[]).await?;
///     transaction.commit().await?; // and the lock is free
///     Ok(())
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransactionLock {
    key: AdvisoryKey,
    shared: bool,
}

impl TransactionLock {
    /// Creates the exclusive lock of a name.
    pub fn new(name: &str) -> Self {
        Self::from_key(AdvisoryKey::of(name))
    }

    /// Creates the exclusive lock of a key.
    pub fn from_key(key: AdvisoryKey) -> Self {
        Self { key, shared: false }
    }

    /// Returns the shared lock of the same key, which several readers can hold.
    #[must_use]
    pub fn shared(self) -> Self {
        Self { shared: true, ..self }
    }

    /// Returns the key.
    pub fn key(self) -> AdvisoryKey {
        self.key
    }

    /// Returns the SQL that waits for the lock, for drivers other than `tokio-postgres`. Execute it in a transaction.
    ///
    /// The only argument, `$1`, is [`AdvisoryKey::as_i64`] of the [`key`](Self::key); for a key of two numbers, `$1` and `$2`
    /// are those of [`AdvisoryKey::as_pair`]. The result is `void`.
    ///
    /// The wait is limited by `lock_timeout` and `statement_timeout` of the transaction. If one of them ends it, the
    /// transaction is aborted; to continue with the transaction, roll back to a savepoint.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockkeeper_postgres::TransactionLock;
    ///
    /// let lock = TransactionLock::new("orders/42");
    /// assert_eq!(lock.lock_sql(), "SELECT pg_advisory_xact_lock($1::bigint)");
    /// assert_eq!(lock.try_lock_sql(), "SELECT pg_try_advisory_xact_lock($1::bigint)");
    /// assert_eq!(lock.shared().lock_sql(), "SELECT pg_advisory_xact_lock_shared($1::bigint)");
    /// // sqlx::query(&lock.lock_sql()).bind(lock.key().as_i64()).execute(&mut *transaction).await?;
    /// ```
    ///
    /// `examples/postgres-drivers` has programs for sqlx, diesel and the synchronous `postgres`.
    pub fn lock_sql(self) -> String {
        self.text("")
    }

    /// Returns the SQL that tries to lock without waiting, as [`lock_sql`](Self::lock_sql) does. The result is a `boolean`:
    /// whether the lock was granted.
    pub fn try_lock_sql(self) -> String {
        self.text("try_")
    }

    /// Waits for the lock without limit.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](lockkeeper_core::ErrorKind::Unavailable) if the server fails, or detects a
    /// deadlock. The transaction stays usable, unless its connection is closed.
    pub async fn lock(&self, transaction: &Transaction<'_>) -> Result<()> {
        self.wait_for(transaction, None).await.map(drop)
    }

    /// Tries to lock without waiting. Returns `false` if another client holds the lock.
    ///
    /// # Errors
    ///
    /// Those of [`lock`](Self::lock), except deadlocks.
    pub async fn try_lock(&self, transaction: &Transaction<'_>) -> Result<bool> {
        let text = self.text("try_");
        let row = transaction
            .query_one(&text, Arguments::of(&self.key).get())
            .await
            .map_err(translate)?;
        Ok(row.get(0))
    }

    /// Waits for the lock for at most `wait`. Returns `false` if it was not granted in that time. Zero tries once.
    ///
    /// # Errors
    ///
    /// Those of [`lock`](Self::lock).
    pub async fn try_lock_for(
        &self,
        transaction: &Transaction<'_>,
        wait: Duration,
    ) -> Result<bool> {
        if wait.is_zero() {
            return self.try_lock(transaction).await;
        }
        self.wait_for(transaction, Some(wait)).await
    }

    async fn wait_for(
        &self,
        transaction: &Transaction<'_>,
        wait: Option<Duration>,
    ) -> Result<bool> {
        let before = transaction.query_one(READ, &[]).await.map_err(translate)?;
        let (lock, statement): (String, String) = (before.get(0), before.get(1));
        transaction.batch_execute(SAVEPOINT).await.map_err(translate)?;
        match self.wait(transaction, wait, [&lock, &statement]).await {
            Ok(()) => {
                transaction.batch_execute(KEEP).await.map_err(translate)?;
                Ok(true)
            }
            Err(error) => {
                // This also restores the timeouts, and releases the lock if it was granted.
                transaction.batch_execute(UNDO).await.map_err(translate)?;
                if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) {
                    return Ok(false);
                }
                Err(translate(error))
            }
        }
    }

    async fn wait(
        &self,
        transaction: &Transaction<'_>,
        wait: Option<Duration>,
        before: [&String; 2],
    ) -> Result<(), tokio_postgres::Error> {
        // Zero would mean no limit, so the shortest wait is one millisecond.
        let millis = |wait: Duration| wait.as_millis().clamp(1, i32::MAX as u128);
        let limit = wait.map_or(0, millis).to_string();
        set(transaction, [&limit, &"0".to_owned()]).await?;
        transaction.query_one(&self.text(""), Arguments::of(&self.key).get()).await?;
        set(transaction, before).await
    }

    fn text(&self, try_: &str) -> String {
        let key = match self.key.0 {
            Form::One(_) => "$1::bigint",
            Form::Two(..) => "$1::int, $2::int",
        };
        let shared = if self.shared { "_shared" } else { "" };
        let template = LOCK.lines().filter(|line| !line.starts_with("--")).collect::<String>();
        template.replace("{try_}", try_).replace("{key}", key).replace("{shared}", shared)
    }
}

async fn set(
    transaction: &Transaction<'_>,
    [lock, statement]: [&String; 2],
) -> Result<(), tokio_postgres::Error> {
    let arguments = [(lock as _, Type::TEXT), (statement as _, Type::TEXT)];
    transaction.query_typed(SET, &arguments).await.map(drop)
}
