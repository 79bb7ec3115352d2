//! `rslock`: an asynchronous port of Redlock that polls.

use std::time::Duration;

use rslock::{LockGuard, LockManager};

use crate::implementation::{
    Fut, Held, Implementation, Kind, Lock, LockFactory, Mode, Outcome, one_line,
};

struct Manager(LockManager, Duration);

pub(super) fn implementation(
    urls: &[&str],
    ttl: Duration,
    retry: Option<Duration>,
) -> Implementation {
    let mut manager = LockManager::new(urls.to_vec());
    let kind = if let Some(delay) = retry {
        // It waits for a random time below this, in milliseconds: with 1 it would spin.
        manager.set_retry(3, delay * 2);
        Kind::Tuned
    } else {
        Kind::Peer
    };
    let variant = if retry.is_some() { "retry 0 to 1 ms" } else { "defaults (retry 0 to 200 ms)" };
    let implementation = Implementation::new("rslock", kind, Manager(manager, ttl));
    let (caveats, polls) = (&[super::UNCONFIRMED], retry.is_none());
    Implementation { variant, caveats, polls, commands: &["set", "evalsha"], ..implementation }
}

impl LockFactory for Manager {
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
            let guard =
                self.manager.acquire(self.key.as_str(), self.ttl).await.map_err(one_line)?;
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
