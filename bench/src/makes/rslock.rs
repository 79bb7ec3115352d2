//! `rslock`: a port of Redlock, asynchronous, that polls.

use std::time::Duration;

use rslock::{LockGuard, LockManager};

use crate::make::{Fut, Held, Kind, Lock, Make, Mode, Outcome, Source, told};

struct Manager(LockManager, Duration);

pub(super) fn make(urls: &[&str], ttl: Duration, retry: Option<Duration>) -> Make {
    let mut manager = LockManager::new(urls.to_vec());
    let kind = if let Some(delay) = retry {
        // It pauses for a random time from nothing to less than this, in milliseconds: with 1 it would spin.
        manager.set_retry(3, delay * 2);
        Kind::Tuned
    } else {
        Kind::Peer
    };
    let variant = if retry.is_some() { "retry 0 to 1 ms" } else { "defaults (retry 0 to 200 ms)" };
    let make = Make::new("rslock", kind, Manager(manager, ttl));
    let (caveats, polls) = (&[super::UNCONFIRMED], retry.is_none());
    Make { variant, caveats, polls, commands: &["set", "evalsha"], ..make }
}

impl Source for Manager {
    fn lock(&self, key: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let lock = ManagedLock { manager: self.0.clone(), key: key.into(), ttl: self.1 };
        Box::pin(async { Ok(Box::new(lock) as Box<dyn Lock>) })
    }
}

struct ManagedLock {
    manager: LockManager,
    key: String,
    ttl: Duration,
}

impl Lock for ManagedLock {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            let guard = self.manager.acquire(self.key.as_str(), self.ttl).await.map_err(told)?;
            Ok(Box::new(guard) as Box<dyn Held>)
        })
    }
}

impl Held for LockGuard {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async {
            LockGuard::release(*self).await;
            Ok(())
        })
    }
}
