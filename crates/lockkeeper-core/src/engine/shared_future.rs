//! A future that a caller's task and a background task poll in turn.
//!
//! A caller polls in its own task, so that a short operation does not wait until another task is scheduled. A background
//! task polls when no caller does, or when a request is not followed by a poll. The future registers no waker for
//! requests: [`SharedFuture::request_repoll`] wakes the background task.
//!
//! # Invariants
//!
//! 1. **At most one poller.** Two threads never poll the future at the same time, and no thread polls it after it
//!    has completed.
//! 2. **No lost request.** After `request_repoll`, the future is polled at least once more, unless it has completed or
//!    was abandoned. If another thread is polling at the same time, `request_repoll` sets a flag and returns. Every
//!    poller checks the flag after it has unlocked the slot.
//! 3. **`request_repoll` never blocks**, even if the future itself calls it inside a poll.
//! 4. **The background task takes over.** After a request it polls with its own waker, which replaces that of a caller that
//!    no longer polls. So the next event wakes the background task. At most one background task is spawned.
//! 5. **Completion drops the future once**, outside the lock, and wakes the background task, which then ends.
//! 6. **A background task that is dropped before completion abandons the future**: the future is dropped, and
//!    [`SharedFutureOwner::abandoned`] is called, once.
//! 7. **A panic is contained.** A panic in [`SharedFuture::poll`] reaches that caller, and the slot stays usable. A panic
//!    in [`SharedFuture::poll_once`] does not reach the caller. The background task polls the panicked future next,
//!    panics in turn and ends as in 6.
//!
//! Each invariant has a test in `tests/shared_future`; all but those on panics explore the interleavings with loom.

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, TryLockError};
use std::task::{Context, Poll, Waker};

use super::sync::{AtomicBool, Mutex, MutexGuard, Ordering};

type BoxFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The value that contains a shared future, so that both are one allocation.
pub(crate) trait SharedFutureOwner: Send + Sync + Sized + 'static {
    /// A guard that exists while the future is polled or dropped, such as an entered runtime.
    type Scope<'a>;

    fn shared_future(&self) -> &SharedFuture;

    fn enter(&self) -> Self::Scope<'_>;

    /// Runs the background task. Called at most once.
    fn spawn(&self, task: BackgroundTask<Self>);

    /// Called when the future has completed without a background task.
    fn completed_in_foreground(&self);

    /// Called when the future was dropped before it completed.
    fn abandoned(&self, cause: Abandoned);
}

/// Why a shared future was dropped before it completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Abandoned {
    /// A poll of the future panicked.
    Panicked,
    /// The runtime was shut down.
    RuntimeShutdown,
}

/// A future and the state that its pollers share.
pub(crate) struct SharedFuture {
    slot: Mutex<PollSlot>,
    /// Set by a request that found the slot locked. The thread that unlocks the slot then repeats the request.
    repoll_requested: AtomicBool,
}

struct PollSlot {
    /// `None` after completion or abandonment.
    future: Option<BoxFuture>,
    background: Background,
}

/// The background task.
enum Background {
    NotSpawned,
    /// Spawned, and not polled yet.
    Starting,
    Polled(Waker),
}

impl SharedFuture {
    pub(crate) fn new(future: BoxFuture) -> Self {
        let slot = PollSlot { future: Some(future), background: Background::NotSpawned };
        Self { slot: Mutex::new(slot), repoll_requested: AtomicBool::new(false) }
    }

    fn slot(&self) -> MutexGuard<'_, PollSlot> {
        // A future that panics poisons the mutex, but leaves the slot consistent.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls in the caller's task. Blocks while another thread is polling.
    pub(crate) fn poll<O: SharedFutureOwner>(owner: &Arc<O>, cx: &mut Context<'_>) -> Poll<()> {
        Self::poll_in(owner, owner.shared_future().slot(), cx)
    }

    fn poll_in<O: SharedFutureOwner>(
        owner: &Arc<O>,
        mut slot: MutexGuard<'_, PollSlot>,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        let Some(future) = &mut slot.future else { return Poll::Ready(()) };
        let poll = {
            let _scope = owner.enter();
            future.as_mut().poll(cx)
        };
        if poll.is_pending() {
            drop(slot);
            Self::run_missed_repoll(owner);
            return Poll::Pending;
        }
        let future = slot.future.take();
        let background = std::mem::replace(&mut slot.background, Background::Starting);
        drop(slot);
        drop(future);
        match background {
            Background::NotSpawned => owner.completed_in_foreground(),
            Background::Starting => {}
            Background::Polled(waker) => waker.wake(),
        }
        Poll::Ready(())
    }

    /// Polls once in the caller's thread, if no other thread polls, and leaves the rest to the background task.
    ///
    /// Neither blocks nor panics, so that a guard can call it when it is dropped.
    pub(crate) fn poll_once<O: SharedFutureOwner>(owner: &Arc<O>) {
        if let Ok(slot) = owner.shared_future().slot.try_lock() {
            let mut cx = Context::from_waker(Waker::noop());
            // The background task polls the future next, panics in turn, and reports the panic.
            let _ = catch_unwind(AssertUnwindSafe(|| Self::poll_in(owner, slot, &mut cx)));
        }
        // If another thread was polling, it may have checked the flag already. A poll here registered no waker.
        Self::request_repoll(owner);
    }

    /// Makes the background task poll, and spawns it if there is none.
    pub(crate) fn request_repoll<O: SharedFutureOwner>(owner: &Arc<O>) {
        let this = owner.shared_future();
        // Set before `try_lock`: a thread that has locked the slot checks the flag after unlocking it. A swap, not a store:
        // if it follows that thread's swap, the unlock before that swap is visible to `try_lock`.
        this.repoll_requested.swap(true, Ordering::SeqCst);
        let slot = match this.slot.try_lock() {
            Ok(slot) => slot,
            Err(TryLockError::Poisoned(slot)) => slot.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        // The wake-up below serves all requests up to here.
        this.repoll_requested.store(false, Ordering::SeqCst);
        if slot.future.is_none() {
            return;
        }
        match &slot.background {
            Background::NotSpawned => Self::spawn_in(owner, slot),
            // It will be polled for the first time.
            Background::Starting => {}
            Background::Polled(waker) => {
                let waker = waker.clone();
                // With the slot unlocked: wakers run foreign code, which may call this function.
                drop(slot);
                waker.wake();
            }
        }
    }

    fn spawn_in<O: SharedFutureOwner>(owner: &Arc<O>, mut slot: MutexGuard<'_, PollSlot>) {
        slot.background = Background::Starting;
        drop(slot);
        owner.spawn(BackgroundTask { owner: owner.clone(), polling: false });
    }

    /// Spawns the background task, unless there is one or the future has completed. Blocks while another thread is
    /// polling.
    pub(crate) fn run_in_background<O: SharedFutureOwner>(owner: &Arc<O>) {
        let slot = owner.shared_future().slot();
        if slot.future.is_some() && matches!(slot.background, Background::NotSpawned) {
            Self::spawn_in(owner, slot);
        } else {
            drop(slot);
            Self::run_missed_repoll(owner);
        }
    }

    /// Repeats a request that found the slot locked by this thread.
    fn run_missed_repoll<O: SharedFutureOwner>(owner: &Arc<O>) {
        if owner.shared_future().repoll_requested.swap(false, Ordering::SeqCst) {
            Self::request_repoll(owner);
        }
    }

    /// Drops the future, unless it has completed.
    pub(crate) fn abandon<O: SharedFutureOwner>(owner: &O, cause: Abandoned) {
        let future = owner.shared_future().slot().future.take();
        if let Some(future) = future {
            let scope = owner.enter();
            drop(future);
            drop(scope);
            owner.abandoned(cause);
        }
    }
}

impl fmt::Debug for SharedFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedFuture").finish_non_exhaustive()
    }
}

/// Polls a shared future until it has completed.
pub(crate) struct BackgroundTask<O: SharedFutureOwner> {
    owner: Arc<O>,
    /// Whether a poll is in progress. It is still true if the task is dropped because its poll panicked.
    /// `std::thread::panicking` cannot tell: another panic may be unwinding and drop the runtime.
    polling: bool,
}

impl<O: SharedFutureOwner> Future for BackgroundTask<O> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.polling = true;
        let mut slot = self.owner.shared_future().slot();
        match &slot.background {
            Background::Polled(waker) if waker.will_wake(cx.waker()) => {}
            _ => slot.background = Background::Polled(cx.waker().clone()),
        }
        let poll = SharedFuture::poll_in(&self.owner, slot, cx);
        self.polling = false;
        poll
    }
}

impl<O: SharedFutureOwner> Drop for BackgroundTask<O> {
    fn drop(&mut self) {
        let cause = if self.polling { Abandoned::Panicked } else { Abandoned::RuntimeShutdown };
        SharedFuture::abandon(&*self.owner, cause);
    }
}
