//! Notifies waiters that a lock file was closed, and holders that their lock file was removed or replaced.

#[cfg_attr(target_os = "linux", path = "notify/inotify.rs")]
#[cfg_attr(not(target_os = "linux"), path = "notify/none.rs")]
mod system;

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

pub(crate) use system::{Listener, Watcher};

/// The events of one file. All listeners of this process to the file share it.
#[derive(Debug, Default)]
pub(crate) struct FileEvents {
    notify: Notify,
    count: AtomicU64,
}

impl FileEvents {
    /// Waits for the next event.
    pub(crate) fn notified(&self) -> Notified<'_> {
        self.notify.notified()
    }

    /// Returns the number of events so far.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Notifies all listeners: the file was closed, perhaps by its holder, or is no longer at its path, or the watcher has
    /// ended.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "there are no events"))]
    fn add(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
        self.notify.notify_waiters();
    }
}
