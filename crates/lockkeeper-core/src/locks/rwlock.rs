//! A lock for many readers or one writer.

use std::time::Duration;

use crate::contract::Mode;
use crate::error::Result;
use crate::locks::guard::Guard;
use crate::locks::handle::LockHandle;
use crate::options::option_setters;

/// A lock that many readers or one writer have, across every process that uses the store.
///
/// # What it guarantees
///
/// While a writer holds, nobody else does. On a [fair](crate::Capabilities::fair) store readers and
/// writers wait in one queue: nobody overtakes a waiting writer, readers next to each other enter
/// together, and neither starves the other. A `try_` that fails leaves no trace, so a failed
/// [`try_write`](Self::try_write) does not hold up readers.
///
/// A write hold and a [`Mutex`](crate::Mutex) of the same name are the same thing.
///
/// # What it does not
///
/// A reader that holds and asks to read again stands behind a writer that waits, which waits for the
/// reader: a deadlock, as with `tokio::sync::RwLock`. There is no upgrade from read to write.
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

    /// Waits until no writer holds or waits before us, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// As [`Mutex::lock`](crate::Mutex::lock), and [`Unsupported`](crate::ErrorKind::Unsupported)
    /// where the store has no shared locks.
    ///
    /// # Cancel safety
    ///
    /// As [`Mutex::lock`](crate::Mutex::lock): the place in the queue is given up.
    pub async fn read(&self) -> Result<Guard> {
        self.lock.acquire(Mode::Shared).await
    }

    /// Asks once to read; `None` if a writer holds or waits.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// If dropped, what the store grants is given back in the background.
    pub async fn try_read(&self) -> Result<Option<Guard>> {
        self.try_read_for(Duration::ZERO).await
    }

    /// Waits to read for at most this long; zero is one attempt. The queue is left before `None` is returned, as
    /// [`max_wait`](Self::max_wait) says.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// As [`read`](Self::read).
    pub async fn try_read_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.lock.try_acquire(Mode::Shared, wait).await
    }

    /// Waits until nobody holds, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// As [`Mutex::lock`](crate::Mutex::lock).
    ///
    /// # Cancel safety
    ///
    /// As [`Mutex::lock`](crate::Mutex::lock): the readers that waited behind enter.
    pub async fn write(&self) -> Result<Guard> {
        self.lock.acquire(Mode::Exclusive).await
    }

    /// Asks once to write; `None` if anyone holds or waits. Leaves no trace if it fails.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// If dropped, what the store grants is given back in the background.
    pub async fn try_write(&self) -> Result<Option<Guard>> {
        self.try_write_for(Duration::ZERO).await
    }

    /// Waits to write for at most this long; zero is one attempt. The queue is left before `None` is returned, as
    /// [`max_wait`](Self::max_wait) says.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// As [`write`](Self::write).
    pub async fn try_write_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.lock.try_acquire(Mode::Exclusive, wait).await
    }

    /// Blocks until no writer holds or waits before it, for at most `max_wait`. Does what [`read`](Self::read) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn blocking_read(&self) -> Result<Guard> {
        self.lock.blocking_acquire(Mode::Shared)
    }

    /// Asks once to read; `None` if that would have to wait. Does what [`try_read`](Self::try_read) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`try_read`](Self::try_read).
    pub fn blocking_try_read(&self) -> Result<Option<Guard>> {
        self.blocking_try_read_for(Duration::ZERO)
    }

    /// Blocks for at most this long to read; zero is one attempt. Does what [`try_read_for`](Self::try_read_for) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`try_read_for`](Self::try_read_for).
    pub fn blocking_try_read_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.lock.blocking_try_acquire(Mode::Shared, wait)
    }

    /// Blocks until no other claim holds the lock, for at most `max_wait`. Does what [`write`](Self::write) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn blocking_write(&self) -> Result<Guard> {
        self.lock.blocking_acquire(Mode::Exclusive)
    }

    /// Asks once to write; `None` if that would have to wait. Does what [`try_write`](Self::try_write) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`try_write`](Self::try_write).
    pub fn blocking_try_write(&self) -> Result<Option<Guard>> {
        self.blocking_try_write_for(Duration::ZERO)
    }

    /// Blocks for at most this long to write; zero is one attempt. Does what [`try_write_for`](Self::try_write_for) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`try_write_for`](Self::try_write_for).
    pub fn blocking_try_write_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.lock.blocking_try_acquire(Mode::Exclusive, wait)
    }
}
