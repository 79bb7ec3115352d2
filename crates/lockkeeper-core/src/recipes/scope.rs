//! Re-entrancy, for those who ask for it: holds that are known within a scope.
//!
//! A scope is a frame in a chain that the task carries with it. A hold is known in the frame that it was
//! taken in and in the frames inside of that one, so whoever asks there counts up; siblings do not see
//! it, and wait for it like anybody else.

use std::fmt;
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

/// Runs a future as one request: what it locks with [`lock_scoped`](Keeper::lock_scoped), or in a function
/// that is `#[locked(reentrant)]`, it may lock again inside.
///
/// The inner lock counts up instead of waiting for the outer: same hold, same fence, and it is given back
/// when the last of them ends, which is the outermost. Everybody else waits, as ever.
///
/// A scope inside of another knows what the outer has locked, and the outer does not know what the inner
/// has. The body of a `#[locked(reentrant)]` function is such an inner scope.
///
/// # Why there is no re-entrancy without one
///
/// It takes somebody to whom a lock belongs while it is held. A thread is not it: a future moves from thread
/// to thread, and a thread has many. A task is not it: a request may be half of a task, or several. So
/// *you* say where a request begins and ends. And a lock that lets its holder in twice by itself hides
/// that the inner function finds what it guards half changed by the outer: who can live with that, says so.
///
/// # What it does not do
///
/// - **Separate branches of one scope.** In `join!(a(), b())`, `b` may count up on what `a` took with
///   `lock_scoped`, and both are in. Give each a scope of its own, `join!(scope(a()), scope(b()))`, and they
///   exclude each other. Functions that are `#[locked(reentrant)]` do so without. What was taken *before* they
///   parted is held for both.
/// - **Reach a spawned task.** It is nobody's inside: it waits for the lock, and if you wait for *it*
///   while you hold, that is a deadlock. A guard may be moved into it.
/// - **See that two keepers are on the same server.** A keeper and its clones are one, and so are keepers
///   on the same `Arc` of a store. Keepers that were opened one by one exclude each other.
///
/// # Cancel safety
///
/// Dropping it drops the work; guards in it give their locks back.
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
///     let inner = keeper.lock_scoped("orders/42").await?; // does not wait for itself
///     assert_eq!(inner.fence(), outer.fence());
///     assert_eq!(inner.release().await?, None); // the outer still holds it
///     assert!(outer.release().await?.is_some());
///     Ok(())
/// })
/// .await
/// # }
/// ```
pub fn scope<F: Future>(work: F) -> impl Future<Output = F::Output> {
    let frame = Frame::unknown();
    // Boxed, because an async function would keep the room of its argument twice.
    let work = Box::pin(FRAME.scope(frame.clone(), work));
    async move {
        // Looked up when it is first polled: a scope that is spawned belongs to its task, not to whoever
        // made it.
        frame.is_inside(current());
        work.await
    }
}

/// Runs a closure as one request: what it locks, it may lock again inside.
///
/// Does what [`scope`](fn@crate::scope) does, in blocking code, and is one with it: inside of an async scope this is an inner
/// one.
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
///     let inner = keeper.blocking_lock_scoped("orders/42")?; // does not wait for itself
///     assert_eq!(inner.fence(), outer.fence());
///     Ok(())
/// })
/// # }
/// ```
pub fn blocking_scope<T>(work: impl FnOnce() -> T) -> T {
    FRAME.sync_scope(Frame::inside(current()), work)
}

/// The innermost scope that the caller runs in.
pub(crate) fn current() -> Option<Arc<Frame>> {
    FRAME.try_with(Arc::clone).ok()
}

/// What has been locked in one scope, and the scope around it.
pub(crate) struct Frame {
    around: OnceLock<Arc<Frame>>,
    /// Weak, because a scope only knows of guards. When the last one goes, the lock goes.
    guards: Mutex<Vec<Weak<Guard>>>,
}

impl Frame {
    fn unknown() -> Arc<Self> {
        Arc::new(Self { around: OnceLock::new(), guards: Mutex::default() })
    }

    fn is_inside(&self, around: Option<Arc<Self>>) {
        if let Some(around) = around {
            // It is polled for the first time once.
            let _ = self.around.set(around);
        }
    }

    pub(crate) fn inside(around: Option<Arc<Self>>) -> Arc<Self> {
        let frame = Self::unknown();
        frame.is_inside(around);
        frame
    }

    fn guards(&self) -> MutexGuard<'_, Vec<Weak<Guard>>> {
        self.guards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, guard: &Arc<Guard>) {
        let mut guards = self.guards();
        guards.retain(|guard| guard.strong_count() > 0);
        guards.push(Arc::downgrade(guard));
    }

    /// A guard of this lock, from here or from further out.
    fn find(&self, lock: &LockHandle, mode: Mode) -> Option<Arc<Guard>> {
        // Not upgraded under our own lock: what is upgraded may be the last, whose drop runs foreign code.
        let known = self.guards().clone();
        let here = known.iter().filter_map(Weak::upgrade).find(|guard| lock.is_of(guard, mode));
        here.or_else(|| self.around.get().and_then(|around| around.find(lock, mode)))
    }
}

impl LockHandle {
    /// Acquires, or counts up on what is held in the scope. `note` is the frame that is to know of it.
    pub(crate) async fn acquire_scoped(
        &self,
        context: &Arc<KeeperContext>,
        mode: Mode,
        scope: Option<&Frame>,
        note: Option<&Frame>,
    ) -> Result<ScopedGuard> {
        let held = scope.and_then(|scope| scope.find(self, mode));
        let guard = match held {
            Some(held) => self.count_up(held, mode)?,
            None => Arc::new(self.acquire_on(context, mode).await?),
        };
        if let Some(note) = note {
            note.note(&guard);
        }
        Ok(ScopedGuard { guard })
    }

    fn count_up(&self, held: Arc<Guard>, mode: Mode) -> Result<Arc<Guard>> {
        if !held.is_held() {
            // Not taken anew: the outer would go on under a fence that it does not know.
            return Err(held.lost_error());
        }
        match (held.mode(), mode) {
            (Mode::Exclusive, Mode::Exclusive | Mode::Shared) | (Mode::Shared, Mode::Shared) => {
                Ok(held)
            }
            (Mode::Shared, Mode::Exclusive) => Err(self.error(invalid(
                "held for reading in this scope, and cannot be locked exclusively inside of that: two \
                 who did so would wait for each other for ever",
            ))),
            (has, wants) if has == wants => Ok(held),
            (has, wants) => {
                let message = format!("held as {has:?} in this scope, and asked for as {wants:?}");
                Err(self.error(invalid(message)))
            }
        }
    }
}

impl Keeper {
    /// Waits for a mutex, for at most `max_wait`, unless this [scope](fn@scope) holds it already: then it
    /// counts up.
    ///
    /// Outside of a scope it is the same as `mutex(name).lock()`. The ttl and the label are those of the
    /// outermost.
    ///
    /// # Errors
    ///
    /// As [`Mutex::lock`](crate::Mutex::lock). Inside of a hold of this scope:
    /// [`Lost`](crate::ErrorKind::Lost) if that one is lost, and
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption) if it is for reading only.
    ///
    /// # Cancel safety
    ///
    /// As [`Mutex::lock`](crate::Mutex::lock).
    pub async fn lock_scoped(&self, name: impl Into<Arc<str>>) -> Result<ScopedGuard> {
        self.lock_scoped_on(self.context.live(), name).await
    }

    /// Blocks until a mutex is held, for at most `max_wait`, unless this scope holds it already: then it counts up.
    /// Does what [`lock_scoped`](Self::lock_scoped) does, in [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`lock_scoped`](Self::lock_scoped).
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

/// A lock that is held together with whoever locked it further out in the same [scope](fn@scope).
///
/// It is given back when the last of them is dropped, whichever that is: a guard that lives always
/// holds, or knows that it has lost. The outer and the inner lose together.
#[must_use = "dropping the guard gives the lock back at once, unless an outer one holds it"]
pub struct ScopedGuard {
    guard: Arc<Guard>,
}

impl ScopedGuard {
    /// The name of the lock.
    pub fn name(&self) -> &str {
        self.guard.name()
    }

    /// How it is held: as the outermost asked for it.
    pub fn mode(&self) -> Mode {
        self.guard.mode()
    }

    /// The fencing token: the same for the outer and the inner. As [`Guard::fence`].
    pub fn fence(&self) -> Option<Fence> {
        self.guard.fence()
    }

    /// What this process knows of the lock right now. As [`Guard::state`].
    pub fn state(&self) -> State {
        self.guard.state()
    }

    /// Whether the lock is held as far as this process knows. As [`Guard::is_held`].
    pub fn is_held(&self) -> bool {
        self.guard.is_held()
    }

    /// Why the lock was lost, if it was. As [`Guard::loss_reason`].
    pub fn loss_reason(&self) -> Option<LossReason> {
        self.guard.loss_reason()
    }

    /// How long until the hold is lost if no renewal succeeds before. As [`Guard::remaining`].
    pub fn remaining(&self) -> Option<Duration> {
        self.guard.remaining()
    }

    /// Ready when the lock is lost, and never if it is not. As [`Guard::lost`].
    ///
    /// # Cancel safety
    ///
    /// Dropping it changes nothing.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        self.guard.lost()
    }

    /// A token that is cancelled when the lock is lost. As [`Guard::lost_token`].
    pub fn lost_token(&self) -> CancellationToken {
        self.guard.lost_token()
    }

    /// Runs a future for as long as the lock is held, and drops it when the lock is lost. As
    /// [`Guard::while_held`].
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the lock was lost before the work was done.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the work. The guard still holds.
    pub async fn while_held<F: Future>(&self, work: F) -> Result<F::Output> {
        self.guard.while_held(work).await
    }

    /// Gives the lock back if nobody else in the scope holds it: `None` if somebody does.
    ///
    /// # Errors
    ///
    /// As [`Guard::release`].
    ///
    /// # Cancel safety
    ///
    /// As [`Guard::release`].
    pub async fn release(self) -> Result<Option<ReleaseOutcome>> {
        match Arc::into_inner(self.guard) {
            Some(guard) => guard.release().await.map(Some),
            None => Ok(None),
        }
    }

    /// Releases the lock unless another guard of the scope holds it: then it is `None`. Does what
    /// [`release`](Self::release) does, in [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`release`](Self::release).
    pub fn blocking_release(self) -> Result<Option<ReleaseOutcome>> {
        Arc::into_inner(self.guard).map(Guard::blocking_release).transpose()
    }

    pub(crate) fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Gives it back after work that is done. As [`Guard::give_back`].
    pub(crate) async fn give_back(self) {
        if let Some(guard) = Arc::into_inner(self.guard) {
            guard.give_back().await;
        }
    }
}

impl fmt::Debug for ScopedGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ScopedGuard").field(&self.guard).finish()
    }
}
