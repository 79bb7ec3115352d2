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

use crate::make::{Fut, Held, Kind, Lock, Make, Mode, Outcome, Source, told};

/// The most connections of those that have one for each task or lock: a server has a process for each.
const MOST: usize = 512;

/// The key of a name: nobody else is on this server.
fn key_of(name: &str) -> i64 {
    name.bytes().fold(7, |key: i64, byte| key.wrapping_mul(31).wrapping_add(i64::from(byte)))
}

/// A connection of its own for each task, opened when it is first needed and kept.
struct Kept<C> {
    url: String,
    connections: Mutex<HashMap<usize, Arc<C>>>,
}

/// Whether a connection can be used again.
trait Reusable {
    fn is_reusable(&self) -> bool;
}

impl<C: Reusable> Kept<C> {
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

/// A connection, and what is asked on it, prepared.
struct Prepared {
    client: Client,
    /// Set while it waits. If that is dropped, the statement goes on, and what it is granted in the end nobody gives back.
    waits: AtomicBool,
    lock: Statement,
    lock_shared: Statement,
    unlock: Statement,
    unlock_shared: Statement,
}

pub(crate) async fn connect(url: &str) -> Outcome<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.map_err(told)?;
    tokio::spawn(async move { drop(connection.await) });
    Ok(client)
}

async fn prepared(url: String) -> Outcome<Prepared> {
    let client = connect(&url).await?;
    let prepare = async |function: &str| {
        client.prepare(&format!("SELECT {function}($1::bigint)")).await.map_err(told)
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

pub(super) fn raw(url: &str) -> Make {
    let make = Make::new("raw pg_advisory_lock", Kind::Raw, Kept::<Prepared>::new(url));
    Make { variant: "a connection each", most_tasks: MOST, most_held: MOST, ..make }
}

impl Source for Kept<Prepared> {
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
            client.query_one(lock, &[&self.key]).await.map_err(told)?;
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
            let row = client.query_one(unlock, &[&self.key]).await.map_err(told)?;
            if row.get(0) { Ok(()) } else { Err("was not held".into()) }
        })
    }
}

/// A connection of `sqlx`, which is taken out while it is used.
type Own = Arc<tokio::sync::Mutex<Option<PgConnection>>>;

impl Reusable for Own {
    fn is_reusable(&self) -> bool {
        true
    }
}

pub(super) fn sqlx_own(url: &str) -> Make {
    let make = Make::new("sqlx PgAdvisoryLock", Kind::Peer, Kept::<Own>::new(url));
    let caveats = &[super::UNCONFIRMED];
    Make { variant: "a connection each", caveats, most_tasks: MOST, most_held: MOST, ..make }
}

/// Guards borrow it, so it is never given back. There are some hundreds in a run.
fn lasting(key: &str) -> &'static PgAdvisoryLock {
    Box::leak(Box::new(PgAdvisoryLock::with_key(PgAdvisoryLockKey::BigInt(key_of(key)))))
}

impl Source for Kept<Own> {
    fn lock(&self, key: &str, task: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let lock = lasting(key);
        Box::pin(async move {
            let open = |url: String| async move {
                let connection = PgConnection::connect(&url).await.map_err(told)?;
                Ok(Own::new(tokio::sync::Mutex::new(Some(connection))))
            };
            let connection = self.get(task, open).await?;
            Ok(Box::new(OwnLock {
                connection: Own::clone(&connection),
                lock,
                url: self.url.clone(),
            }) as Box<dyn Lock>)
        })
    }
}

struct OwnLock {
    connection: Own,
    lock: &'static PgAdvisoryLock,
    url: String,
}

impl Lock for OwnLock {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            let connection = self.connection.lock().await.take();
            let connection = match connection {
                Some(connection) => connection,
                // The last one was dropped while it waited, and its connection with it.
                None => PgConnection::connect(&self.url).await.map_err(told)?,
            };
            let guard = self.lock.acquire(connection).await.map_err(told)?;
            Ok(Box::new(OwnHeld { guard, home: self.connection.clone() }) as Box<dyn Held>)
        })
    }
}

struct OwnHeld {
    guard: PgAdvisoryLockGuard<'static, PgConnection>,
    home: Own,
}

impl Held for OwnHeld {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async {
            let connection = self.guard.release_now().await.map_err(told)?;
            *self.home.lock().await = Some(connection);
            Ok(())
        })
    }
}

pub(super) async fn sqlx_pool(url: &str) -> Make {
    let pool = PgPoolOptions::new().max_connections(66);
    let pool = async { pool.connect_lazy(url).map(Pooled).map_err(told) };
    let make = Make::set_up("sqlx PgAdvisoryLock", Kind::Peer, pool).await;
    Make { variant: "pool of 66", caveats: &[super::UNCONFIRMED], most_held: 66, ..make }
}

struct Pooled(PgPool);

impl Source for Pooled {
    fn lock(&self, key: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let lock = PooledLock { pool: self.0.clone(), lock: lasting(key) };
        Box::pin(async { Ok(Box::new(lock) as Box<dyn Lock>) })
    }
}

struct PooledLock {
    pool: PgPool,
    lock: &'static PgAdvisoryLock,
}

impl Lock for PooledLock {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            let connection = self.pool.acquire().await.map_err(told)?;
            let guard = self.lock.acquire(connection).await.map_err(told)?;
            Ok(Box::new(PooledHeld(guard)) as Box<dyn Held>)
        })
    }
}

struct PooledHeld(PgAdvisoryLockGuard<'static, PoolConnection<Postgres>>);

impl Held for PooledHeld {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async { self.0.release_now().await.map(drop).map_err(told) })
    }
}

/// Two `SELECT 1`: no lock, but as many requests as one takes.
pub(super) async fn selects(url: &str) -> Outcome<Make> {
    let client = connect(url).await?;
    let select = client.prepare("SELECT 1").await.map_err(told)?;
    Ok(Make::new("two SELECT 1", Kind::Raw, Selects(Arc::new((client, select)))))
}

#[derive(Clone)]
struct Selects(Arc<(Client, Statement)>);

impl Source for Selects {
    fn lock(&self, _: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        Box::pin(async { Ok(Box::new(self.clone()) as Box<dyn Lock>) })
    }
}

impl Selects {
    async fn select(&self) -> Outcome<()> {
        self.0.0.query_one(&self.0.1, &[]).await.map(drop).map_err(told)
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
