//! A lock for a few at a time.

use std::time::Duration;

use crate::blocking_runtime::block_on;
use crate::contract::{Kind, Mode};
use crate::error::{Error, Result};
use crate::locks::guard::Guard;
use crate::locks::handle::LockHandle;
use crate::options::{invalid, option_setters};

/// A lock that a number of holders have at a time, across every process that uses the store.
///
/// # If clients disagree about the number
///
/// Each acquire says how many permits it believes there are. On a store that counts permits itself, a
/// claim enters only if all permits in use, with its own, stay within the *smallest* number that it
/// and the current holders believe in: no holder ever sees more in use than it was promised. On a
/// store where a semaphore is made of [slots](crate::Slots), all in use stay within the *largest*
/// number. So lower the number everywhere before you rely on it, and raise it in any order.
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

    /// Waits for one permit, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// As [`Mutex::lock`](crate::Mutex::lock), and [`Unsupported`](crate::ErrorKind::Unsupported)
    /// where the store has no semaphores.
    ///
    /// # Cancel safety
    ///
    /// As [`Mutex::lock`](crate::Mutex::lock): the place in the queue is given up.
    pub async fn acquire(&self) -> Result<Guard> {
        self.acquire_many(1).await
    }

    /// Waits for several permits at once, for at most `max_wait`. One guard holds them all.
    ///
    /// Those who wait behind wait for it too, even if there are permits enough for them: else a big
    /// claim would never get its turn.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), and [`InvalidOption`](crate::ErrorKind::InvalidOption) at once
    /// for none, or for more than there are.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_many(&self, permits: u32) -> Result<Guard> {
        self.lock.acquire(self.mode(permits)?).await
    }

    /// Asks once for a permit; `None` if there is none, or others wait.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// If dropped, what the store grants is given back in the background.
    pub async fn try_acquire(&self) -> Result<Option<Guard>> {
        self.try_acquire_many(1).await
    }

    /// Asks once for several permits; `None` if there are not enough, or others wait.
    ///
    /// # Errors
    ///
    /// As [`acquire_many`](Self::acquire_many), without `TimedOut`; and [`Undecided`](crate::ErrorKind::Undecided) on a
    /// store whose semaphores are made of [`Slots`](crate::Slots), if another process died while it tried for several.
    ///
    /// # Cancel safety
    ///
    /// If dropped, what the store grants is given back in the background.
    pub async fn try_acquire_many(&self, permits: u32) -> Result<Option<Guard>> {
        self.try_acquire_many_for(permits, Duration::ZERO).await
    }

    /// Waits for a permit for at most this long; zero is one attempt. The queue is left before `None` is returned, as
    /// [`max_wait`](Self::max_wait) says.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.try_acquire_many_for(1, wait).await
    }

    /// Waits for several permits for at most this long; zero is one attempt. The queue is left before `None` is
    /// returned, as [`max_wait`](Self::max_wait) says.
    ///
    /// # Errors
    ///
    /// As [`acquire_many`](Self::acquire_many), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire_many_for(
        &self,
        permits: u32,
        wait: Duration,
    ) -> Result<Option<Guard>> {
        self.lock.try_acquire(self.mode(permits)?, wait).await
    }

    /// How many permits are not in use, as the store sees it at this moment. Others may take them
    /// before you do: for showing, not for deciding.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) if the store cannot be looked into.
    ///
    /// # Cancel safety
    ///
    /// Dropping it changes nothing.
    pub async fn available(&self) -> Result<u32> {
        let name = self.lock.name.as_ref().map_err(Error::clone)?;
        let inspector = self.lock.context.backend.inspector();
        let at = |error: Error| error.at(self.lock.context.backend.name(), "available", name);
        let inspector = inspector.ok_or_else(|| at(Error::unsupported("way to be looked into")))?;
        let shown = inspector.show(name).await.map_err(at)?;
        let semaphore = shown.iter().filter(|info| info.kind == Kind::Semaphore);
        let used =
            semaphore.flat_map(|info| &info.holders).fold(0_u32, |used, holder| {
                match holder.mode {
                    Mode::Permits { take, .. } => used.saturating_add(take),
                    Mode::Exclusive | Mode::Shared => used,
                }
            });
        Ok(self.permits.saturating_sub(used))
    }

    /// Blocks until there is a permit, for at most `max_wait`. Does what [`acquire`](Self::acquire) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire).
    pub fn blocking_acquire(&self) -> Result<Guard> {
        self.blocking_acquire_many(1)
    }

    /// Blocks until there are so many permits at once, for at most `max_wait`. Does what [`acquire_many`](Self::acquire_many) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`acquire_many`](Self::acquire_many).
    pub fn blocking_acquire_many(&self, permits: u32) -> Result<Guard> {
        self.lock.blocking_acquire(self.mode(permits)?)
    }

    /// Asks once for a permit; `None` if there is none, or others wait. Does what [`try_acquire`](Self::try_acquire) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`try_acquire`](Self::try_acquire).
    pub fn blocking_try_acquire(&self) -> Result<Option<Guard>> {
        self.blocking_try_acquire_many(1)
    }

    /// Asks once for several permits; `None` if there are not enough, or others wait. Does what [`try_acquire_many`](Self::try_acquire_many) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`try_acquire_many`](Self::try_acquire_many).
    pub fn blocking_try_acquire_many(&self, permits: u32) -> Result<Option<Guard>> {
        self.blocking_try_acquire_many_for(permits, Duration::ZERO)
    }

    /// Blocks for at most this long for a permit; zero is one attempt. Does what [`try_acquire_for`](Self::try_acquire_for) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`try_acquire_for`](Self::try_acquire_for).
    pub fn blocking_try_acquire_for(&self, wait: Duration) -> Result<Option<Guard>> {
        self.blocking_try_acquire_many_for(1, wait)
    }

    /// Blocks for at most this long for several permits; zero is one attempt. Does what [`try_acquire_many_for`](Self::try_acquire_many_for) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`try_acquire_many_for`](Self::try_acquire_many_for).
    pub fn blocking_try_acquire_many_for(
        &self,
        permits: u32,
        wait: Duration,
    ) -> Result<Option<Guard>> {
        self.lock.blocking_try_acquire(self.mode(permits)?, wait)
    }

    /// Returns how many permits are not in use at this moment. Does what [`available`](Self::available) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`available`](Self::available).
    pub fn blocking_available(&self) -> Result<u32> {
        block_on(self.available())
    }

    fn mode(&self, take: u32) -> Result<Mode> {
        if take == 0 {
            return Err(self.lock.error(invalid("at least one permit must be asked for")));
        }
        if take > self.permits {
            let message = format!("{take} permits asked for, of {} in all", self.permits);
            return Err(self.lock.error(invalid(message)));
        }
        Ok(Mode::Permits { take, of: self.permits })
    }
}
