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

use crate::make::{Fut, Held, Kind, Lock, Make, Mode, Outcome, Source, told};

struct Provider<P> {
    provider: P,
    /// How long to wait before asking again, since it does not wait by itself.
    pause: Duration,
}

struct AnyLock<L>(L, Duration);

struct AnyHandle<H>(H);

impl<P> Source for Provider<P>
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
                    Err(error) => return Err(told(error)),
                }
            }
        })
    }
}

impl<H: LockHandle + 'static> Held for AnyHandle<H> {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async { self.0.release().await.map_err(told) })
    }
}

/// The same for readers and writers.
struct SharedProvider<P>(P);

struct AnySharedLock<L>(L);

impl<P> Source for SharedProvider<P>
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
                    Err(LockError::Timeout(_)) => tokio::time::sleep(super::TUNED).await,
                    Err(error) => return Err(told(error)),
                }
            }
        })
    }
}

const NAME: &str = "distributed-lock";

async fn redis_provider(urls: &[&str], ttl: Duration) -> Outcome<RedisLockProvider> {
    let provider = RedisLockProvider::builder().urls(urls);
    let provider = provider.expiry(ttl).extension_cadence(ttl / 3).min_validity(ttl * 9 / 10);
    provider.build().await.map_err(told)
}

/// Locks on one node, or on a majority of several.
pub(super) async fn redis(urls: &[&str], ttl: Duration) -> Vec<Make> {
    let mut makes = Vec::new();
    let ways = [
        (Duration::from_millis(50), "asked again every 50 ms", Kind::Peer),
        (super::TUNED, "asked again every 1 ms", Kind::Tuned),
    ];
    for (pause, variant, kind) in ways {
        let provider = async {
            let provider = redis_provider(urls, ttl).await?;
            Ok(Provider { provider, pause })
        };
        let caveats = &[
            "`acquire(None)`, documented to wait for ever, does not wait: asked again by this program",
            super::UNCONFIRMED,
        ];
        let make = Make::set_up(NAME, kind, provider).await;
        let key = "distributed-lock:*";
        let polls = kind == Kind::Peer;
        makes.push(Make { variant, caveats, polls, commands: &["set", "eval"], key, ..make });
    }
    makes
}

pub(super) async fn shared_redis(url: &str, ttl: Duration) -> Make {
    let provider = async { redis_provider(&[url], ttl).await.map(SharedProvider) };
    let variant = "reads asked again every 1 ms, writes by itself (50 ms to 1 s)";
    let make = Make::set_up(NAME, Kind::Peer, provider).await;
    Make { variant, caveats: &[super::UNCONFIRMED], ..make }
}

pub(super) async fn files(dir: &Path) -> Make {
    let provider = async {
        let provider = FileLockProvider::new(dir.join("distributed-lock")).map_err(told)?;
        Ok(Provider { provider, pause: Duration::ZERO })
    };
    let make = Make::set_up(NAME, Kind::Peer, provider).await;
    Make { variant: "defaults (retry 10 ms to 1 s)", polls: true, ..make }
}

#[cfg(feature = "openssl-peers")]
mod with_openssl {
    use distributed_lock_postgres::PostgresLockProvider;
    use sqlx::postgres::PgPoolOptions;

    use super::{Duration, Kind, Make, NAME, Outcome, Provider, SharedProvider, told};

    /// As many connections as there are tasks.
    const ENOUGH: u32 = 66;

    async fn large(url: &str) -> Outcome<PostgresLockProvider> {
        let pool = PgPoolOptions::new().max_connections(ENOUGH).connect_lazy(url).map_err(told)?;
        PostgresLockProvider::builder().pool(pool).build().await.map_err(told)
    }

    pub(crate) async fn postgres(url: &str) -> Vec<Make> {
        let waits = |provider| Provider { provider, pause: Duration::ZERO };
        let plain = async { PostgresLockProvider::new(url).await.map(waits).map_err(told) };
        let plain = Make::set_up(NAME, Kind::Peer, plain).await;
        let large = Make::set_up(NAME, Kind::Tuned, async { large(url).await.map(waits) }).await;
        vec![
            Make { variant: "defaults (10 connections)", most_held: 10, ..plain },
            Make { variant: "66 connections", most_held: ENOUGH as usize, ..large },
        ]
    }

    pub(crate) async fn shared_postgres(url: &str) -> Vec<Make> {
        let provider = async { large(url).await.map(SharedProvider) };
        let make = Make::set_up(NAME, Kind::Tuned, provider).await;
        vec![Make { variant: "66 connections", ..make }]
    }
}

#[cfg(feature = "openssl-peers")]
pub(super) use with_openssl::{postgres, shared_postgres};

#[cfg(not(feature = "openssl-peers"))]
#[expect(clippy::unused_async, reason = "as the other one")]
pub(super) async fn postgres(_: &str) -> Vec<Make> {
    Vec::new()
}

#[cfg(not(feature = "openssl-peers"))]
#[expect(clippy::unused_async, reason = "as the other one")]
pub(super) async fn shared_postgres(_: &str) -> Vec<Make> {
    Vec::new()
}
