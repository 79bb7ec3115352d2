//! A register of fences.

use std::sync::LazyLock;
use std::time::Duration;

use lockkeeper_core::{BoxFuture, Error, ErrorKind, Fence, FenceCheck, FenceStore, Name, Result};

use super::Redis;
use crate::client::script::{Script, script};
use crate::error::unexpected;
use crate::names::register_key;

static FENCE: LazyLock<Script> = script!("fence.lua");

/// The default of [`Fences::keep_for`].
const DEFAULT_AGE: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// The maximum of [`Fences::keep_for`]: a thousand years.
const MAX_AGE: Duration = Duration::from_secs(1000 * 366 * 24 * 60 * 60);

/// Keeps the fences of a [`FenceRegister`](lockkeeper_core::FenceRegister) on Redis: one node, Sentinel or
/// Cluster.
///
/// The highest fence of `orders/42` is the value of the key `lockkeeper:fence:{orders/42}:highest`. Each check is one script.
/// With [`Config::min_replicas`](crate::Config::min_replicas), a check passes only after that many replicas have
/// acknowledged the fence.
///
/// # What it does not guarantee
///
/// A server that loses the highest fence (a restart without persistence, a failover to a replica that lags, an eviction)
/// lets stale requests pass until a holder has checked a newer fence.
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
    /// Creates a register on a Redis store: the one that keeps the locks, or another.
    pub fn new(redis: Redis) -> Self {
        Self { redis, keep_for: DEFAULT_AGE }
    }

    /// Sets how long the highest fence of a name is kept after the last check that passed (default: 30 days).
    ///
    /// After that, a stale fence passes, so this must be longer than any pause of a holder. With many names, a shorter time
    /// saves memory.
    #[must_use]
    pub fn keep_for(mut self, keep_for: Duration) -> Self {
        self.keep_for = keep_for;
        self
    }

    async fn compare(&self, name: &Name, fence: Fence) -> Result<FenceCheck> {
        if self.keep_for < Duration::from_millis(1) || self.keep_for > MAX_AGE {
            let message = "keep_for must be at least a millisecond and at most a thousand years";
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
