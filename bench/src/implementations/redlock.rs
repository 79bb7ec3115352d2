//! `redlock`: blocking, with a new connection for each request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlock::{Lock as Granted, RedLock};

use crate::implementation::{
    Fut, Held, Implementation, Kind, Lock, LockFactory, Mode, Outcome, one_line,
};

struct Manager {
    /// Leaked, because locks borrow it and are used in other threads.
    manager: &'static RedLock,
    ttl: usize,
}

pub(super) fn implementation(
    urls: &[&str],
    ttl: Duration,
    retry: Option<Duration>,
) -> Implementation {
    let mut manager = RedLock::new(urls.to_vec());
    if retry.is_some() {
        // It waits for a random time below this, in milliseconds, and panics at 0.
        manager.set_retry(3, 2);
    }
    let kind = if retry.is_some() { Kind::Tuned } else { Kind::Peer };
    let ttl = usize::try_from(ttl.as_millis()).unwrap_or(usize::MAX);
    let manager = Box::leak(Box::new(manager));
    let caveats = &[
        "blocks a thread per lock, and opens a connection per request; not run with more than 64 tasks",
        super::UNCONFIRMED,
    ];
    let variant = if retry.is_some() { "retry 0 to 1 ms" } else { "defaults (retry 0 to 200 ms)" };
    let implementation = Implementation::new("redlock", kind, Manager { manager, ttl });
    let polls = retry.is_none();
    Implementation {
        variant,
        caveats,
        polls,
        commands: &["set", "evalsha"],
        max_tasks: 64,
        ..implementation
    }
}

impl LockFactory for Manager {
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

/// Stops the blocking retry loop when the acquire future is dropped.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Lock for BlockingLock {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            let cancelled = Arc::new(AtomicBool::new(false));
            let _cancel_on_drop = CancelOnDrop(cancelled.clone());
            let (manager, key, ttl) = (self.manager, self.key.clone(), self.ttl);
            let attempts = tokio::task::spawn_blocking(move || {
                while !cancelled.load(Ordering::Relaxed) {
                    if let Some(granted) = manager.lock(key.as_bytes(), ttl).map_err(one_line)? {
                        return Ok(granted);
                    }
                }
                Err("cancelled".to_owned())
            });
            Ok(Box::new(BlockingHeld(attempts.await.map_err(one_line)??)) as Box<dyn Held>)
        })
    }
}

struct BlockingHeld(Granted<'static>);

impl Held for BlockingHeld {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async {
            let unlock = move || self.0.lock_manager.unlock(&self.0);
            tokio::task::spawn_blocking(unlock).await.map_err(one_line)
        })
    }
}
