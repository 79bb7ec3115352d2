//! Lockkeeper.

use std::path::Path;
use std::time::Duration;

use lockkeeper_core::{Guard, Keeper, Mutex, ReleaseOutcome, RwLock};
use lockkeeper_file::File;
use lockkeeper_postgres::Postgres;
use lockkeeper_redis::{Config, Redis};

use crate::implementation::{
    Fut, Held, Implementation, Kind, Lock, LockFactory, Mode, Outcome, one_line,
};

impl LockFactory for Keeper {
    fn lock(&self, key: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let locks = KeyLocks { mutex: self.mutex(key), lock: self.rw_lock(key) };
        Box::pin(async { Ok(Box::new(locks) as Box<dyn Lock>) })
    }
}

struct KeyLocks {
    mutex: Mutex,
    lock: RwLock,
}

impl Lock for KeyLocks {
    fn acquire(&self, mode: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async move {
            let guard = match mode {
                Mode::Exclusive => self.mutex.lock().await,
                Mode::Shared => self.lock.read().await,
            };
            guard.map(|guard| Box::new(guard) as Box<dyn Held>).map_err(one_line)
        })
    }
}

impl Held for Guard {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async {
            match Guard::release(*self).await.map_err(one_line)? {
                ReleaseOutcome::Released => Ok(()),
                ReleaseOutcome::AlreadyLost => Err("lost".into()),
            }
        })
    }
}

pub(super) async fn redis(url: &str, ttl: Duration) -> Outcome<Implementation> {
    let config = Config::from_url(url).map_err(one_line)?;
    let keeper = Keeper::new(Redis::connect(config).await.map_err(one_line)?).ttl(ttl);
    let implementation = Implementation::new("lockkeeper", Kind::Ours, keeper);
    Ok(Implementation { commands: &["evalsha"], key: "lockkeeper:{*}", ..implementation })
}

/// Two PINGs on the connection of a store: no lock, but as many requests as a lock and its release.
pub(super) async fn pings(url: &str) -> Outcome<Implementation> {
    let config = Config::from_url(url).map_err(one_line)?;
    let store = Pings(Redis::connect(config).await.map_err(one_line)?);
    let pings = Implementation::new("two PINGs", Kind::Raw, store);
    Ok(Implementation { variant: "lockkeeper's client", ..pings })
}

#[derive(Clone)]
struct Pings(Redis);

impl LockFactory for Pings {
    fn lock(&self, _: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        Box::pin(async { Ok(Box::new(self.clone()) as Box<dyn Lock>) })
    }
}

impl Lock for Pings {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            self.0.ping().await.map_err(one_line)?;
            Ok(Box::new(self.clone()) as Box<dyn Held>)
        })
    }
}

impl Held for Pings {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async move { self.0.ping().await.map_err(one_line) })
    }
}

pub(super) async fn redlock(urls: &[&str], ttl: Duration) -> Outcome<Implementation> {
    let hosts = urls.iter().map(|url| url.trim_start_matches("redis://").trim_end_matches('/'));
    let url = format!("redlock://{}?min_uptime=0s", hosts.collect::<Vec<_>>().join(","));
    let config = Config::redlock_from_url(&url).map_err(one_line)?;
    let quorum = lockkeeper_redis::redlock(config).await.map_err(one_line)?;
    let implementation =
        Implementation::new("lockkeeper", Kind::Ours, Keeper::new(quorum).ttl(ttl));
    Ok(Implementation { commands: &["evalsha"], key: "lockkeeper:{*}", ..implementation })
}

pub(super) fn postgres(url: &str, ttl: Duration) -> Outcome<Vec<Implementation>> {
    let implementation = |url: &str, variant| -> Outcome<Implementation> {
        let keeper = Keeper::new(Postgres::new(url).map_err(one_line)?).ttl(ttl);
        Ok(Implementation { variant, ..Implementation::new("lockkeeper", Kind::Ours, keeper) })
    };
    Ok(vec![
        implementation(&format!("{url}?fence=off"), "fence off")?,
        implementation(url, "fence on (default)")?,
    ])
}

pub(super) fn files(dir: &Path, ttl: Duration) -> Outcome<Vec<Implementation>> {
    let implementation = |fence, variant| -> Outcome<Implementation> {
        let store = File::options().fence(fence).open(dir.join("lockkeeper")).map_err(one_line)?;
        Ok(Implementation {
            variant,
            ..Implementation::new("lockkeeper", Kind::Ours, Keeper::new(store).ttl(ttl))
        })
    };
    Ok(vec![implementation(false, "fence off")?, implementation(true, "fence on (default)")?])
}
