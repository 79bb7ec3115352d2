//! `distributed-lock`: Redis, `PostgreSQL`, files.

use std::path::Path;
use std::time::Duration;

use distributed_lock_core::LockError;
use distributed_lock_core::traits::{
    DistributedLock, DistributedReaderWriterLock, LockHandle, LockProvider,
    ReaderWriterLockProvider,
};
use distributed_lock_file::FileLockProvider;
use distributed_lock_redis::RedisLockProvider;

use crate::implementation::{
    Fut, Held, Implementation, Kind, Lock, LockFactory, Mode, Outcome, one_line,
};

struct Provider<P> {
    provider: P,
    /// The retry interval of this program, because `acquire` does not wait.
    pause: Duration,
}

struct AnyLock<L>(L, Duration);

struct AnyHandle<H>(H);

impl<P> LockFactory for Provider<P>
where
    P: LockProvider,
    P::Lock: 'static,
    <P::Lock as DistributedLock>::Handle: 'static,
{
    fn lock(&self, key: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let lock = AnyLock(self.provider.create_lock(key), self.pause);
        Box::pin(async { Ok(Box::new(lock) as Box<dyn Lock>) })
    }
}

impl<L: DistributedLock> Lock for AnyLock<L>
where
    L::Handle: 'static,
{
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            loop {
                match self.0.acquire(None).await {
                    Ok(handle) => return Ok(Box::new(AnyHandle(handle)) as Box<dyn Held>),
                    Err(LockError::Timeout(_)) => tokio::time::sleep(self.1).await,
                    Err(error) => return Err(one_line(error)),
                }
            }
        })
    }
}

impl<H: LockHandle + 'static> Held for AnyHandle<H> {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async { self.0.release().await.map_err(one_line) })
    }
}

/// A provider of reader-writer locks.
struct SharedProvider<P>(P);

struct AnySharedLock<L>(L);

impl<P> LockFactory for SharedProvider<P>
where
    P: ReaderWriterLockProvider,
    P::Lock: 'static,
    <P::Lock as DistributedReaderWriterLock>::ReadHandle: 'static,
    <P::Lock as DistributedReaderWriterLock>::WriteHandle: 'static,
{
    fn lock(&self, key: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let lock = AnySharedLock(self.0.create_reader_writer_lock(key));
        Box::pin(async { Ok(Box::new(lock) as Box<dyn Lock>) })
    }
}

impl<L: DistributedReaderWriterLock> Lock for AnySharedLock<L>
where
    L::ReadHandle: 'static,
    L::WriteHandle: 'static,
{
    fn acquire(&self, mode: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async move {
            loop {
                let held = match mode {
                    Mode::Exclusive => self
                        .0
                        .acquire_write(None)
                        .await
                        .map(|handle| Box::new(AnyHandle(handle)) as Box<dyn Held>),
                    Mode::Shared => self
                        .0
                        .acquire_read(None)
                        .await
                        .map(|handle| Box::new(AnyHandle(handle)) as Box<dyn Held>),
                };
                match held {
                    Ok(held) => return Ok(held),
                    Err(LockError::Timeout(_)) => tokio::time::sleep(super::TUNED_RETRY).await,
                    Err(error) => return Err(one_line(error)),
                }
            }
        })
    }
}

const NAME: &str = "distributed-lock";

async fn redis_provider(urls: &[&str], ttl: Duration) -> Outcome<RedisLockProvider> {
    let provider = RedisLockProvider::builder().urls(urls);
    let provider = provider.expiry(ttl).extension_cadence(ttl / 3).min_validity(ttl * 9 / 10);
    provider.build().await.map_err(one_line)
}

/// Returns the locks on one node, or on a majority of several.
pub(super) async fn redis(urls: &[&str], ttl: Duration) -> Vec<Implementation> {
    let mut implementations = Vec::new();
    let variants = [
        (Duration::from_millis(50), "retry 50 ms", Kind::Peer),
        (super::TUNED_RETRY, "retry 1 ms", Kind::Tuned),
    ];
    for (pause, variant, kind) in variants {
        let provider = async {
            let provider = redis_provider(urls, ttl).await?;
            Ok(Provider { provider, pause })
        };
        let caveats = &[
            "`acquire(None)`, documented to wait without limit, does not wait: this program retries",
            super::UNCONFIRMED,
        ];
        let implementation = Implementation::set_up(NAME, kind, provider).await;
        let key = "distributed-lock:*";
        let polls = kind == Kind::Peer;
        implementations.push(Implementation {
            variant,
            caveats,
            polls,
            commands: &["set", "eval"],
            key,
            ..implementation
        });
    }
    implementations
}

pub(super) async fn shared_redis(url: &str, ttl: Duration) -> Implementation {
    let provider = async { redis_provider(&[url], ttl).await.map(SharedProvider) };
    let variant = "read retry 1 ms, own write retry (50 ms to 1 s)";
    let implementation = Implementation::set_up(NAME, Kind::Peer, provider).await;
    Implementation { variant, caveats: &[super::UNCONFIRMED], ..implementation }
}

pub(super) async fn files(dir: &Path) -> Implementation {
    let provider = async {
        let provider = FileLockProvider::new(dir.join("distributed-lock")).map_err(one_line)?;
        Ok(Provider { provider, pause: Duration::ZERO })
    };
    let implementation = Implementation::set_up(NAME, Kind::Peer, provider).await;
    Implementation { variant: "defaults (retry 10 ms to 1 s)", polls: true, ..implementation }
}

#[cfg(feature = "openssl-peers")]
mod with_openssl {
    use distributed_lock_postgres::PostgresLockProvider;
    use sqlx::postgres::PgPoolOptions;

    use super::{
        Duration, Implementation, Kind, NAME, Outcome, Provider, SharedProvider, one_line,
    };

    /// Enough connections for 64 tasks and two more.
    const POOL_SIZE: u32 = 66;

    async fn large_pool(url: &str) -> Outcome<PostgresLockProvider> {
        let pool =
            PgPoolOptions::new().max_connections(POOL_SIZE).connect_lazy(url).map_err(one_line)?;
        PostgresLockProvider::builder().pool(pool).build().await.map_err(one_line)
    }

    pub(crate) async fn postgres(url: &str) -> Vec<Implementation> {
        let waits = |provider| Provider { provider, pause: Duration::ZERO };
        let plain = async { PostgresLockProvider::new(url).await.map(waits).map_err(one_line) };
        let plain = Implementation::set_up(NAME, Kind::Peer, plain).await;
        let large =
            Implementation::set_up(NAME, Kind::Tuned, async { large_pool(url).await.map(waits) })
                .await;
        vec![
            Implementation { variant: "defaults (10 connections)", max_held: 10, ..plain },
            Implementation { variant: "66 connections", max_held: POOL_SIZE as usize, ..large },
        ]
    }

    pub(crate) async fn shared_postgres(url: &str) -> Vec<Implementation> {
        let provider = async { large_pool(url).await.map(SharedProvider) };
        let implementation = Implementation::set_up(NAME, Kind::Tuned, provider).await;
        vec![Implementation { variant: "66 connections", ..implementation }]
    }
}

#[cfg(feature = "openssl-peers")]
pub(super) use with_openssl::{postgres, shared_postgres};

#[cfg(not(feature = "openssl-peers"))]
#[expect(clippy::unused_async, reason = "the function with OpenSSL is async")]
pub(super) async fn postgres(_: &str) -> Vec<Implementation> {
    Vec::new()
}

#[cfg(not(feature = "openssl-peers"))]
#[expect(clippy::unused_async, reason = "the function with OpenSSL is async")]
pub(super) async fn shared_postgres(_: &str) -> Vec<Implementation> {
    Vec::new()
}
