//! A lock for one at a time.

use std::time::Duration;

use crate::contract::Mode;
use crate::error::Result;
use crate::locks::guard::Guard;
use crate::locks::handle::LockHandle;
use crate::options::option_setters;

/// A lock that one holder at a time has, across every process that uses the store.
///
/// # Which lock do I need?
///
/// Within one process, `tokio::sync::Mutex` is all you need. Take this one when several processes
/// share what it protects. If most of them only read, take an [`RwLock`](crate::RwLock); if a few at a
/// time are fine, a [`Semaphore`](crate::Semaphore).
///
/// # What it guarantees
///
/// Two guards are never held at the same time, as far as clocks run at normal speed; every guard is
/// told of its loss before another could have the lock; every guard has a higher
/// [fence](Guard::fence) than the one before. Where the store is
/// [fair](crate::Capabilities::fair), who asked first gets it first.
///
/// It is not re-entrant: two guards from clones of one `Mutex`, or from the same one, exclude each
/// other like any two.
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

    /// Waits for the lock, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// [`TimedOut`](crate::ErrorKind::TimedOut) if others held it for all of `max_wait`;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer, or stops answering
    /// for longer than the ttl while waiting; [`Undecided`](crate::ErrorKind::Undecided) if a
    /// [`Quorum`](crate::Quorum) could not decide in time which client gets it; [`InvalidName`](crate::ErrorKind::InvalidName) and
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption) before anything is sent;
    /// [`Closed`](crate::ErrorKind::Closed).
    ///
    /// # Cancel safety
    ///
    /// If dropped, the place in the queue is given up, and what the store has granted or is about to
    /// grant is given back: at once, in the background. The next call starts at the end of the queue.
    pub async fn lock(&self) -> Result<Guard> {
        self.lock.acquire(Mode::Exclusive).await
    }

    /// Asks once; `None` if another holds the lock or waits for it.
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// If dropped, what the store grants is given back in the background.
    pub async fn try_lock(&self) -> Result<Option<Guard>> {
        self.try_lock_for(Duration::ZERO).await
    }

    /// Waits for the lock for at most this long; `None` if others hold it all the while.
    ///
    /// Zero is one attempt, and [`Duration::MAX`] is for ever.
    /// The queue is left before `None` is returned, as [`max_wait`](Self::max_wait) says.
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn try_lock_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.lock.try_acquire(Mode::Exclusive, wait).await
    }

    /// Blocks until the lock is held, for at most `max_wait`. Does what [`lock`](Self::lock) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock).
    pub fn blocking_lock(&self) -> Result<Guard> {
        self.lock.blocking_acquire(Mode::Exclusive)
    }

    /// Asks once; `None` if another holds the lock or waits for it. Does what [`try_lock`](Self::try_lock) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`try_lock`](Self::try_lock).
    pub fn blocking_try_lock(&self) -> Result<Option<Guard>> {
        self.blocking_try_lock_for(Duration::ZERO)
    }

    /// Blocks for at most this long; `None` if others hold the lock all the while. Does what [`try_lock_for`](Self::try_lock_for) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`try_lock_for`](Self::try_lock_for).
    pub fn blocking_try_lock_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.lock.blocking_try_acquire(Mode::Exclusive, wait)
    }
}
