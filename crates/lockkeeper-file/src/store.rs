//! The raw store: the directory and its notifications, and the lock that separates claims from inspection.

use std::io;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper_core::{Error, ErrorKind, Result};

use crate::dir::{Dir, Opened};
use crate::error::{found, locked, unavailable};
use crate::lock_file::LockFile;
use crate::names;
use crate::notify::Watcher;

/// If another process inspects the directory for longer than this, it counts as stopped. An inspection takes much less, even
/// on a busy machine.
pub(crate) const MAX_INSPECTION: Duration = Duration::from_secs(1);
/// The pause between two checks of [`poll_until`].
const PAUSE: Duration = Duration::from_millis(1);

/// The raw store, which claims and inspection share: exclusive and shared locks. [`File`](crate::File) wraps it in a
/// local queue and makes semaphores of it. Clones are the same store.
#[derive(Debug, Clone)]
pub(crate) struct Store(Arc<Shared>);

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) dir: Dir,
    pub(crate) fence: bool,
    pub(crate) inherit: bool,
    /// `None` if waiters poll.
    pub(crate) watcher: Option<Watcher>,
}

impl Deref for Store {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Store {
    pub(crate) fn new(shared: Shared) -> Self {
        Self(Arc::new(shared))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path_of(&names::file_name(name))
    }

    /// Opens a lock file. Creates it, and the directory, if missing.
    pub(crate) fn make(&self, file: &str) -> io::Result<Opened> {
        match self.dir.make(file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.refresh_dir()?;
                self.dir.make(file)
            }
            made => made,
        }
    }

    /// Reopens the directory if it is no longer the one at its path. Creates it if it is missing.
    pub(crate) fn refresh_dir(&self) -> io::Result<()> {
        self.dir.refresh().map(|reopened| self.watch_dir(reopened))
    }

    /// Does the same as [`refresh_dir`](Self::refresh_dir), but fails if the directory is missing.
    pub(crate) fn reopen_dir(&self) -> io::Result<()> {
        self.dir.reopen().map(|reopened| self.watch_dir(reopened))
    }

    fn watch_dir(&self, reopened: bool) {
        if let Some(watcher) = self.watcher.as_ref().filter(|_| reopened) {
            watcher.watch_dir(self.dir.path());
        }
    }

    /// Blocks inspection and `gc` while the returned lock is held: see [`FileClaim`](crate::claim::FileClaim). Returns
    /// `None` if one of them is running.
    pub(crate) fn block_inspection(&self) -> io::Result<Option<LockFile>> {
        let dir = self.dir.to_lock()?;
        Ok(locked(dir.try_lock_shared())?.then_some(dir))
    }

    /// Returns the lock that inspection and `gc` hold while they lock files. Returns `None` if the directory is missing.
    pub(crate) async fn lock_for_inspection(&self) -> Result<Option<LockFile>> {
        let dir = self.reopen_dir().and_then(|()| self.dir.to_lock());
        let Some(dir) = found(dir).map_err(unavailable)? else { return Ok(None) };
        if poll_until(MAX_INSPECTION, || locked(dir.try_lock())).await.map_err(unavailable)? {
            return Ok(Some(dir));
        }
        let dir = self.dir.path().display();
        let message = format!(
            "another process has been inspecting \"{dir}\" for more than a second: it may be stopped, so resume or end it"
        );
        Err(Error::new(ErrorKind::Unavailable, message))
    }
}

/// Repeats a check of inspection until it succeeds or the limit has passed. Claims do not use this: the engine waits for
/// them.
pub(crate) async fn poll_until(
    limit: Duration,
    mut check: impl FnMut() -> io::Result<bool>,
) -> io::Result<bool> {
    let start = Instant::now();
    loop {
        if check()? {
            return Ok(true);
        }
        if start.elapsed() > limit {
            return Ok(false);
        }
        tokio::time::sleep(PAUSE).await;
    }
}
