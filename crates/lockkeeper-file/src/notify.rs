//! Notices to waiters that a lock file was closed, and to holders that theirs is gone.

#[cfg_attr(target_os = "linux", path = "notify/inotify.rs")]
#[cfg_attr(not(target_os = "linux"), path = "notify/none.rs")]
mod system;

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

pub(crate) use system::{Listener, Watcher};

/// The notices of one file. All claims of this process that listen to the file share it.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    notify: Notify,
    notices: AtomicU64,
}

impl Bell {
    /// Ready at the next notice.
    pub(crate) fn notified(&self) -> Notified<'_> {
        self.notify.notified()
    }

    /// Returns how many notices there were.
    pub(crate) fn notices(&self) -> u64 {
        self.notices.load(Ordering::Acquire)
    }

    /// Notifies all listeners: the file was closed, perhaps by its holder, or is no longer at its path, or there will
    /// be no more notices.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "there are no notices"))]
    fn ring(&self) {
        self.notices.fetch_add(1, Ordering::AcqRel);
        self.notify.notify_waiters();
    }
}
