//! Runs work that outlives its caller, mostly releases in flight.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::runtime::{EnterGuard, Handle};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::blocking_runtime;

/// Runs tasks that outlive a call, on the keeper's runtime, from any thread.
///
/// `tokio::spawn` panics on a thread without a runtime, and does not track its tasks. This type does not panic, and
/// [`Keeper::close`](crate::Keeper::close) waits for its tasks.
#[derive(Clone)]
pub struct Background {
    handle: Handle,
    tasks: TaskTracker,
}

impl Background {
    /// Creates a background on the given runtime.
    pub fn new(handle: Handle) -> Self {
        Self { handle, tasks: TaskTracker::new() }
    }

    /// Creates a background on the blocking runtime, which is never shut down.
    pub(crate) fn blocking() -> Self {
        Self::new(blocking_runtime::handle().clone())
    }

    /// Returns whether this is on the blocking runtime.
    pub(crate) fn is_blocking(&self) -> bool {
        self.handle.id() == blocking_runtime::handle().id()
    }

    /// Runs a future to completion. If the runtime has been shut down, the future is dropped instead.
    pub fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn_on(future, &self.handle);
    }

    /// Runs a future that [`settled`](Self::settled) does not wait for.
    pub(crate) fn spawn_untracked(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.handle.spawn(future);
    }

    /// Returns a token that [`settled`](Self::settled) waits for while it exists.
    pub(crate) fn token(&self) -> TaskTrackerToken {
        self.tasks.token()
    }

    /// Makes timers created in this scope belong to the keeper's runtime, on any thread.
    pub(crate) fn enter(&self) -> EnterGuard<'_> {
        self.handle.enter()
    }

    /// Returns whether the runtime has been shut down.
    pub(crate) fn is_gone(&self) -> bool {
        let mut probe = self.handle.spawn(async {});
        let mut context = Context::from_waker(Waker::noop());
        matches!(Pin::new(&mut probe).poll(&mut context), Poll::Ready(Err(_)))
    }

    /// Waits until all tracked tasks have ended and all tokens are dropped.
    pub(crate) async fn settled(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Background").field("tasks", &self.tasks.len()).finish_non_exhaustive()
    }
}
