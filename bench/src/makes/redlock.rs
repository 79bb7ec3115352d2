//! `redlock`: blocking, with a new connection for each request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlock::{Lock as Granted, RedLock};

use crate::make::{Fut, Held, Kind, Lock, Make, Mode, Outcome, Source, told};

struct Manager {
    /// Locks borrow it, and live in other threads.
    manager: &'static RedLock,
    ttl: usize,
}

pub(super) fn make(urls: &[&str], ttl: Duration, retry: Option<Duration>) -> Make {
    let mut manager = RedLock::new(urls.to_vec());
    if retry.is_some() {
        // It pauses for a random time below this, in milliseconds, and panics at 0.
        manager.set_retry(3, 2);
    }
    let kind = if retry.is_some() { Kind::Tuned } else { Kind::Peer };
    let ttl = usize::try_from(ttl.as_millis()).unwrap_or(usize::MAX);
    let manager = Box::leak(Box::new(manager));
    let caveats = &[
        "blocks: each lock has a thread, and each request a connection; not run with more than 64 tasks",
        super::UNCONFIRMED,
    ];
    let variant = if retry.is_some() { "retry 0 to 1 ms" } else { "defaults (retry 0 to 200 ms)" };
    let make = Make::new("redlock", kind, Manager { manager, ttl });
    let polls = retry.is_none();
    Make { variant, caveats, polls, commands: &["set", "evalsha"], most_tasks: 64, ..make }
}

impl Source for Manager {
    fn lock(&self, key: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let lock = BlockingLock { manager: self.manager, key: key.into(), ttl: self.ttl };
        Box::pin(async { Ok(Box::new(lock) as Box<dyn Lock>) })
    }
}

struct BlockingLock {
    manager: &'static RedLock,
    key: Arc<str>,
    ttl: usize,
}

/// Tells the thread when nobody waits for it any more.
struct GiveUp(Arc<AtomicBool>);

impl Drop for GiveUp {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Lock for BlockingLock {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            let given_up = Arc::new(AtomicBool::new(false));
            let _give_up = GiveUp(given_up.clone());
            let (manager, key, ttl) = (self.manager, self.key.clone(), self.ttl);
            let attempts = tokio::task::spawn_blocking(move || {
                while !given_up.load(Ordering::Relaxed) {
                    if let Some(granted) = manager.lock(key.as_bytes(), ttl).map_err(told)? {
                        return Ok(granted);
                    }
                }
                Err("given up".to_owned())
            });
            Ok(Box::new(BlockingHeld(attempts.await.map_err(told)??)) as Box<dyn Held>)
        })
    }
}

struct BlockingHeld(Granted<'static>);

impl Held for BlockingHeld {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async {
            let unlock = move || self.0.lock_manager.unlock(&self.0);
            tokio::task::spawn_blocking(unlock).await.map_err(told)
        })
    }
}
