//! Mutexes.

use std::time::Duration;

use crate::contract::Mode;
use crate::error::Result;
use crate::locks::guard::Guard;
use crate::locks::handle::LockHandle;
use crate::options::option_setters;

/// An exclusive lock on a name, shared by all processes that use the same store. From
/// [`Keeper::mutex`](crate::Keeper::mutex).
///
/// # Which lock to use
///
/// Within one process, `tokio::sync::Mutex` is enough. Use this type when several processes share a resource. If most of
/// them only read it, use an [`RwLock`](crate::RwLock). If a limited number may use it at the same time, use a
/// [`Semaphore`](crate::Semaphore).
///
/// # What it guarantees
///
/// - At most one guard holds the lock, as long as clocks run at normal speed.
/// - A guard reports its loss before the store can grant the lock to another client. [`Guard`] states the exceptions.
/// - On a store with [fences](crate::Capabilities::fences), each guard has a higher [fence](Guard::fence) than all guards
///   before it.
/// - On a [fair](crate::Capabilities::fair) store, waiters acquire the lock in the order in which they started to wait.
///
/// # What it does not guarantee
///
/// The lock is not re-entrant. Two guards from one `Mutex`, or from its clones, exclude each other like any others.
/// [`scope`](fn@crate::scope) provides re-entrancy.
///
/// # Examples
///
/// ```
/// # use lockkeeper_core as lockkeeper;
/// use lockkeeper::{Keeper, Memory};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// let keeper = Keeper::new(Memory::new());
/// let orders = keeper.mutex("orders/42");
///
/// let guard = orders.lock().await?;
/// assert!(orders.try_lock().await?.is_none());
/// guard.release().await?;
/// assert!(orders.try_lock().await?.is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Mutex {
    lock: LockHandle,
}

impl Mutex {
    pub(crate) fn new(lock: LockHandle) -> Self {
        Self { lock }
    }

    option_setters!(lock.options);

    /// Waits until the lock is acquired, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// - [`TimedOut`](crate::ErrorKind::TimedOut) if other clients held the lock for all of `max_wait`.
    /// - [`Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer the first attempt, or fails for
    ///   longer than the TTL during the wait.
    /// - [`Undecided`](crate::ErrorKind::Undecided) if the votes of a [`Quorum`](crate::Quorum) stay split.
    /// - [`InvalidName`](crate::ErrorKind::InvalidName) or [`InvalidOption`](crate::ErrorKind::InvalidOption), before any
    ///   I/O.
    /// - [`Closed`](crate::ErrorKind::Closed) if the keeper has been closed.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the client leaves the queue in the background, and releases the lock if it was already
    /// granted. The next call starts at the end of the queue.
    pub async fn lock(&self) -> Result<Guard> {
        self.lock.acquire(Mode::Exclusive).await
    }

    /// Attempts to acquire the lock without waiting. Returns `None` if another client holds it or waits for it.
    ///
    /// # Errors
    ///
    /// Same as [`lock`](Self::lock), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lock is released in the background if it was granted meanwhile.
    pub async fn try_lock(&self) -> Result<Option<Guard>> {
        self.try_lock_for(Duration::ZERO).await
    }

    /// Waits until the lock is acquired, for at most `wait`. Returns `None` if other clients hold it for all that time.
    ///
    /// Zero means one attempt, and [`Duration::MAX`] no limit. The client leaves the queue before `None` is returned, as
    /// described at [`max_wait`](Self::max_wait).
    ///
    /// # Errors
    ///
    /// Same as [`lock`](Self::lock), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// Same as [`lock`](Self::lock).
    pub async fn try_lock_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.lock.try_acquire(Mode::Exclusive, wait).await
    }

    /// Blocks until the lock is acquired, for at most `max_wait`. The [blocking](crate::blocking) form of
    /// [`lock`](Self::lock).
    ///
    /// # Errors
    ///
    /// Same as [`lock`](Self::lock).
    pub fn blocking_lock(&self) -> Result<Guard> {
        self.lock.blocking_acquire(Mode::Exclusive)
    }

    /// Attempts to acquire the lock without waiting for other clients. The [blocking](crate::blocking) form of
    /// [`try_lock`](Self::try_lock).
    ///
    /// # Errors
    ///
    /// Same as [`try_lock`](Self::try_lock).
    pub fn blocking_try_lock(&self) -> Result<Option<Guard>> {
        self.blocking_try_lock_for(Duration::ZERO)
    }

    /// Blocks until the lock is acquired, for at most `wait`. The [blocking](crate::blocking) form of
    /// [`try_lock_for`](Self::try_lock_for).
    ///
    /// # Errors
    ///
    /// Same as [`try_lock_for`](Self::try_lock_for).
    pub fn blocking_try_lock_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.lock.blocking_try_acquire(Mode::Exclusive, wait)
    }
}
