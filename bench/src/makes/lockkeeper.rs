//! Ours.

use std::path::Path;
use std::time::Duration;

use lockkeeper_core::{Guard, Keeper, Mutex, ReleaseOutcome, RwLock};
use lockkeeper_file::File;
use lockkeeper_postgres::Postgres;
use lockkeeper_redis::{Config, Redis};

use crate::make::{Fut, Held, Kind, Lock, Make, Mode, Outcome, Source, told};

impl Source for Keeper {
    fn lock(&self, key: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let both = Both { mutex: self.mutex(key), lock: self.rw_lock(key) };
        Box::pin(async { Ok(Box::new(both) as Box<dyn Lock>) })
    }
}

struct Both {
    mutex: Mutex,
    lock: RwLock,
}

impl Lock for Both {
    fn acquire(&self, mode: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async move {
            let guard = match mode {
                Mode::Exclusive => self.mutex.lock().await,
                Mode::Shared => self.lock.read().await,
            };
            guard.map(|guard| Box::new(guard) as Box<dyn Held>).map_err(told)
        })
    }
}

impl Held for Guard {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async {
            match Guard::release(*self).await.map_err(told)? {
                ReleaseOutcome::Released => Ok(()),
                ReleaseOutcome::AlreadyLost => Err("lost".into()),
            }
        })
    }
}

pub(super) async fn redis(url: &str, ttl: Duration) -> Outcome<Make> {
    let config = Config::from_url(url).map_err(told)?;
    let keeper = Keeper::new(Redis::connect(config).await.map_err(told)?).ttl(ttl);
    let make = Make::new("lockkeeper", Kind::Ours, keeper);
    Ok(Make { commands: &["evalsha"], key: "lockkeeper:{*}", ..make })
}

pub(super) async fn redlock(urls: &[&str], ttl: Duration) -> Outcome<Make> {
    let hosts = urls.iter().map(|url| url.trim_start_matches("redis://").trim_end_matches('/'));
    let url = format!("redlock://{}?min_uptime=0s", hosts.collect::<Vec<_>>().join(","));
    let config = Config::redlock_from_url(&url).map_err(told)?;
    let quorum = lockkeeper_redis::redlock(config).await.map_err(told)?;
    let make = Make::new("lockkeeper", Kind::Ours, Keeper::new(quorum).ttl(ttl));
    Ok(Make { commands: &["evalsha"], key: "lockkeeper:{*}", ..make })
}

pub(super) fn postgres(url: &str, ttl: Duration) -> Outcome<Vec<Make>> {
    let make = |url: &str, variant| -> Outcome<Make> {
        let keeper = Keeper::new(Postgres::new(url).map_err(told)?).ttl(ttl);
        Ok(Make { variant, ..Make::new("lockkeeper", Kind::Ours, keeper) })
    };
    Ok(vec![make(&format!("{url}?fence=off"), "fence off")?, make(url, "fence on (default)")?])
}

pub(super) fn files(dir: &Path, ttl: Duration) -> Outcome<Vec<Make>> {
    let make = |fence, variant| -> Outcome<Make> {
        let store = File::options().fence(fence).open(dir.join("lockkeeper")).map_err(told)?;
        Ok(Make { variant, ..Make::new("lockkeeper", Kind::Ours, Keeper::new(store).ttl(ttl)) })
    };
    Ok(vec![make(false, "fence off")?, make(true, "fence on (default)")?])
}
