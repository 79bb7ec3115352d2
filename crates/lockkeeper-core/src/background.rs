//! Where work that outlives its caller runs: releases under way, mostly.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::runtime::{EnterGuard, Handle};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::blocking_runtime;

/// Runs what must outlive a call, on the keeper's own runtime, from whatever thread it is asked.
///
/// `tokio::spawn` panics on a thread without a runtime, and what it spawns is forgotten. This does
/// neither: [`Keeper::close`](crate::Keeper::close) waits for everything spawned here.
#[derive(Clone)]
pub struct Background {
    handle: Handle,
    tasks: TaskTracker,
}

impl Background {
    /// A background on the given runtime.
    pub fn new(handle: Handle) -> Self {
        Self { handle, tasks: TaskTracker::new() }
    }

    /// A background on the runtime of all `blocking_` methods, which is never shut down.
    pub(crate) fn blocking() -> Self {
        Self::new(blocking_runtime::handle().clone())
    }

    /// Whether this is on the runtime of all `blocking_` methods.
    pub(crate) fn is_blocking(&self) -> bool {
        self.handle.id() == blocking_runtime::handle().id()
    }

    /// Runs a future to its end. If the runtime has been shut down, the future is dropped instead.
    pub fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn_on(future, &self.handle);
    }

    /// Runs a future that [`settled`](Self::settled) does not wait for.
    pub(crate) fn spawn_untracked(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.handle.spawn(future);
    }

    /// Counts as work under way for as long as it lives.
    pub(crate) fn token(&self) -> TaskTrackerToken {
        self.tasks.token()
    }

    /// Makes timers created in this scope belong to the keeper's runtime, whoever polls.
    pub(crate) fn enter(&self) -> EnterGuard<'_> {
        self.handle.enter()
    }

    /// Whether the runtime has been shut down.
    pub(crate) fn is_gone(&self) -> bool {
        let mut probe = self.handle.spawn(async {});
        let mut context = Context::from_waker(Waker::noop());
        matches!(Pin::new(&mut probe).poll(&mut context), Poll::Ready(Err(_)))
    }

    /// Waits until nothing is under way.
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
