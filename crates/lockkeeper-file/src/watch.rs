//! Who tells waiters that a lock file was closed, and holders that theirs is gone.

#[cfg_attr(target_os = "linux", path = "watch/inotify.rs")]
#[cfg_attr(not(target_os = "linux"), path = "watch/nobody.rs")]
mod system;

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

pub(crate) use system::{Listener, Watcher};

/// Rung when something happened to a file. All claims of this process that listen to it share one.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    /// For those who wait for the lock alone: one of them may have it, so one of them is woken. One that
    /// finds it taken knows that whoever has it will ring when it is done; one that finds another file at
    /// the path closes this one, which wakes the next; one that leaves it to another of this process looks
    /// again in a moment.
    one: Notify,
    /// For all others: readers enter together, and holders want to know whether they still hold.
    all: Notify,
    rings: AtomicU64,
}

/// Who is woken by a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wake {
    One,
    All,
}

impl Bell {
    /// The next ring, as heard by one of those.
    pub(crate) fn rung(&self, wake: Wake) -> Notified<'_> {
        match wake {
            Wake::One => self.one.notified(),
            Wake::All => self.all.notified(),
        }
    }

    /// How often it was rung.
    pub(crate) fn rings(&self) -> u64 {
        self.rings.load(Ordering::Acquire)
    }

    /// Something happened: the file was closed, perhaps by its holder, or is no longer at its path.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "nobody rings"))]
    fn ring(&self) {
        self.rings.fetch_add(1, Ordering::AcqRel);
        self.all.notify_waiters();
        self.one.notify_one();
    }

    /// Nobody will ring any more: all are woken, also those of whom a ring wakes one.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "nobody rings"))]
    fn ring_all(&self) {
        self.rings.fetch_add(1, Ordering::AcqRel);
        self.all.notify_waiters();
        self.one.notify_waiters();
    }
}
