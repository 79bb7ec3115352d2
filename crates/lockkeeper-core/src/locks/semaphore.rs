//! Semaphores.

use std::time::Duration;

use crate::blocking_runtime::block_on;
use crate::contract::Mode;
use crate::error::{Error, Result};
use crate::locks::guard::Guard;
use crate::locks::handle::LockHandle;
use crate::locks::inspect::Inspect;
use crate::options::{invalid, option_setters};

/// A counting semaphore on a name, shared by all processes that use the same store. From
/// [`Keeper::semaphore`](crate::Keeper::semaphore). It is independent of a mutex of the same name.
///
/// # If clients disagree about the number of permits
///
/// Each acquire sends the number of permits that its client is configured with.
///
/// - A store that counts permits itself (Redis, memory) grants an acquire only if all permits in use, including its own,
///   stay within the *smallest* number that it and the current holders sent.
/// - On a store whose semaphores are made of [slots](crate::Slots) (PostgreSQL, files), all permits in use stay within
///   the *largest* number.
///
/// To lower the limit, deploy the lower number to all clients before you rely on it. It can be raised in any order.
///
/// # Examples
///
/// ```
/// # use lockkeeper_core as lockkeeper;
/// use lockkeeper::{Keeper, Memory};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// let gpus = Keeper::new(Memory::new()).semaphore("gpu", 4);
///
/// let three = gpus.acquire_many(3).await?;
/// assert_eq!(gpus.available().await?, 1);
/// assert!(gpus.try_acquire_many(2).await?.is_none());
/// drop(three);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Semaphore {
    lock: LockHandle,
    permits: u32,
}

impl Semaphore {
    pub(crate) fn new(lock: LockHandle, permits: u32) -> Self {
        Self { lock, permits }
    }

    option_setters!(lock.options);

    /// Waits until one permit is acquired, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// Same as [`Mutex::lock`](crate::Mutex::lock), and [`Unsupported`](crate::ErrorKind::Unsupported) if the store has
    /// no semaphores.
    ///
    /// # Cancel safety
    ///
    /// Same as [`Mutex::lock`](crate::Mutex::lock).
    pub async fn acquire(&self) -> Result<Guard> {
        self.acquire_many(1).await
    }

    /// Waits until several permits are acquired, for at most `max_wait`. One guard holds them all.
    ///
    /// Waiters behind this one wait too, even if enough permits for them are free. Otherwise an acquire of many permits
    /// would starve.
    ///
    /// # Errors
    ///
    /// Same as [`acquire`](Self::acquire), and [`InvalidOption`](crate::ErrorKind::InvalidOption), before any I/O, for zero
    /// permits or more than the semaphore has.
    ///
    /// # Cancel safety
    ///
    /// Same as [`acquire`](Self::acquire).
    pub async fn acquire_many(&self, permits: u32) -> Result<Guard> {
        self.lock.acquire(self.mode(permits)?).await
    }

    /// Attempts to acquire one permit without waiting. Returns `None` if none is free or another client waits.
    ///
    /// # Errors
    ///
    /// Same as [`acquire`](Self::acquire), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, permits that were granted meanwhile are released in the background.
    pub async fn try_acquire(&self) -> Result<Option<Guard>> {
        self.try_acquire_many(1).await
    }

    /// Attempts to acquire several permits without waiting. Returns `None` if too few are free or another client waits.
    ///
    /// # Errors
    ///
    /// Same as [`acquire_many`](Self::acquire_many), without `TimedOut`. [`Undecided`](crate::ErrorKind::Undecided) on a
    /// store whose semaphores are made of [`Slots`](crate::Slots), if another process died during an attempt for several
    /// permits.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, permits that were granted meanwhile are released in the background.
    pub async fn try_acquire_many(&self, permits: u32) -> Result<Option<Guard>> {
        self.try_acquire_many_for(permits, Duration::ZERO).await
    }

    /// Waits until one permit is acquired, for at most `wait`; zero means one attempt. Returns `None` after that time. The
    /// client leaves the queue before, as described at [`max_wait`](Self::max_wait).
    ///
    /// # Errors
    ///
    /// Same as [`acquire`](Self::acquire), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// Same as [`acquire`](Self::acquire).
    pub async fn try_acquire_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.try_acquire_many_for(1, wait).await
    }

    /// Waits until several permits are acquired, for at most `wait`; zero means one attempt. Returns `None` after that time.
    /// The client leaves the queue before, as described at [`max_wait`](Self::max_wait).
    ///
    /// # Errors
    ///
    /// Same as [`acquire_many`](Self::acquire_many), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// Same as [`acquire`](Self::acquire).
    pub async fn try_acquire_many_for(
        &self,
        permits: u32,
        wait: Duration,
    ) -> Result<Option<Guard>> {
        self.lock.try_acquire(self.mode(permits)?, wait).await
    }

    /// Returns how many permits are free in the store. For display only: other clients may acquire them before this one
    /// does.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) if the store does not support inspection;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if it does not answer.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect on the store.
    pub async fn available(&self) -> Result<u32> {
        let name = self.lock.name.as_ref().map_err(Error::clone)?;
        let shown = Inspect::new(self.lock.context.clone())?.show_name(name).await?;
        let holders = shown.iter().flat_map(|info| &info.holders);
        let used = holders.fold(0_u32, |used, holder| match holder.mode {
            Mode::Permits { take, .. } => used.saturating_add(take),
            Mode::Exclusive | Mode::Shared => used,
        });
        Ok(self.permits.saturating_sub(used))
    }

    /// Blocks until one permit is acquired, for at most `max_wait`. The [blocking](crate::blocking) form of
    /// [`acquire`](Self::acquire).
    ///
    /// # Errors
    ///
    /// Same as [`acquire`](Self::acquire).
    pub fn blocking_acquire(&self) -> Result<Guard> {
        self.blocking_acquire_many(1)
    }

    /// Blocks until several permits are acquired, for at most `max_wait`. The [blocking](crate::blocking) form of
    /// [`acquire_many`](Self::acquire_many).
    ///
    /// # Errors
    ///
    /// Same as [`acquire_many`](Self::acquire_many).
    pub fn blocking_acquire_many(&self, permits: u32) -> Result<Guard> {
        self.lock.blocking_acquire(self.mode(permits)?)
    }

    /// Attempts to acquire one permit without waiting for other clients. The [blocking](crate::blocking) form of
    /// [`try_acquire`](Self::try_acquire).
    ///
    /// # Errors
    ///
    /// Same as [`try_acquire`](Self::try_acquire).
    pub fn blocking_try_acquire(&self) -> Result<Option<Guard>> {
        self.blocking_try_acquire_many(1)
    }

    /// Attempts to acquire several permits without waiting for other clients. The [blocking](crate::blocking) form of
    /// [`try_acquire_many`](Self::try_acquire_many).
    ///
    /// # Errors
    ///
    /// Same as [`try_acquire_many`](Self::try_acquire_many).
    pub fn blocking_try_acquire_many(&self, permits: u32) -> Result<Option<Guard>> {
        self.blocking_try_acquire_many_for(permits, Duration::ZERO)
    }

    /// Blocks until one permit is acquired, for at most `wait`. The [blocking](crate::blocking) form of
    /// [`try_acquire_for`](Self::try_acquire_for).
    ///
    /// # Errors
    ///
    /// Same as [`try_acquire_for`](Self::try_acquire_for).
    pub fn blocking_try_acquire_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.blocking_try_acquire_many_for(1, wait)
    }

    /// Blocks until several permits are acquired, for at most `wait`. The [blocking](crate::blocking) form of
    /// [`try_acquire_many_for`](Self::try_acquire_many_for).
    ///
    /// # Errors
    ///
    /// Same as [`try_acquire_many_for`](Self::try_acquire_many_for).
    pub fn blocking_try_acquire_many_for(
        &self,
        permits: u32,
        wait: Duration,
    ) -> Result<Option<Guard>> {
        self.lock.blocking_try_acquire(self.mode(permits)?, wait)
    }

    /// Returns how many permits are free in the store. The [blocking](crate::blocking) form of
    /// [`available`](Self::available).
    ///
    /// # Errors
    ///
    /// Same as [`available`](Self::available).
    pub fn blocking_available(&self) -> Result<u32> {
        block_on(self.available())
    }

    fn mode(&self, take: u32) -> Result<Mode> {
        if take == 0 {
            return Err(self.lock.error(invalid("cannot acquire 0 permits: acquire at least 1")));
        }
        if take > self.permits {
            let message = format!("cannot acquire {take} of {} permits", self.permits);
            return Err(self.lock.error(invalid(message)));
        }
        Ok(Mode::Permits { take, of: self.permits })
    }
}
