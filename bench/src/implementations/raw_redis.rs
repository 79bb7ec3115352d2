//! The plain Redis recipe: `SET NX PX`, and a script that compares and deletes.

use std::time::Duration;

use redis::IntoConnectionInfo as _;
use redis::aio::MultiplexedConnection;

use crate::implementation::{
    Fut, Held, Implementation, Kind, Lock, LockFactory, Mode, Outcome, one_line,
};

const UNLOCK: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

/// The retry interval.
const PAUSE: Duration = super::TUNED_RETRY;

#[derive(Clone)]
struct Raw {
    connection: MultiplexedConnection,
    hash: String,
    ttl: u64,
}

/// Returns a connection of the redis crate with its fastest settings: RESP3, no Nagle delay, no response timers.
pub(crate) async fn connect(url: &str) -> Outcome<MultiplexedConnection> {
    let info = format!("{url}?protocol=resp3").into_connection_info().map_err(one_line)?;
    let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
    let client = redis::Client::open(info.set_tcp_settings(tcp)).map_err(one_line)?;
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    client.get_multiplexed_async_connection_with_config(&config).await.map_err(one_line)
}

async fn raw(url: &str, ttl: Duration) -> Outcome<Raw> {
    let mut connection = connect(url).await?;
    let mut load = redis::cmd("SCRIPT");
    let hash = load.arg("LOAD").arg(UNLOCK).query_async(&mut connection).await.map_err(one_line)?;
    let ttl = u64::try_from(ttl.as_millis()).map_err(one_line)?;
    Ok(Raw { connection, hash, ttl })
}

pub(super) async fn implementation(url: &str, ttl: Duration) -> Implementation {
    let implementation =
        Implementation::set_up("raw SET NX PX + EVALSHA", Kind::Raw, raw(url, ttl)).await;
    Implementation {
        variant: "retry 1 ms",
        commands: &["set", "evalsha"],
        key: "raw:*",
        ..implementation
    }
}

impl LockFactory for Raw {
    fn lock(&self, key: &str, task: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let lock = RawLock { raw: self.clone(), key: format!("raw:{key}"), owner: task };
        Box::pin(async { Ok(Box::new(lock) as Box<dyn Lock>) })
    }
}

#[derive(Clone)]
struct RawLock {
    raw: Raw,
    key: String,
    owner: usize,
}

impl Lock for RawLock {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            let mut connection = self.raw.connection.clone();
            loop {
                let mut set = redis::cmd("SET");
                set.arg(&self.key).arg(self.owner).arg("NX").arg("PX").arg(self.raw.ttl);
                let done: Option<String> =
                    set.query_async(&mut connection).await.map_err(one_line)?;
                if done.is_some() {
                    return Ok(Box::new(self.clone()) as Box<dyn Held>);
                }
                tokio::time::sleep(PAUSE).await;
            }
        })
    }
}

impl Held for RawLock {
    fn release(mut self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async move {
            let mut unlock = redis::cmd("EVALSHA");
            unlock.arg(&self.raw.hash).arg(1).arg(&self.key).arg(self.owner);
            let deleted: u32 =
                unlock.query_async(&mut self.raw.connection).await.map_err(one_line)?;
            if deleted == 1 { Ok(()) } else { Err("lost".into()) }
        })
    }
}

/// Two PINGs: no lock, but as many requests as a lock and its release.
pub(super) async fn pings(url: &str) -> Outcome<Implementation> {
    let pings = Implementation::new("two PINGs", Kind::Raw, Pings(connect(url).await?));
    Ok(Implementation { variant: "redis-rs", ..pings })
}

#[derive(Clone)]
struct Pings(MultiplexedConnection);

impl LockFactory for Pings {
    fn lock(&self, _: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        Box::pin(async { Ok(Box::new(self.clone()) as Box<dyn Lock>) })
    }
}

impl Lock for Pings {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            let mut pings = self.clone();
            crate::bench::ping(&mut pings.0).await?;
            Ok(Box::new(pings) as Box<dyn Held>)
        })
    }
}

impl Held for Pings {
    fn release(mut self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async move { crate::bench::ping(&mut self.0).await.map(drop) })
    }
}
