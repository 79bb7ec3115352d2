//! The store: a directory.

use std::fs::{self, TryLockError};
use std::io;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper_core::{
    Backend, Capabilities, Claim, ClaimSpec, Error, ErrorKind, Fences, Inspector, LocalQueue,
    Result, Slots,
};

use crate::claim::FileClaim;
use crate::dir::{Dir, Opened};
use crate::names;
use crate::watch::Watcher;

/// What the names of files begin with that are no locks and that nobody misses.
const TEMPORARY: &str = ".tmp-";
/// How long another process may inspect the directory before it counts as stopped: much longer than that takes, even on
/// a busy machine.
pub(crate) const MAX_LOOK: Duration = Duration::from_secs(1);
/// The pause between two looks of [`eventually`].
const PAUSE: Duration = Duration::from_millis(1);

/// A store in a directory: locks between the processes of one machine.
///
/// A lock is a file that the operating system has locked for its holder (`flock`). It ends when it is
/// released or when its process does, however that ends, and is not carried into programs that the
/// process starts. Waiters are woken by inotify on Linux, and look again with growing pauses elsewhere.
///
/// It does not let waiters in by their order, has no leases, tickets or downgrade, and does not exclude
/// other machines. Its calls are short calls to the file system, made in the caller's own task: the
/// directory should be a local one.
///
/// Clones are the same store. Each [`open`](Self::open) has a thread and an inotify instance of its own,
/// so open a directory once and clone.
///
/// # Examples
///
/// ```
/// use lockkeeper_core::Keeper;
/// use lockkeeper_file::File;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let temporary = tempfile::tempdir()?;
/// # let dir = temporary.path();
/// let store = File::open(dir)?;
/// let keeper = Keeper::new(store.clone());
/// keeper.with_lock("orders/42", async |guard| println!("fence {:?}", guard.fence())).await?;
/// let removed = store.gc().await?; // files stay until somebody tidies up
/// assert_eq!(removed, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct File {
    pub(crate) store: Store,
    /// Semaphores are made of exclusive locks.
    slots: Slots,
}

impl File {
    /// Opens the store in a directory, which is created with mode 0700 if it is missing, now or later.
    ///
    /// # Errors
    ///
    /// [`Config`](ErrorKind::Config) if there is something else at the path, or if other users can replace the lock
    /// files: the directory belongs to neither this user nor root, or its group or every user may write to it and it does
    /// not have the sticky bit. [`Unavailable`](ErrorKind::Unavailable) if the directory cannot be created or
    /// written to.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Self::options().open(dir)
    }

    /// The store that a URL names: `file:/run/lockkeeper`, `file:locks?fence=off`.
    ///
    /// The path is absolute, or relative to where the process is now. What has a meaning in a URL is
    /// written in it as `%` and two hexadecimal digits: a question mark, a number sign and the percent sign itself.
    /// Behind a question mark stand options, joined by `&`, as they are on [`Options`]: `fence=off`,
    /// `polling=on`, `inherit=on`.
    ///
    /// # Errors
    ///
    /// [`Config`](ErrorKind::Config) for a wrong URL, and as [`open`](Self::open).
    pub fn from_url(url: &str) -> Result<Self> {
        crate::url::open(url)
    }

    /// Options for a store that is to be opened.
    pub fn options() -> Options {
        Options { fence: true, polling: false, inherit: false }
    }

    /// The file of a lock.
    ///
    /// Whoever removes it while it is held takes the lock away from its holder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.store.path(name)
    }
}

/// How a store is opened. From [`File::options`].
#[derive(Debug, Clone)]
pub struct Options {
    fence: bool,
    polling: bool,
    inherit: bool,
}

impl Options {
    /// Whether grants carry a fence, and files say who holds them (yes if not set).
    ///
    /// Without, a lock costs less, and the store cannot be looked into. All who use a directory should
    /// agree: a holder that writes nothing leaves the name of the one before it in the file.
    #[must_use]
    pub fn fence(mut self, fence: bool) -> Self {
        self.fence = fence;
        self
    }

    /// Whether waiters look again by themselves and do not wait for a notice (no if not set).
    ///
    /// For file systems whose changes are not told, like a directory that several virtual machines
    /// share. Where there are no notices to be had at all, it is so anyway.
    #[must_use]
    pub fn polling(mut self, polling: bool) -> Self {
        self.polling = polling;
        self
    }

    /// Whether programs that the process starts while it holds a lock hold it with it (no if not set).
    ///
    /// A release frees it all the same. But if the process dies without one, the lock stays until those
    /// programs have ended, too. For a process that holds a lock on behalf of what it starts.
    #[must_use]
    pub fn inherit(mut self, inherit: bool) -> Self {
        self.inherit = inherit;
        self
    }

    /// Opens the store.
    ///
    /// # Errors
    ///
    /// As [`File::open`].
    pub fn open(&self, dir: impl AsRef<Path>) -> Result<File> {
        let dir = dir.as_ref();
        let dir = Dir::open(dir).map_err(|error| {
            let kind = match error.kind() {
                io::ErrorKind::NotADirectory
                | io::ErrorKind::AlreadyExists
                | io::ErrorKind::InvalidInput => ErrorKind::Config,
                _ => ErrorKind::Unavailable,
            };
            let message = format!("file: open \"{}\": {error}", dir.display());
            Error::new(kind, message).with_source(error)
        })?;
        let watcher = if self.polling { None } else { watcher() };
        if let Some(watcher) = &watcher {
            watcher.watch_dir(dir.path());
        }
        let (fence, inherit, watcher) = (self.fence, self.inherit, watcher.map(Arc::new));
        let store = Store { dir: Arc::new(dir), fence, inherit, watcher };
        let queue = LocalQueue::new(Arc::new(store.clone()));
        Ok(File { slots: Slots::new(Arc::new(queue)), store })
    }
}

fn watcher() -> Option<Watcher> {
    let started = Watcher::start();
    let failed = |error: &io::Error| {
        tracing::warn!(%error, "no notices of changed files, waiters look now and then instead");
    };
    started.inspect_err(failed).ok()
}

/// A name for a file that is there for a moment.
pub(crate) fn temporary() -> String {
    format!("{TEMPORARY}{:016x}", fastrand::u64(..))
}

/// Whether a file is one that was to be there for a moment.
pub(crate) fn is_temporary(file: &str) -> bool {
    file.starts_with(TEMPORARY)
}

/// A file that is locked now and then, and unlocked before it is closed.
///
/// Closing would do, if nobody else had it open. But while another thread starts a program, that has a copy
/// of every open file for a moment, between `fork` and `exec`, and the lock would stay with it.
#[derive(Debug)]
pub(crate) struct LockFile {
    file: fs::File,
    unlock: bool,
}

impl LockFile {
    pub(crate) fn new(file: OwnedFd) -> Self {
        Self { file: file.into(), unlock: true }
    }

    /// Closes without unlocking: programs that inherited the file keep the lock until they end.
    pub(crate) fn leave_to_programs(&mut self) {
        self.unlock = false;
    }
}

impl Deref for LockFile {
    type Target = fs::File;

    fn deref(&self) -> &fs::File {
        &self.file
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        if self.unlock {
            let _ = self.file.unlock();
        }
    }
}

/// Which file it is, whatever its name: its device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Id(u64, u64);

impl Id {
    /// From what `stat` says. (Not std's `metadata`, which asks for more and takes longer.)
    #[allow(
        clippy::unnecessary_cast,
        clippy::cast_sign_loss,
        reason = "other systems have other types"
    )]
    pub(crate) fn of(stat: &rustix::fs::Stat) -> Self {
        Self(stat.st_dev as u64, stat.st_ino as u64)
    }
}

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

    /// Keeps processes out that lock files only to inspect them or to tidy up: see [`FileClaim`]. `None` if
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

/// `None` if there is no such file.
pub(crate) fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a lock was had.
pub(crate) fn locked(result: Result<(), TryLockError>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

pub(crate) fn unavailable(error: io::Error) -> Error {
    // A fence that was refused is an error of ours already.
    if let Some(refused) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        return refused.clone();
    }
    Error::new(ErrorKind::Unavailable, error.to_string()).with_source(error)
}

impl Backend for Store {
    fn name(&self) -> &'static str {
        "file"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            leases: false,
            fair: false,
            push: self.watcher.is_some(),
            shared: true,
            permits: false,
            // From an exclusive to a shared flock there is a moment without any.
            downgrade: false,
            fences: if self.fence { Fences::Raisable } else { Fences::None },
        }
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        Ok(Box::new(FileClaim::new(self.clone(), spec)))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.fence.then_some(self as _)
    }
}

impl Backend for File {
    fn name(&self) -> &'static str {
        self.slots.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.slots.capabilities()
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        self.slots.claim(spec)
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.slots.inspector()
    }
}
