//! What claims and inspection share: the directory, its notices, and how they keep out of each other's way.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper_core::{Error, ErrorKind, Result};

use crate::dir::{Dir, Opened};
use crate::error::{found, locked, unavailable};
use crate::lock_file::LockFile;
use crate::names;
use crate::notify::Watcher;

/// How long another process may inspect the directory before it counts as stopped: much longer than that takes, even on
/// a busy machine.
pub(crate) const MAX_LOOK: Duration = Duration::from_secs(1);
/// The pause between two looks of [`eventually`].
const PAUSE: Duration = Duration::from_millis(1);

/// What claims and inspection share. Exclusive and shared locks; semaphores are made around it.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    pub(crate) dir: Arc<Dir>,
    pub(crate) fence: bool,
    pub(crate) inherit: bool,
    pub(crate) watcher: Option<Arc<Watcher>>,
}

impl Store {
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(names::file_name(name))
    }

    /// Opens a lock file, and creates it if it is missing, with its directory if need be.
    pub(crate) fn make(&self, file: &str) -> io::Result<Opened> {
        match self.dir.make(file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.refresh_dir()?;
                self.dir.make(file)
            }
            made => made,
        }
    }

    /// Opens the directory again if it is no longer the one at its path, and creates it if it is missing.
    pub(crate) fn refresh_dir(&self) -> io::Result<()> {
        self.dir.refresh().map(|reopened| self.watch_dir(reopened))
    }

    /// The same, without creating it: an error if it is missing.
    pub(crate) fn reopen_dir(&self) -> io::Result<()> {
        self.dir.reopen().map(|reopened| self.watch_dir(reopened))
    }

    fn watch_dir(&self, reopened: bool) {
        if let Some(watcher) = self.watcher.as_ref().filter(|_| reopened) {
            watcher.watch_dir(self.dir.path());
        }
    }

    /// Keeps processes out that lock files only to inspect them or to tidy up: see [`FileClaim`](crate::claim::FileClaim). `None` if
    /// one is inside now.
    pub(crate) fn keep_bystanders_out(&self) -> io::Result<Option<LockFile>> {
        let dir = self.dir.to_lock()?;
        Ok(locked(dir.try_lock_shared())?.then_some(dir))
    }

    /// Returns the lock to hold while files are locked only to inspect them or to tidy up. `None` if the directory is
    /// missing: then there is nothing to inspect.
    pub(crate) async fn as_bystander(&self) -> Result<Option<LockFile>> {
        let dir = self.reopen_dir().and_then(|()| self.dir.to_lock());
        let Some(dir) = found(dir).map_err(unavailable)? else { return Ok(None) };
        if eventually(MAX_LOOK, || locked(dir.try_lock())).await.map_err(unavailable)? {
            return Ok(Some(dir));
        }
        let message =
            "another process is looking into the directory and does not end: is it stopped?";
        Err(Error::new(ErrorKind::Unavailable, message))
    }
}

/// Repeats a question of inspection until the answer is yes, for a bounded time. Claims do not use this: the engine waits
/// for them.
pub(crate) async fn eventually(
    limit: Duration,
    mut is_so: impl FnMut() -> io::Result<bool>,
) -> io::Result<bool> {
    let start = Instant::now();
    loop {
        if is_so()? {
            return Ok(true);
        }
        if start.elapsed() > limit {
            return Ok(false);
        }
        tokio::time::sleep(PAUSE).await;
    }
}
