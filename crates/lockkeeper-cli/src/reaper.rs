//! Reaping of children that this process did not start.
//!
//! As process 1 of a container, or as a subreaper, lockkeeper adopts the orphans of its pid namespace. Each one stays a
//! zombie until lockkeeper waits for it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::process::{Pid, Signal};
use tokio::task::AbortHandle;

use crate::signals;

/// A task that reaps all children except one.
pub(crate) struct Reaper {
    excluded: Arc<AtomicI32>,
    task: AbortHandle,
}

impl Reaper {
    pub(crate) fn start() -> io::Result<Self> {
        let mut children = signals::stream(Signal::CHILD)?;
        let excluded = Arc::new(AtomicI32::new(0));
        let except = excluded.clone();
        let task = tokio::spawn(async move {
            loop {
                reap_all_except(except.load(Ordering::Relaxed));
                if children.recv().await.is_none() {
                    return;
                }
            }
        });
        Ok(Self { excluded, task: task.abort_handle() })
    }

    /// Excludes a child. Must be called without an await after the child was started, before the task can run.
    pub(crate) fn exclude(&self, child: Pid) {
        self.excluded.store(child.as_raw_pid(), Ordering::Relaxed);
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Reaps dead children, until there is none or the next one is the excluded one.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn reap_all_except(excluded: i32) {
    use nix::sys::wait::{Id, WaitPidFlag, waitid};

    let dead = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG;
    // Reads the pid before reaping, because a wait for any child cannot exclude one.
    while let Ok(status) = waitid(Id::All, dead | WaitPidFlag::WNOWAIT) {
        let Some(pid) = status.pid().filter(|pid| pid.as_raw() != excluded) else { return };
        if waitid(Id::Pid(pid), dead).is_err() {
            return;
        }
    }
}

/// Does nothing: on other systems this process does not adopt orphans.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn reap_all_except(_: i32) {}
