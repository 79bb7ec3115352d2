//! The bare drivers of `PostgreSQL`: `tokio-postgres`, and `sqlx` with its `PgAdvisoryLock`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use sqlx::Connection as _;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{
    PgAdvisoryLock, PgAdvisoryLockGuard, PgAdvisoryLockKey, PgConnection, PgPoolOptions,
};
use sqlx::{PgPool, Postgres};
use tokio_postgres::{Client, NoTls, Statement};

use crate::implementation::{
    Fut, Held, Implementation, Kind, Lock, LockFactory, Mode, Outcome, one_line,
};

/// The maximum number of connections of implementations with one per task or lock: the server has a process for each.
const MAX_CONNECTIONS: usize = 512;

/// Returns the advisory key of a name. Collisions do not matter here: names are used once.
fn key_of(name: &str) -> i64 {
    name.bytes().fold(7, |key: i64, byte| key.wrapping_mul(31).wrapping_add(i64::from(byte)))
}

/// A connection per task, opened on first use and kept.
struct ConnectionPerTask<C> {
    url: String,
    connections: Mutex<HashMap<usize, Arc<C>>>,
}

/// A connection that may be usable again.
trait Reusable {
    fn is_reusable(&self) -> bool;
}

impl<C: Reusable> ConnectionPerTask<C> {
    fn new(url: &str) -> Self {
        Self { url: url.to_owned(), connections: Mutex::default() }
    }

    async fn get<F: Future<Output = Outcome<C>>>(
        &self,
        task: usize,
        open: impl FnOnce(String) -> F,
    ) -> Outcome<Arc<C>> {
        let known =
            self.connections.lock().unwrap_or_else(PoisonError::into_inner).get(&task).cloned();
        if let Some(known) = known.filter(|known| known.is_reusable()) {
            return Ok(known);
        }
        let new = Arc::new(open(self.url.clone()).await?);
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.insert(task, new.clone());
        Ok(new)
    }
}

/// A connection and its prepared statements.
struct Prepared {
    client: Client,
    /// Set while a lock statement is in flight. If its future is dropped, the server still grants the lock, and no task releases it.
    waits: AtomicBool,
    lock: Statement,
    lock_shared: Statement,
    unlock: Statement,
    unlock_shared: Statement,
}

pub(crate) async fn connect(url: &str) -> Outcome<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.map_err(one_line)?;
    tokio::spawn(async move { drop(connection.await) });
    Ok(client)
}

async fn prepared(url: String) -> Outcome<Prepared> {
    let client = connect(&url).await?;
    let prepare = async |function: &str| {
        client.prepare(&format!("SELECT {function}($1::bigint)")).await.map_err(one_line)
    };
    Ok(Prepared {
        lock: prepare("pg_advisory_lock").await?,
        lock_shared: prepare("pg_advisory_lock_shared").await?,
        unlock: prepare("pg_advisory_unlock").await?,
        unlock_shared: prepare("pg_advisory_unlock_shared").await?,
        waits: AtomicBool::new(false),
        client,
    })
}

impl Reusable for Prepared {
    fn is_reusable(&self) -> bool {
        !self.waits.load(Ordering::Relaxed)
    }
}

pub(super) fn raw(url: &str) -> Implementation {
    let implementation = Implementation::new(
        "raw pg_advisory_lock",
        Kind::Raw,
        ConnectionPerTask::<Prepared>::new(url),
    );
    Implementation {
        variant: "a connection each",
        max_tasks: MAX_CONNECTIONS,
        max_held: MAX_CONNECTIONS,
        ..implementation
    }
}

impl LockFactory for ConnectionPerTask<Prepared> {
    fn lock(&self, key: &str, task: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let key = key_of(key);
        Box::pin(async move {
            let connection = self.get(task, prepared).await?;
            Ok(Box::new(RawLock { connection, key }) as Box<dyn Lock>)
        })
    }
}

struct RawLock {
    connection: Arc<Prepared>,
    key: i64,
}

impl Lock for RawLock {
    fn acquire(&self, mode: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async move {
            let Prepared { client, waits, lock, lock_shared, .. } = &*self.connection;
            let lock = if mode == Mode::Exclusive { lock } else { lock_shared };
            waits.store(true, Ordering::Relaxed);
            client.query_one(lock, &[&self.key]).await.map_err(one_line)?;
            waits.store(false, Ordering::Relaxed);
            Ok(Box::new(RawHeld { connection: self.connection.clone(), key: self.key, mode })
                as Box<dyn Held>)
        })
    }
}

struct RawHeld {
    connection: Arc<Prepared>,
    key: i64,
    mode: Mode,
}

impl Held for RawHeld {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async move {
            let Prepared { client, unlock, unlock_shared, .. } = &*self.connection;
            let unlock = if self.mode == Mode::Exclusive { unlock } else { unlock_shared };
            let row = client.query_one(unlock, &[&self.key]).await.map_err(one_line)?;
            if row.get(0) { Ok(()) } else { Err("was not held".into()) }
        })
    }
}

/// A connection of `sqlx`, taken out of its slot while in use.
type SqlxConnection = Arc<tokio::sync::Mutex<Option<PgConnection>>>;

impl Reusable for SqlxConnection {
    fn is_reusable(&self) -> bool {
        true
    }
}

pub(super) fn sqlx_connection_per_task(url: &str) -> Implementation {
    let implementation = Implementation::new(
        "sqlx PgAdvisoryLock",
        Kind::Peer,
        ConnectionPerTask::<SqlxConnection>::new(url),
    );
    let caveats = &[super::UNCONFIRMED];
    Implementation {
        variant: "a connection each",
        caveats,
        max_tasks: MAX_CONNECTIONS,
        max_held: MAX_CONNECTIONS,
        ..implementation
    }
}

/// Returns a leaked lock, because guards borrow it. A run leaks some hundreds of them.
fn leaked_lock(key: &str) -> &'static PgAdvisoryLock {
    Box::leak(Box::new(PgAdvisoryLock::with_key(PgAdvisoryLockKey::BigInt(key_of(key)))))
}

impl LockFactory for ConnectionPerTask<SqlxConnection> {
    fn lock(&self, key: &str, task: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let lock = leaked_lock(key);
        Box::pin(async move {
            let open = |url: String| async move {
                let connection = PgConnection::connect(&url).await.map_err(one_line)?;
                Ok(SqlxConnection::new(tokio::sync::Mutex::new(Some(connection))))
            };
            let connection = self.get(task, open).await?;
            Ok(Box::new(SqlxLock {
                connection: SqlxConnection::clone(&connection),
                lock,
                url: self.url.clone(),
            }) as Box<dyn Lock>)
        })
    }
}

struct SqlxLock {
    connection: SqlxConnection,
    lock: &'static PgAdvisoryLock,
    url: String,
}

impl Lock for SqlxLock {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            let connection = self.connection.lock().await.take();
            let connection = match connection {
                Some(connection) => connection,
                // The previous acquire was cancelled, which closed its connection.
                None => PgConnection::connect(&self.url).await.map_err(one_line)?,
            };
            let guard = self.lock.acquire(connection).await.map_err(one_line)?;
            Ok(Box::new(SqlxHeld { guard, slot: self.connection.clone() }) as Box<dyn Held>)
        })
    }
}

struct SqlxHeld {
    guard: PgAdvisoryLockGuard<'static, PgConnection>,
    slot: SqlxConnection,
}

impl Held for SqlxHeld {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async {
            let connection = self.guard.release_now().await.map_err(one_line)?;
            *self.slot.lock().await = Some(connection);
            Ok(())
        })
    }
}

pub(super) async fn sqlx_pool(url: &str) -> Implementation {
    let pool = PgPoolOptions::new().max_connections(66);
    let pool = async { pool.connect_lazy(url).map(SqlxPool).map_err(one_line) };
    let implementation = Implementation::set_up("sqlx PgAdvisoryLock", Kind::Peer, pool).await;
    Implementation {
        variant: "pool of 66",
        caveats: &[super::UNCONFIRMED],
        max_held: 66,
        ..implementation
    }
}

struct SqlxPool(PgPool);

impl LockFactory for SqlxPool {
    fn lock(&self, key: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let lock = SqlxPoolLock { pool: self.0.clone(), lock: leaked_lock(key) };
        Box::pin(async { Ok(Box::new(lock) as Box<dyn Lock>) })
    }
}

struct SqlxPoolLock {
    pool: PgPool,
    lock: &'static PgAdvisoryLock,
}

impl Lock for SqlxPoolLock {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            let connection = self.pool.acquire().await.map_err(one_line)?;
            let guard = self.lock.acquire(connection).await.map_err(one_line)?;
            Ok(Box::new(SqlxPoolHeld(guard)) as Box<dyn Held>)
        })
    }
}

struct SqlxPoolHeld(PgAdvisoryLockGuard<'static, PoolConnection<Postgres>>);

impl Held for SqlxPoolHeld {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async { self.0.release_now().await.map(drop).map_err(one_line) })
    }
}

/// Two `SELECT 1`: no lock, but as many statements as a lock and its release.
pub(super) async fn selects(url: &str) -> Outcome<Implementation> {
    let client = connect(url).await?;
    let select = client.prepare("SELECT 1").await.map_err(one_line)?;
    Ok(Implementation::new("two SELECT 1", Kind::Raw, Selects(Arc::new((client, select)))))
}

#[derive(Clone)]
struct Selects(Arc<(Client, Statement)>);

impl LockFactory for Selects {
    fn lock(&self, _: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        Box::pin(async { Ok(Box::new(self.clone()) as Box<dyn Lock>) })
    }
}

impl Selects {
    async fn select(&self) -> Outcome<()> {
        self.0.0.query_one(&self.0.1, &[]).await.map(drop).map_err(one_line)
    }
}

impl Lock for Selects {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            self.select().await?;
            Ok(Box::new(self.clone()) as Box<dyn Held>)
        })
    }
}

impl Held for Selects {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async move { self.select().await })
    }
}
