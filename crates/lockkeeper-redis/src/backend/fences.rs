//! A register of fences.

use std::sync::LazyLock;
use std::time::Duration;

use lockkeeper_core::{BoxFuture, Error, ErrorKind, Fence, FenceCheck, FenceStore, Name, Result};

use super::Redis;
use crate::client::script::{Script, script};
use crate::error::unexpected;
use crate::names::register_key;

static FENCE: LazyLock<Script> = script!("fence.lua");

/// How long a fence is remembered by default.
const DEFAULT_AGE: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// The longest time: a thousand years.
const MAX_AGE: Duration = Duration::from_secs(1000 * 366 * 24 * 60 * 60);

/// Keeps the fences of a [`FenceRegister`](lockkeeper_core::FenceRegister) on Redis: one node, Sentinel or
/// Cluster.
///
/// The highest fence of `orders/42` is the value of the key `lockkeeper:fence:{orders/42}:highest`. Each
/// check is one script. With [`Config::min_replicas`](crate::Config::min_replicas) it counts only when
/// that many replicas have it.
///
/// # What it does not guarantee
///
/// A server that forgets (a restart without persistence, a failover to a replica that was behind, an
/// eviction) lets a stale request pass once more.
///
/// # Examples
///
/// ```
/// use lockkeeper_core::{Fence, FenceRegister};
/// use lockkeeper_redis::{Config, Redis, Fences};
///
/// # #[tokio::main]
/// # async fn main() -> lockkeeper_core::Result<()> {
/// # let server = lockkeeper_testkit::server::RedisServer::start_or_panic();
/// # let url = server.url();
/// let redis = Redis::connect(Config::from_url(&url)?).await?;
/// let register = FenceRegister::new(Fences::new(redis));
/// assert!(register.check("orders/42", Fence::new(7).unwrap()).await?.is_passed());
/// assert!(!register.check("orders/42", Fence::new(6).unwrap()).await?.is_passed());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Fences {
    redis: Redis,
    keep_for: Duration,
}

impl Fences {
    /// Fences on a store. It may be the one that has the locks, or another.
    pub fn new(redis: Redis) -> Self {
        Self { redis, keep_for: DEFAULT_AGE }
    }

    /// Sets how long the highest fence of a name is remembered after the last check that it passed (30 days
    /// if not set).
    ///
    /// A holder that was paused for longer than this is not found out. Less needs less memory, where there
    /// are many names.
    #[must_use]
    pub fn keep_for(mut self, keep_for: Duration) -> Self {
        self.keep_for = keep_for;
        self
    }

    async fn compare(&self, name: &Name, fence: Fence) -> Result<FenceCheck> {
        if self.keep_for < Duration::from_millis(1) || self.keep_for > MAX_AGE {
            let message = "fences are kept for a millisecond at least, a thousand years at most";
            return Err(Error::new(ErrorKind::InvalidOption, message));
        }
        let store = &self.redis.store;
        let (key, keys) = register_key(&store.prefix, name)?;
        let keep_for = self.keep_for.as_millis().to_string();
        let replied = store.run(&keys, &FENCE, |call| {
            call.number(1).word(&key).number(fence.get()).word(&keep_for);
        });
        let (session, reply) = replied.await?;
        let highest = redis::from_redis_value::<u64>(reply.clone()).ok().and_then(Fence::new);
        let highest = highest.ok_or_else(|| unexpected(&reply))?;
        if highest > fence {
            return Ok(FenceCheck::Stale { highest });
        }
        session.replicated(store.min_replicas).await?;
        Ok(FenceCheck::Passed)
    }
}

impl FenceStore for Fences {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn check(&self, name: &Name, fence: Fence) -> BoxFuture<'_, Result<FenceCheck>> {
        let name = name.clone();
        Box::pin(async move { self.compare(&name, fence).await })
    }
}
