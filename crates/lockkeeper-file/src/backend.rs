//! The public store.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lockkeeper_core::{
    Backend, Capabilities, Claim, ClaimSpec, Error, ErrorKind, Fences, Inspector, LocalQueue,
    Result, Slots,
};

use crate::claim::FileClaim;
use crate::config::{self, Options};
use crate::dir::Dir;
use crate::notify::Watcher;
use crate::store::{Shared, Store};

/// A store in a directory: locks between the processes of one machine.
///
/// A lock is a file that is locked with `flock`. It ends when it is released or when its process ends, including by
/// `kill -9`. Programs that the process starts do not inherit it, unless [`inherit`](Options::inherit) is set. On Linux,
/// inotify wakes waiters; elsewhere they poll with backoff.
///
/// Waiters of one process acquire in FIFO order. There is no order between processes. The store has no leases,
/// tickets or downgrade, and does not exclude other machines. It makes short file system calls in the caller's task, so
/// the directory should be local.
///
/// Clones are the same store. Each [`open`](Self::open) starts a thread and an inotify instance, so open a directory once
/// and clone the store.
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
/// let removed = store.gc().await?; // files stay until `gc` removes them
/// assert_eq!(removed, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct File {
    pub(crate) store: Store,
    /// Builds semaphores from exclusive locks.
    slots: Slots,
}

impl File {
    /// Opens the store in a directory. Creates the directory with mode 0700 if it is missing, now or later.
    ///
    /// # Errors
    ///
    /// [`Config`](ErrorKind::Config) if the path is not a directory, or if other users can replace the lock
    /// files: the directory belongs to neither this user nor root, or its group or every user may write to it without
    /// the sticky bit. [`Unavailable`](ErrorKind::Unavailable) if the directory cannot be created or
    /// written to.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        Self::options().open(dir)
    }

    /// Opens the store of a URL: `file:/run/lockkeeper`, `file:locks?fence=off`.
    ///
    /// The path is absolute, or relative to the current directory. Write a question mark, a number sign or a percent sign
    /// in it as `%` and two hexadecimal digits. The options of [`Options`] follow a question mark, joined
    /// by `&`: `fence=off`, `polling=on`, `inherit=on`.
    ///
    /// # Errors
    ///
    /// [`Config`](ErrorKind::Config) for an invalid URL, and the errors of [`open`](Self::open).
    pub fn from_url(url: &str) -> Result<Self> {
        let (options, dir) = config::parse(url)?;
        options.open(dir)
    }

    /// Returns the default options.
    pub fn options() -> Options {
        Options::default()
    }

    /// Returns the path of a lock's file.
    ///
    /// If the file is removed while the lock is held, its holder loses the lock.
    pub fn path(&self, name: &str) -> PathBuf {
        self.store.path(name)
    }

    /// Removes the files of locks that are not held, and returns their number. Keeps files whose last fence is ahead of the
    /// clock, because a new file could not continue it.
    ///
    /// May be called at any time, even by several processes concurrently. A claim that has just opened a file that this
    /// removes creates a new one. No lock is granted twice, and fences continue to rise. Calling it is optional: a file that
    /// remains costs a few bytes.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](lockkeeper_core::ErrorKind::Unavailable) if the directory cannot be read or written to.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, some of the files have been removed.
    pub async fn gc(&self) -> Result<usize> {
        self.store.gc().await.map_err(|error| error.during("file", "gc"))
    }
}

impl Options {
    /// Opens the store.
    ///
    /// # Errors
    ///
    /// Same as [`File::open`].
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
        let (fence, inherit) = (self.fence, self.inherit);
        let store = Store::new(Shared { dir, fence, inherit, watcher });
        let queue = LocalQueue::new(Arc::new(store.clone()));
        Ok(File { slots: Slots::new(Arc::new(queue)), store })
    }
}

fn watcher() -> Option<Watcher> {
    let started = Watcher::start();
    let failed = |error: &io::Error| {
        tracing::warn!(%error, "inotify is not available: waiters for lock files poll");
    };
    started.inspect_err(failed).ok()
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
            // Converting an exclusive flock to a shared one is not atomic (flock(2)).
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
