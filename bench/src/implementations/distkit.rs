//! `distkit`, feature `lock`: asynchronous, polls, renews.

use std::sync::Arc;
use std::time::Duration;

use distkit::DistkitRedisKey;
use distkit::lock::{
    LockGuardState, LockOptions, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use redis::aio::ConnectionManager;

use crate::implementation::{
    Fut, Held, Implementation, Kind, Lock, LockFactory, Mode, Outcome, one_line,
};

struct DistkitFactory {
    connection: ConnectionManager,
    ttl: Duration,
    retry: Option<Duration>,
    shared: bool,
}

async fn kit(
    url: &str,
    ttl: Duration,
    retry: Option<Duration>,
    shared: bool,
) -> Outcome<DistkitFactory> {
    let client = redis::Client::open(url).map_err(one_line)?;
    let connection = client.get_connection_manager().await.map_err(one_line)?;
    Ok(DistkitFactory { connection, ttl, retry, shared })
}

pub(super) async fn implementation(
    url: &str,
    ttl: Duration,
    retry: Option<Duration>,
) -> Implementation {
    set_up(url, ttl, retry, false).await
}

pub(super) async fn shared(url: &str, ttl: Duration, retry: Option<Duration>) -> Implementation {
    Implementation { commands: &["evalsha"], ..set_up(url, ttl, retry, true).await }
}

async fn set_up(url: &str, ttl: Duration, retry: Option<Duration>, shared: bool) -> Implementation {
    let kind = if retry.is_some() { Kind::Tuned } else { Kind::Peer };
    let implementation =
        Implementation::set_up("distkit", kind, kit(url, ttl, retry, shared)).await;
    let variant = if retry.is_some() { "retry 1 ms" } else { "defaults (retry 50 ms)" };
    let (caveats, polls) = (&[super::UNCONFIRMED], retry.is_none());
    let key = "distkit-locks:*";
    Implementation { variant, caveats, polls, commands: &["set", "evalsha"], key, ..implementation }
}

impl LockFactory for DistkitFactory {
    fn lock(&self, key: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let key = key.to_owned();
        Box::pin(async move {
            let key = DistkitRedisKey::try_from(key).map_err(one_line)?;
            // One object per task: an object is one owner.
            let mut options = LockOptions::builder(key, self.connection.clone()).ttl(self.ttl);
            if let Some(retry) = self.retry {
                options = options.retry_interval(retry);
            }
            let options = options.build();
            if self.shared {
                return Ok(Box::new(SharedLock(RwLock::new(options))) as Box<dyn Lock>);
            }
            Ok(Box::new(PlainLock(Mutex::new(options))) as Box<dyn Lock>)
        })
    }
}

struct PlainLock(Arc<Mutex>);

impl Lock for PlainLock {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async { Ok(Box::new(self.0.lock().await.map_err(one_line)?) as Box<dyn Held>) })
    }
}

struct SharedLock(Arc<RwLock>);

impl Lock for SharedLock {
    fn acquire(&self, mode: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async move {
            Ok(match mode {
                Mode::Exclusive => {
                    Box::new(self.0.write().await.map_err(one_line)?) as Box<dyn Held>
                }
                Mode::Shared => Box::new(self.0.read().await.map_err(one_line)?),
            })
        })
    }
}

fn confirmed(state: LockGuardState) -> Outcome<()> {
    if state == LockGuardState::Released { Ok(()) } else { Err(format!("{state:?}")) }
}

impl Held for MutexGuard {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async { confirmed(MutexGuard::release(*self).await.map_err(one_line)?) })
    }
}

impl Held for RwLockReadGuard {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async { confirmed(RwLockReadGuard::release(*self).await.map_err(one_line)?) })
    }
}

impl Held for RwLockWriteGuard {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async { confirmed(RwLockWriteGuard::release(*self).await.map_err(one_line)?) })
    }
}
