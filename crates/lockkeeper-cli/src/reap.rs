//! Children that this process did not start.
//!
//! As process 1 of a container, or as a subreaper, lockkeeper adopts the orphans of its pid namespace. Each one stays a
//! zombie until lockkeeper waits for it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::process::{Pid, Signal};
use tokio::task::AbortHandle;

use crate::signals;

/// A task that reaps every child but one.
pub(crate) struct Reaper {
    spared: Arc<AtomicI32>,
    task: AbortHandle,
}

impl Reaper {
    pub(crate) fn start() -> io::Result<Self> {
        let mut children = signals::stream(Signal::CHILD)?;
        let spared = Arc::new(AtomicI32::new(0));
        let but = spared.clone();
        let task = tokio::spawn(async move {
            loop {
                reap_all_but(but.load(Ordering::Relaxed));
                if children.recv().await.is_none() {
                    return;
                }
            }
        });
        Ok(Self { spared, task: task.abort_handle() })
    }

    /// Leaves a child alone from now on. To be called before the task can run again after the child was started.
    pub(crate) fn spare(&self, child: Pid) {
        self.spared.store(child.as_raw_pid(), Ordering::Relaxed);
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Reaps dead children until there is none, or the spared one is the next.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn reap_all_but(spared: i32) {
    use nix::sys::wait::{Id, WaitPidFlag, waitid};

    let dead = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG;
    // Looks first, because a wait that reaps cannot leave one child out.
    while let Ok(status) = waitid(Id::All, dead | WaitPidFlag::WNOWAIT) {
        let Some(pid) = status.pid().filter(|pid| pid.as_raw() != spared) else { return };
        if waitid(Id::Pid(pid), dead).is_err() {
            return;
        }
    }
}

/// Other systems do not make this process adopt orphans.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn reap_all_but(_: i32) {}
