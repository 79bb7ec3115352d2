//! Sets of mutexes that are acquired together.

use std::sync::Arc;
use std::time::Duration;

use crate::blocking_runtime::block_on;
use crate::contract::{BoxFuture, Mode};
use crate::engine::context::KeeperContext;
use crate::engine::hold::{ReleaseOutcome, State};
use crate::engine::while_held::run_while_held;
use crate::error::{Error, Result};
use crate::futures::{boxed, first, join_all};
use crate::locks::guard::Guard;
use crate::locks::handle::LockHandle;
use crate::loss::LossReason;
use crate::name::Name;
use crate::options::{Options, invalid, option_setters};
use crate::release::LEAVE_WITHIN;

/// A set of mutexes that is acquired as a whole: all of them or none. From
/// [`Keeper::lock_all`](crate::Keeper::lock_all).
///
/// The mutexes are acquired one after the other in the order of their names, regardless of the order in which they are
/// given. So clients that acquire overlapping sets do not deadlock. A name that is given twice is locked once. `max_wait`
/// limits the wait for the whole set.
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
/// let guards = keeper.lock_all(["accounts/b", "accounts/a"]).lock().await?;
/// assert!(guards.get("accounts/a").is_some());
/// assert!(keeper.mutex("accounts/b").try_lock().await?.is_none());
/// guards.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct LockAll {
    context: Arc<KeeperContext>,
    names: Result<Vec<Name>>,
    options: Options,
}

impl LockAll {
    pub(crate) fn new(
        context: Arc<KeeperContext>,
        names: Result<Vec<Name>>,
        options: Options,
    ) -> Self {
        let names = names.and_then(|mut names| {
            names.sort();
            names.dedup();
            if names.is_empty() {
                Err(invalid("lock_all was given no names: give at least one"))
            } else {
                Ok(names)
            }
        });
        Self { context, names, options }
    }

    option_setters!(options);

    /// Waits until all mutexes are acquired, for at most `max_wait` in total.
    ///
    /// # Errors
    ///
    /// Same as [`Mutex::lock`](crate::Mutex::lock), for the first mutex that fails, and
    /// [`Lost`](crate::ErrorKind::Lost) if one mutex is lost during the wait for the others. The mutexes acquired so far
    /// are released before this returns. If the store does not confirm within 100 ms, the release continues in the
    /// background.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the mutexes acquired so far are released in the background.
    pub async fn lock(&self) -> Result<Guards> {
        self.lock_on(self.context.live()).await
    }

    /// Attempts to acquire all mutexes without waiting. Returns `None` if another client holds one of them or waits for
    /// it. The mutexes acquired so far are released first, as described at [`lock`](Self::lock).
    ///
    /// # Errors
    ///
    /// Same as [`lock`](Self::lock), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// Same as [`lock`](Self::lock).
    pub async fn try_lock(&self) -> Result<Option<Guards>> {
        self.try_lock_for(Duration::ZERO).await
    }

    /// Waits until all mutexes are acquired, for at most `wait` in total; zero means one attempt each. Before `None` is
    /// returned, the mutexes acquired so far are released, as described at [`lock`](Self::lock).
    ///
    /// # Errors
    ///
    /// Same as [`lock`](Self::lock), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// Same as [`lock`](Self::lock).
    pub async fn try_lock_for(&self, wait: Duration) -> Result<Option<Guards>> {
        self.try_lock_on(self.context.live(), wait).await
    }

    /// Blocks until all mutexes are acquired, for at most `max_wait` in total. The [blocking](crate::blocking) form of
    /// [`lock`](Self::lock).
    ///
    /// # Errors
    ///
    /// Same as [`lock`](Self::lock).
    pub fn blocking_lock(&self) -> Result<Guards> {
        block_on(self.lock_on(self.context.for_blocking()))
    }

    /// Attempts to acquire all mutexes without waiting for other clients. The [blocking](crate::blocking) form of
    /// [`try_lock`](Self::try_lock).
    ///
    /// # Errors
    ///
    /// Same as [`try_lock`](Self::try_lock).
    pub fn blocking_try_lock(&self) -> Result<Option<Guards>> {
        self.blocking_try_lock_for(Duration::ZERO)
    }

    /// Blocks until all mutexes are acquired, for at most `wait` in total. The [blocking](crate::blocking) form of
    /// [`try_lock_for`](Self::try_lock_for).
    ///
    /// # Errors
    ///
    /// Same as [`try_lock_for`](Self::try_lock_for).
    pub fn blocking_try_lock_for(&self, wait: Duration) -> Result<Option<Guards>> {
        block_on(self.try_lock_on(self.context.for_blocking(), wait))
    }

    async fn lock_on(&self, context: &Arc<KeeperContext>) -> Result<Guards> {
        match self.acquire_set(context, self.options.max_wait).await? {
            AcquiredSet::Complete(guards) => Ok(guards),
            AcquiredSet::Contended { name, waited } => {
                Err(Error::timed_out(waited).at(context.store, "lock", &name))
            }
        }
    }

    async fn try_lock_on(
        &self,
        context: &Arc<KeeperContext>,
        wait: Duration,
    ) -> Result<Option<Guards>> {
        match self.acquire_set(context, Some(wait)).await? {
            AcquiredSet::Complete(guards) => Ok(Some(guards)),
            AcquiredSet::Contended { .. } => Ok(None),
        }
    }

    async fn acquire_set(
        &self,
        context: &Arc<KeeperContext>,
        wait: Option<Duration>,
    ) -> Result<AcquiredSet> {
        let start = tokio::time::Instant::now();
        let mut guards = Guards(Vec::new());
        for name in self.names.as_ref().map_err(Error::clone)? {
            let left = wait.map_or(Duration::MAX, |wait| wait.saturating_sub(start.elapsed()));
            let options = self.options.clone();
            let lock = LockHandle { context: context.clone(), name: Ok(name.clone()), options };
            let next = lock.try_acquire_on(context, Mode::Exclusive, left);
            // If one mutex is lost, the set cannot be completed.
            let failed = match guards.while_held(next).await {
                Ok(Ok(Some(guard))) => {
                    guards.0.push(guard);
                    continue;
                }
                Ok(Ok(None)) => {
                    let (name, waited) = (name.clone(), start.elapsed());
                    Ok(AcquiredSet::Contended { name, waited })
                }
                Ok(Err(error)) | Err(error) => Err(error),
            };
            release_incomplete(context, guards).await;
            return failed;
        }
        Ok(AcquiredSet::Complete(guards))
    }
}

/// Releases an incomplete set before the caller gets the outcome. If the store does not confirm in time, the release
/// continues in the background.
async fn release_incomplete(context: &KeeperContext, guards: Guards) {
    if guards.0.is_empty() {
        return;
    }
    // The timer belongs to the keeper's runtime: the caller's task may be on another, or on none.
    let end = {
        let _entered = context.enter();
        tokio::time::sleep(LEAVE_WITHIN)
    };
    tokio::select! {
        biased;
        _ = guards.release() => {}
        () = end => {}
    }
}

enum AcquiredSet {
    Complete(Guards),
    /// The mutex that was not acquired in time.
    Contended {
        name: Name,
        waited: Duration,
    },
}

/// The guards of a [`LockAll`], sorted by name.
#[derive(Debug)]
#[must_use = "dropping the guards releases the locks at once"]
pub struct Guards(Vec<Guard>);

impl Guards {
    /// Returns the guard of one name.
    pub fn get(&self, name: &str) -> Option<&Guard> {
        self.0.binary_search_by(|guard| guard.name().cmp(name)).ok().map(|at| &self.0[at])
    }

    /// Returns all guards, in the order of their names.
    pub fn iter(&self) -> std::slice::Iter<'_, Guard> {
        self.0.iter()
    }

    /// Returns whether all mutexes are held, as far as this process knows.
    pub fn is_held(&self) -> bool {
        self.iter().all(Guard::is_held)
    }

    /// Returns why a mutex was lost, or `None` if none was. If several were lost, the first by name counts.
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.iter().find_map(Guard::loss_reason)
    }

    /// Runs a future while all mutexes are held, and drops it when one is lost.
    ///
    /// The future is not polled after the first of the leases has expired, as with [`Guard::while_held`].
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost), with the name of the lost mutex.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`. The guards still hold their locks.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output> {
        let any_lost = first(self.iter().map(|guard| boxed(guard.lost())).collect());
        let first_lost = || self.iter().find(|guard| guard.state() == State::Lost);
        let output = run_while_held(|| first_lost().is_some(), any_lost, work).await;
        output.ok_or_else(|| {
            let lost = first_lost().map(Guard::lost_error);
            // Unreachable: only a lost guard ends the work early.
            lost.unwrap_or_else(|| Error::lost(LossReason::Expired))
        })
    }

    /// Releases all mutexes, and returns whether all of them were still held.
    ///
    /// # Errors
    ///
    /// The first error of [`Guard::release`]. The other mutexes are still released.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the remaining mutexes are released in the background.
    pub async fn release(self) -> Result<ReleaseOutcome> {
        self.release_each(|guard| boxed(guard.release())).await
    }

    async fn release_each(
        self,
        release: impl FnMut(Guard) -> BoxFuture<'static, Result<ReleaseOutcome>>,
    ) -> Result<ReleaseOutcome> {
        // In reverse order: a waiter for the first mutex then finds the others free.
        let releases = self.0.into_iter().rev().map(release);
        let mut outcome = Ok(ReleaseOutcome::Released);
        for release in join_all(releases.collect()).await {
            match (release, &outcome) {
                (Ok(ReleaseOutcome::Released), _) | (_, Err(_)) => {}
                (worse, Ok(_)) => outcome = worse,
            }
        }
        outcome
    }

    /// Releases all mutexes, and returns whether all of them were still held. The [blocking](crate::blocking) form of
    /// [`release`](Self::release).
    ///
    /// # Errors
    ///
    /// Same as [`release`](Self::release).
    pub fn blocking_release(self) -> Result<ReleaseOutcome> {
        block_on(self.release_each(|guard| boxed(guard.release_in_time())))
    }
}

impl<'a> IntoIterator for &'a Guards {
    type Item = &'a Guard;
    type IntoIter = std::slice::Iter<'a, Guard>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
