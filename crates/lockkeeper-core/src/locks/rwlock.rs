//! Readers-writer locks.

use std::time::Duration;

use crate::contract::Mode;
use crate::error::Result;
use crate::locks::guard::Guard;
use crate::locks::handle::LockHandle;
use crate::options::option_setters;

/// A readers-writer lock on a name, shared by all processes that use the same store. From
/// [`Keeper::rw_lock`](crate::Keeper::rw_lock).
///
/// # What it guarantees
///
/// Either one writer or any number of readers hold the lock. On a [fair](crate::Capabilities::fair) store, readers and
/// writers wait in one queue: no client overtakes a waiting writer, adjacent readers acquire the lock together, and
/// neither kind starves the other. A failed `try_` leaves no queue entry, so a failed [`try_write`](Self::try_write) does
/// not delay readers.
///
/// A write lock and a [`Mutex`](crate::Mutex) of the same name are the same lock.
///
/// # What it does not guarantee
///
/// A task that holds a read lock and waits for a second one deadlocks if a writer has started to wait meanwhile, as with
/// `tokio::sync::RwLock`. A read lock cannot be upgraded to a write lock.
///
/// # Examples
///
/// ```
/// # use lockkeeper_core as lockkeeper;
/// use lockkeeper::{Keeper, Memory};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// let report = Keeper::new(Memory::new()).rw_lock("report");
///
/// let write = report.write().await?;
/// assert!(report.try_read().await?.is_none());
/// write.downgrade().await?;
/// assert!(report.try_read().await?.is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct RwLock {
    lock: LockHandle,
}

impl RwLock {
    pub(crate) fn new(lock: LockHandle) -> Self {
        Self { lock }
    }

    option_setters!(lock.options);

    /// Waits until a read lock is acquired, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// Same as [`Mutex::lock`](crate::Mutex::lock), and [`Unsupported`](crate::ErrorKind::Unsupported) if the store has
    /// no shared locks.
    ///
    /// # Cancel safety
    ///
    /// Same as [`Mutex::lock`](crate::Mutex::lock).
    pub async fn read(&self) -> Result<Guard> {
        self.lock.acquire(Mode::Shared).await
    }

    /// Attempts to acquire a read lock without waiting. Returns `None` if a writer holds the lock or another client waits
    /// for it.
    ///
    /// # Errors
    ///
    /// Same as [`read`](Self::read), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lock is released in the background if it was granted meanwhile.
    pub async fn try_read(&self) -> Result<Option<Guard>> {
        self.try_read_for(Duration::ZERO).await
    }

    /// Waits until a read lock is acquired, for at most `wait`; zero means one attempt. Returns `None` after that time. The
    /// client leaves the queue before, as described at [`max_wait`](Self::max_wait).
    ///
    /// # Errors
    ///
    /// Same as [`read`](Self::read), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// Same as [`read`](Self::read).
    pub async fn try_read_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.lock.try_acquire(Mode::Shared, wait).await
    }

    /// Waits until the write lock is acquired, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// Same as [`Mutex::lock`](crate::Mutex::lock).
    ///
    /// # Cancel safety
    ///
    /// Same as [`Mutex::lock`](crate::Mutex::lock). Readers that waited only because of this writer acquire the lock.
    pub async fn write(&self) -> Result<Guard> {
        self.lock.acquire(Mode::Exclusive).await
    }

    /// Attempts to acquire the write lock without waiting. Returns `None` if another client holds the lock or waits for it.
    ///
    /// # Errors
    ///
    /// Same as [`write`](Self::write), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lock is released in the background if it was granted meanwhile.
    pub async fn try_write(&self) -> Result<Option<Guard>> {
        self.try_write_for(Duration::ZERO).await
    }

    /// Waits until the write lock is acquired, for at most `wait`; zero means one attempt. Returns `None` after that time.
    /// The client leaves the queue before, as described at [`max_wait`](Self::max_wait).
    ///
    /// # Errors
    ///
    /// Same as [`write`](Self::write), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// Same as [`write`](Self::write).
    pub async fn try_write_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.lock.try_acquire(Mode::Exclusive, wait).await
    }

    /// Blocks until a read lock is acquired, for at most `max_wait`. The [blocking](crate::blocking) form of
    /// [`read`](Self::read).
    ///
    /// # Errors
    ///
    /// Same as [`read`](Self::read).
    pub fn blocking_read(&self) -> Result<Guard> {
        self.lock.blocking_acquire(Mode::Shared)
    }

    /// Attempts to acquire a read lock without waiting for other clients. The [blocking](crate::blocking) form of
    /// [`try_read`](Self::try_read).
    ///
    /// # Errors
    ///
    /// Same as [`try_read`](Self::try_read).
    pub fn blocking_try_read(&self) -> Result<Option<Guard>> {
        self.blocking_try_read_for(Duration::ZERO)
    }

    /// Blocks until a read lock is acquired, for at most `wait`. The [blocking](crate::blocking) form of
    /// [`try_read_for`](Self::try_read_for).
    ///
    /// # Errors
    ///
    /// Same as [`try_read_for`](Self::try_read_for).
    pub fn blocking_try_read_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.lock.blocking_try_acquire(Mode::Shared, wait)
    }

    /// Blocks until the write lock is acquired, for at most `max_wait`. The [blocking](crate::blocking) form of
    /// [`write`](Self::write).
    ///
    /// # Errors
    ///
    /// Same as [`write`](Self::write).
    pub fn blocking_write(&self) -> Result<Guard> {
        self.lock.blocking_acquire(Mode::Exclusive)
    }

    /// Attempts to acquire the write lock without waiting for other clients. The [blocking](crate::blocking) form of
    /// [`try_write`](Self::try_write).
    ///
    /// # Errors
    ///
    /// Same as [`try_write`](Self::try_write).
    pub fn blocking_try_write(&self) -> Result<Option<Guard>> {
        self.blocking_try_write_for(Duration::ZERO)
    }

    /// Blocks until the write lock is acquired, for at most `wait`. The [blocking](crate::blocking) form of
    /// [`try_write_for`](Self::try_write_for).
    ///
    /// # Errors
    ///
    /// Same as [`try_write_for`](Self::try_write_for).
    pub fn blocking_try_write_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.lock.blocking_try_acquire(Mode::Exclusive, wait)
    }
}
