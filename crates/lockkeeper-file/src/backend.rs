//! The store: a directory.

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
use crate::store::Store;

/// A store in a directory: locks between the processes of one machine.
///
/// A lock is a file that the operating system has locked for its holder (`flock`). It ends when it is
/// released or when its process does, however that ends, and is not carried into programs that the
/// process starts. Waiters are woken by inotify on Linux, and look again with growing pauses elsewhere.
///
/// Waiters of one process enter in the order in which they came; between processes there is no order. It has no leases,
/// tickets or downgrade, and does not exclude other machines. Its calls are short calls to the file system, made in the caller's own task: the
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
        let (options, dir) = config::parse(url)?;
        options.open(dir)
    }

    /// Options for a store that is to be opened.
    pub fn options() -> Options {
        Options::default()
    }

    /// The file of a lock.
    ///
    /// Whoever removes it while it is held takes the lock away from its holder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.store.path(name)
    }

    /// Removes the files of locks that are not held, and returns how many those were.
    ///
    /// May be called at any time, from any process, by several at once. A claim that waits or has just opened such a
    /// file notices and creates a new one; a lock is never granted twice, and fences go on to rise. It need not
    /// be called: a file that stays costs a few bytes.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](lockkeeper_core::ErrorKind::Unavailable) if the directory cannot be read or written to.
    ///
    /// # Cancel safety
    ///
    /// If dropped, some files have been removed and others not.
    pub async fn gc(&self) -> Result<usize> {
        self.store.gc().await
    }
}

impl Options {
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
