//! A small store with sessions instead of leases, which other processes can reach.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Error, ErrorKind, Fence,
    Grant, Holder, Inspector, LossReason, Mode, Owner, Release, Renewal, Result, Retry,
};

/// File locks of the operating system in a directory: no leases, no queue, no notifications,
/// no fences, no inspection.
///
/// The counterpart of the memory store in the tests of the suite itself: it lacks the capabilities that the memory
/// store has. Not for production: it never removes a file.
#[derive(Debug, Clone)]
pub struct Flock {
    dir: PathBuf,
    /// The sessions: an owner's lock lives as long as its file is open.
    held: Arc<Mutex<HashMap<Owner, File>>>,
}

impl Flock {
    /// Creates a store in an existing directory.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), held: Arc::default() }
    }

    /// Ends an owner's session without its knowledge, like a server that terminates a connection.
    pub fn sever(&self, owner: Owner) {
        self.end(owner);
    }

    /// Ends an owner's session, if there is one.
    fn end(&self, owner: Owner) -> bool {
        let file = self.held().remove(&owner);
        // Unlocks explicitly: if another thread is spawning a process, that process has inherited the file until its
        // `exec`, and would keep the lock after a mere close.
        file.inspect(|file| drop(file.unlock())).is_some()
    }

    fn held(&self) -> MutexGuard<'_, HashMap<Owner, File>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the name in hexadecimal, split into parts that file systems accept. The paths of two names differ.
    fn path(&self, name: &str) -> PathBuf {
        let mut hex = String::new();
        for byte in name.bytes() {
            let _ = write!(hex, "{byte:02x}");
        }
        let mut path = self.dir.clone();
        let mut rest = hex.as_str();
        while rest.len() > 200 {
            let (part, after) = rest.split_at(200);
            path.push(part);
            rest = after;
        }
        path.push(format!("{rest}.lock"));
        path
    }
}

impl Backend for Flock {
    fn name(&self) -> &'static str {
        "flock"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { shared: true, ..Capabilities::default() }
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        let path = self.path(&spec.name);
        Ok(Box::new(FlockClaim { store: self.clone(), path, owner: spec.owner, mode: spec.mode }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        None
    }
}

struct FlockClaim {
    store: Flock,
    path: PathBuf,
    owner: Owner,
    mode: Mode,
}

impl FlockClaim {
    fn attempt_now(&self) -> Result<Attempt> {
        let granted =
            Attempt::Granted(Grant { fence: None, fence_is_past: false, valid_for: None });
        if self.store.held().contains_key(&self.owner) {
            return Ok(granted);
        }
        let file = open(&self.path).map_err(unavailable)?;
        let locked = match self.mode {
            Mode::Shared => file.try_lock_shared(),
            Mode::Exclusive | Mode::Permits { .. } => file.try_lock(),
        };
        match locked {
            Ok(()) => {
                self.store.held().insert(self.owner, file);
                Ok(granted)
            }
            Err(TryLockError::WouldBlock) => {
                Ok(Attempt::Contended { retry: Retry::Poll, holder: Holder::Unknown })
            }
            Err(TryLockError::Error(error)) => Err(unavailable(error)),
        }
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    OpenOptions::new().create(true).truncate(false).write(true).open(path)
}

fn unavailable(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, error.to_string()).with_source(error)
}

impl Claim for FlockClaim {
    fn attempt(&mut self, _floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        Box::pin(async { self.attempt_now() })
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(std::future::pending())
    }

    fn renew(&mut self, _ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        let held = self.store.held().contains_key(&self.owner);
        Box::pin(
            async move { Ok(if held { Renewal::Held } else { Renewal::Lost(LossReason::Broken) }) },
        )
    }

    fn downgrade(&mut self, _ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(async { Err(Error::new(ErrorKind::Unsupported, "flock has no downgrade")) })
    }

    fn set_fence(&mut self, _fence: Fence) {}

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        let held = self.store.end(self.owner);
        Box::pin(async move { Ok(if held { Release::Released } else { Release::WasNotHeld }) })
    }
}

impl Drop for FlockClaim {
    fn drop(&mut self) {
        self.store.end(self.owner);
    }
}
