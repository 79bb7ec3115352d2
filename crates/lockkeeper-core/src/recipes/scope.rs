//! Opt-in re-entrancy: holds that are reused within a scope.
//!
//! A scope is a frame in a chain that is local to the task. An acquire reuses a hold of the same lock if that was acquired in
//! its own frame or in one around it. Sibling frames do not share holds: they wait for the lock like any other claim.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::blocking_runtime::block_on;
use crate::contract::Mode;
use crate::engine::context::KeeperContext;
use crate::engine::hold::{ReleaseOutcome, State};
use crate::error::Result;
use crate::fence::Fence;
use crate::locks::guard::Guard;
use crate::locks::handle::LockHandle;
use crate::locks::keeper::Keeper;
use crate::loss::LossReason;
use crate::options::invalid;

tokio::task_local! {
    pub(crate) static FRAME: Arc<Frame>;
}

/// Runs a future as a scope: a lock that it acquires with [`lock_scoped`](Keeper::lock_scoped), or in a
/// `#[locked(reentrant)]` function, can be acquired again inside of it.
///
/// The inner acquire does not wait for the outer one. Both share one hold and one fence, and the lock is released when the
/// last of their guards is dropped. Code outside of the scope waits as usual.
///
/// Scopes nest. An inner scope reuses the locks of the outer one, but the outer does not reuse those of the inner. The body
/// of a `#[locked(reentrant)]` function is such an inner scope.
///
/// # Why re-entrancy needs a scope
///
/// A re-entrant lock needs to identify its holder. The thread does not identify it: a future moves between threads, and a
/// thread runs many futures. Nor does the task: a request may be a part of a task, or several tasks. So the caller marks
/// where a request begins and ends. Re-entrancy is also opt-in because it hides a hazard: the inner function may read
/// protected data that the outer one has only partly changed.
///
/// # What it does not do
///
/// - **Separate branches of one scope.** In `join!(a(), b())`, `b` may share a lock that `a` acquired with `lock_scoped`.
///   With a scope for each, `join!(scope(a()), scope(b()))`, they exclude each other. `#[locked(reentrant)]` functions
///   exclude each other without that. A lock that was acquired *before* the `join!` is shared by both.
/// - **Extend to spawned tasks.** A spawned task is outside of the scope and waits for the lock. If the holder waits for
///   that task, the two deadlock. A guard may be moved into the task.
/// - **Detect that two keepers use the same server.** A keeper and its clones share their locks in a scope, and so do
///   keepers on the same `Arc` of a store. Keepers that were opened separately exclude each other.
///
/// # Cancel safety
///
/// Dropping the future drops `work`, whose guards release their locks.
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
/// lockkeeper::scope(async {
///     let outer = keeper.lock_scoped("orders/42").await?;
///     let inner = keeper.lock_scoped("orders/42").await?; // does not deadlock
///     assert_eq!(inner.fence(), outer.fence());
///     assert_eq!(inner.release().await?, None); // the outer still holds it
///     assert!(outer.release().await?.is_some());
///     Ok(())
/// })
/// .await
/// # }
/// ```
pub fn scope<F: Future>(work: F) -> impl Future<Output = F::Output> {
    let frame = Arc::<Frame>::default();
    // Boxed, because an async block reserves memory for a moved future twice.
    let work = Box::pin(FRAME.scope(frame.clone(), work));
    async move {
        // Read at the first poll: a scope that is spawned belongs to its task, not to the task that created it.
        frame.set_around(current());
        work.await
    }
}

/// Runs a closure as a scope: a lock that it acquires can be acquired again inside of it. The blocking form of
/// [`scope`](fn@crate::scope).
///
/// Blocking and async scopes nest: inside of an async scope this is an inner one.
///
/// # Examples
///
/// ```
/// # use lockkeeper_core as lockkeeper;
/// use lockkeeper::{Keeper, Memory, blocking};
///
/// # fn main() -> lockkeeper::Result<()> {
/// let keeper = Keeper::new(Memory::new());
/// blocking::scope(|| {
///     let outer = keeper.blocking_lock_scoped("orders/42")?;
///     let inner = keeper.blocking_lock_scoped("orders/42")?; // does not deadlock
///     assert_eq!(inner.fence(), outer.fence());
///     Ok(())
/// })
/// # }
/// ```
pub fn blocking_scope<T>(work: impl FnOnce() -> T) -> T {
    FRAME.sync_scope(Frame::inside(current()), work)
}

/// Returns the innermost scope that the caller runs in.
pub(crate) fn current() -> Option<Arc<Frame>> {
    FRAME.try_with(Arc::clone).ok()
}

/// The guards of one scope, and the scope around it.
#[derive(Default)]
pub(crate) struct Frame {
    around: OnceLock<Arc<Frame>>,
    /// Weak: a scope does not keep its locks held.
    guards: Mutex<Vec<Weak<Guard>>>,
}

impl Frame {
    pub(crate) fn inside(around: Option<Arc<Self>>) -> Arc<Self> {
        let frame = Arc::<Self>::default();
        frame.set_around(around);
        frame
    }

    fn set_around(&self, around: Option<Arc<Self>>) {
        if let Some(around) = around {
            // Called once per frame, so it is not set yet.
            let _ = self.around.set(around);
        }
    }

    fn guards(&self) -> MutexGuard<'_, Vec<Weak<Guard>>> {
        self.guards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, guard: &Arc<Guard>) {
        let mut guards = self.guards();
        guards.retain(|guard| guard.strong_count() > 0);
        guards.push(Arc::downgrade(guard));
    }

    /// Returns a guard of this lock from this scope or one around it.
    fn find(&self, lock: &LockHandle, mode: Mode) -> Option<Arc<Guard>> {
        // Upgraded outside of the mutex: an upgraded guard may be the last one, and its drop runs code of the store.
        let known = self.guards().clone();
        let here = known.iter().filter_map(Weak::upgrade).find(|guard| lock.is_of(guard, mode));
        here.or_else(|| self.around.get().and_then(|around| around.find(lock, mode)))
    }
}

impl LockHandle {
    /// Acquires the lock, or reuses a hold of the scope. Adds the guard to the frame `add_to`.
    pub(crate) async fn acquire_scoped(
        &self,
        context: &Arc<KeeperContext>,
        mode: Mode,
        scope: Option<&Frame>,
        add_to: Option<&Frame>,
    ) -> Result<ScopedGuard> {
        let held = scope.and_then(|scope| scope.find(self, mode));
        let guard = match held {
            Some(held) => self.reuse(held, mode)?,
            None => Arc::new(self.acquire_on(context, mode).await?),
        };
        if let Some(frame) = add_to {
            frame.add(&guard);
        }
        Ok(ScopedGuard { guard })
    }

    fn reuse(&self, held: Arc<Guard>, mode: Mode) -> Result<Arc<Guard>> {
        if !held.is_held() {
            // Not acquired again: the outer code would continue with the fence of the lost hold.
            return Err(held.lost_error());
        }
        match (held.mode(), mode) {
            (Mode::Exclusive, Mode::Exclusive | Mode::Shared) | (Mode::Shared, Mode::Shared) => {
                Ok(held)
            }
            (Mode::Shared, Mode::Exclusive) => Err(self.error(invalid(
                "held for reading in this scope, so an exclusive lock inside of it could deadlock: acquire the \
                 exclusive lock first",
            ))),
            (has, wants) if has == wants => Ok(held),
            (has, wants) => {
                let message = format!("held as {has:?} in this scope, but requested as {wants:?}");
                Err(self.error(invalid(message)))
            }
        }
    }
}

impl Keeper {
    /// Waits until a mutex is acquired, for at most `max_wait`. If this [scope](fn@scope) holds the mutex already, returns
    /// a second guard of the same hold.
    ///
    /// Outside of a scope it is the same as `mutex(name).lock()`. The TTL and the label are those of the outermost acquire.
    ///
    /// # Errors
    ///
    /// Same as [`Mutex::lock`](crate::Mutex::lock). If the scope holds the lock already:
    /// [`Lost`](crate::ErrorKind::Lost) if that hold is lost, and
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption) if it is a read lock.
    ///
    /// # Cancel safety
    ///
    /// Same as [`Mutex::lock`](crate::Mutex::lock).
    pub async fn lock_scoped(&self, name: impl Into<Arc<str>>) -> Result<ScopedGuard> {
        self.lock_scoped_on(self.context.live(), name).await
    }

    /// Blocks until a mutex is acquired, for at most `max_wait`, unless this scope holds it already. The
    /// [blocking](crate::blocking) form of [`lock_scoped`](Self::lock_scoped).
    ///
    /// # Errors
    ///
    /// Same as [`lock_scoped`](Self::lock_scoped).
    pub fn blocking_lock_scoped(&self, name: impl Into<Arc<str>>) -> Result<ScopedGuard> {
        block_on(self.lock_scoped_on(self.context.for_blocking(), name))
    }

    async fn lock_scoped_on(
        &self,
        context: &Arc<KeeperContext>,
        name: impl Into<Arc<str>>,
    ) -> Result<ScopedGuard> {
        let (scope, mode) = (current(), Mode::Exclusive);
        let (scope, lock) = (scope.as_deref(), self.lock(name));
        lock.acquire_scoped(context, mode, scope, scope).await
    }
}

/// A guard that may share its hold with other guards of the same [scope](fn@scope).
///
/// The lock is released when the last of them is dropped, in any order. A loss affects all of them.
#[derive(Debug)]
#[must_use = "dropping the guard releases the lock at once, unless another guard of the scope holds it"]
pub struct ScopedGuard {
    guard: Arc<Guard>,
}

impl ScopedGuard {
    /// Returns the name of the lock.
    pub fn name(&self) -> &str {
        self.guard.name()
    }

    /// Returns the mode of the hold, which the outermost acquire chose.
    pub fn mode(&self) -> Mode {
        self.guard.mode()
    }

    /// Returns the fencing token, which all guards of the hold share. See [`Guard::fence`].
    pub fn fence(&self) -> Option<Fence> {
        self.guard.fence()
    }

    /// Returns what this process knows about the lock. See [`Guard::state`].
    pub fn state(&self) -> State {
        self.guard.state()
    }

    /// Returns whether the lock is held, as far as this process knows. See [`Guard::is_held`].
    pub fn is_held(&self) -> bool {
        self.guard.is_held()
    }

    /// Returns why the lock was lost, if it was. See [`Guard::loss_reason`].
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.guard.loss_reason()
    }

    /// Returns the time until the hold is lost if no renewal succeeds. See [`Guard::remaining`].
    pub fn remaining(&self) -> Option<Duration> {
        self.guard.remaining()
    }

    /// Returns a future that completes when the lock is lost. See [`Guard::lost`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        self.guard.lost()
    }

    /// Returns a token that is cancelled when the lock is lost. See [`Guard::lost_token`].
    pub fn lost_token(&self) -> CancellationToken {
        self.guard.lost_token()
    }

    /// Runs a future while the lock is held, and drops it when the lock is lost. See [`Guard::while_held`].
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the lock was lost before the work completed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops `work`. The guard still holds the lock.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output> {
        self.guard.while_held(work).await
    }

    /// Releases the lock if no other guard of the scope holds it. Returns `None` if one does.
    ///
    /// # Errors
    ///
    /// Same as [`Guard::release`].
    ///
    /// # Cancel safety
    ///
    /// Same as [`Guard::release`].
    pub async fn release(self) -> Result<Option<ReleaseOutcome>> {
        match Arc::into_inner(self.guard) {
            Some(guard) => guard.release().await.map(Some),
            None => Ok(None),
        }
    }

    /// Releases the lock if no other guard of the scope holds it. The [blocking](crate::blocking) form of
    /// [`release`](Self::release).
    ///
    /// # Errors
    ///
    /// Same as [`release`](Self::release).
    pub fn blocking_release(self) -> Result<Option<ReleaseOutcome>> {
        Arc::into_inner(self.guard).map(Guard::blocking_release).transpose()
    }

    pub(crate) fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Does what [`Guard::release_after_work`] does, if no other guard of the scope holds the lock.
    pub(crate) async fn release_after_work(self) {
        if let Some(guard) = Arc::into_inner(self.guard) {
            guard.release_after_work().await;
        }
    }
}
