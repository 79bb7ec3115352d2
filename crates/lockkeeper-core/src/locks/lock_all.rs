//! Several mutexes at once.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::blocking_runtime::block_on;
use crate::contract::{BoxFuture, Mode};
use crate::engine::context::KeeperContext;
use crate::engine::hold::{ReleaseOutcome, State};
use crate::engine::while_held::run_while_held;
use crate::error::{Error, Result};
use crate::futures::{boxed, join_all};
use crate::locks::guard::Guard;
use crate::locks::handle::LockHandle;
use crate::loss::LossReason;
use crate::name::Name;
use crate::options::{Options, invalid, option_setters};
use crate::release::LEAVE_WITHIN;

/// Several mutexes, taken together: all or nothing.
///
/// They are taken one after the other in the order of their names, whatever order they were given
/// in, so two who take overlapping sets never wait for each other in a circle. A name given twice is
/// taken once. `max_wait` is for all of them together.
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
            if names.is_empty() { Err(invalid("lock_all needs a name")) } else { Ok(names) }
        });
        Self { context, names, options }
    }

    option_setters!(options);

    /// Waits for all of them, for at most `max_wait` in all.
    ///
    /// # Errors
    ///
    /// As [`Mutex::lock`](crate::Mutex::lock), for the first that fails, and
    /// [`Lost`](crate::ErrorKind::Lost) if one is lost while the others are awaited. Those that were
    /// held by then are given back before this returns; if the store does not confirm that within 100 ms, in
    /// the background.
    ///
    /// # Cancel safety
    ///
    /// If dropped, those that are held by then are given back in the background.
    pub async fn lock(&self) -> Result<Guards> {
        self.lock_on(self.context.live()).await
    }

    /// Asks once for each; `None` if another holds or awaits one of them. Those that were held by then are given
    /// back first, as by [`lock`](Self::lock).
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn try_lock(&self) -> Result<Option<Guards>> {
        self.try_lock_for(Duration::ZERO).await
    }

    /// Waits for all of them for at most this long in all; zero is one attempt each. If that was not enough, those
    /// that were held by then are given back first, as by [`lock`](Self::lock).
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock), without `TimedOut`.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn try_lock_for(&self, wait: Duration) -> Result<Option<Guards>> {
        self.try_lock_on(self.context.live(), wait).await
    }

    /// Blocks until all of them are held, for at most `max_wait` in all. Does what [`lock`](Self::lock) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock).
    pub fn blocking_lock(&self) -> Result<Guards> {
        block_on(self.lock_on(self.context.for_blocking()))
    }

    /// Asks once for each; `None` if another holds or awaits one of them. Does what [`try_lock`](Self::try_lock) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`try_lock`](Self::try_lock).
    pub fn blocking_try_lock(&self) -> Result<Option<Guards>> {
        self.blocking_try_lock_for(Duration::ZERO)
    }

    /// Blocks for all of them for at most this long in all; zero is one attempt each. Does what [`try_lock_for`](Self::try_lock_for) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`try_lock_for`](Self::try_lock_for).
    pub fn blocking_try_lock_for(&self, wait: Duration) -> Result<Option<Guards>> {
        block_on(self.try_lock_on(self.context.for_blocking(), wait))
    }

    async fn lock_on(&self, context: &Arc<KeeperContext>) -> Result<Guards> {
        let start = tokio::time::Instant::now();
        match self.take(context, self.options.max_wait).await? {
            Taken::All(guards) => Ok(guards),
            Taken::Contended(name) => {
                let store = context.store;
                Err(Error::timed_out(start.elapsed()).at(store, "lock", &name))
            }
        }
    }

    async fn try_lock_on(
        &self,
        context: &Arc<KeeperContext>,
        wait: Duration,
    ) -> Result<Option<Guards>> {
        match self.take(context, Some(wait)).await? {
            Taken::All(guards) => Ok(Some(guards)),
            Taken::Contended(_) => Ok(None),
        }
    }

    async fn take(&self, context: &Arc<KeeperContext>, wait: Option<Duration>) -> Result<Taken> {
        let start = tokio::time::Instant::now();
        let mut guards = Guards(Vec::new());
        for name in self.names.as_ref().map_err(Error::clone)? {
            let left = wait.map_or(Duration::MAX, |wait| wait.saturating_sub(start.elapsed()));
            let options = self.options.clone();
            let lock = LockHandle { context: context.clone(), name: Ok(name.clone()), options };
            let next = lock.try_acquire_on(context, Mode::Exclusive, left);
            // Holding some is worth nothing any more when one of them is lost.
            let failed = match guards.while_held(next).await {
                Ok(Ok(Some(guard))) => {
                    guards.0.push(guard);
                    continue;
                }
                Ok(Ok(None)) => Ok(Taken::Contended(name.clone())),
                Ok(Err(error)) | Err(error) => Err(error),
            };
            give_back(context, guards).await;
            return failed;
        }
        Ok(Taken::All(guards))
    }
}

/// Releases the locks of an incomplete set before the caller is told. A store that does not confirm in time
/// is left to the background.
async fn give_back(context: &KeeperContext, guards: Guards) {
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

enum Taken {
    All(Guards),
    Contended(Name),
}

/// The guards of several mutexes, sorted by name.
#[derive(Debug)]
#[must_use = "dropping the guards gives the locks back at once"]
pub struct Guards(Vec<Guard>);

impl Guards {
    /// The guard of one of the names.
    pub fn get(&self, name: &str) -> Option<&Guard> {
        self.0.binary_search_by(|guard| guard.name().cmp(name)).ok().map(|at| &self.0[at])
    }

    /// All of them, in the order of their names.
    pub fn iter(&self) -> std::slice::Iter<'_, Guard> {
        self.0.iter()
    }

    /// Whether all of them are held, as far as this process knows.
    pub fn is_held(&self) -> bool {
        self.iter().all(Guard::is_held)
    }

    /// Why the first of them that is lost was lost, in the order of their names; `None` if none is.
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.iter().find_map(Guard::loss_reason)
    }

    /// Runs a future for as long as all of them are held, and drops it when one is lost.
    ///
    /// No step of the work begins after the first of the leases has run out, as with [`Guard::while_held`].
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost), with the name of the one that was lost.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the work. The guards still hold.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output> {
        let mut tokens: Vec<_> = self
            .iter()
            .map(|guard| {
                let token = guard.lost_token();
                Box::pin(async move { token.cancelled().await })
            })
            .collect();
        let any_lost = poll_fn(|cx| {
            let lost = tokens.iter_mut().any(|token| token.as_mut().poll(cx).is_ready());
            if lost { Poll::Ready(()) } else { Poll::Pending }
        });
        let first_lost = || self.iter().find(|guard| guard.state() == State::Lost);
        let output = run_while_held(|| first_lost().is_some(), any_lost, work).await;
        output.ok_or_else(|| {
            let lost = first_lost().map(Guard::lost_error);
            // Only a guard that is lost ends the wait.
            lost.unwrap_or_else(|| Error::lost(LossReason::Expired))
        })
    }

    /// Gives all of them back, and tells whether all were held until then.
    ///
    /// # Errors
    ///
    /// The first of [`Guard::release`]'s errors; the others are given back all the same.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the rest is given back in the background.
    pub async fn release(self) -> Result<ReleaseOutcome> {
        self.release_each(|guard| boxed(guard.release())).await
    }

    async fn release_each(
        self,
        release: impl FnMut(Guard) -> BoxFuture<'static, Result<ReleaseOutcome>>,
    ) -> Result<ReleaseOutcome> {
        // The last one first: whoever waits for the first then finds the rest free.
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

    /// Releases all of them, and tells whether all were held until then. Does what [`release`](Self::release) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`release`](Self::release).
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
