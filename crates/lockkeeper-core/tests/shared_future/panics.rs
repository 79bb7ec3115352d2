//! Invariant 7, with the types of the standard library: a panic poisons loom's types.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use self::shared_future::{Abandoned, BackgroundTask, SharedFuture, SharedFutureOwner};

mod sync {
    pub(crate) use std::sync::atomic::{AtomicBool, Ordering};
    pub(crate) use std::sync::{Mutex, MutexGuard};
}

#[allow(dead_code, reason = "these tests use only some of its functions")]
#[path = "../../src/engine/shared_future.rs"]
mod shared_future;

struct Owner {
    future: SharedFuture,
    task: std::sync::Mutex<Option<BackgroundTask<Owner>>>,
    abandoned: std::sync::Mutex<Vec<Abandoned>>,
}

impl SharedFutureOwner for Owner {
    type Scope<'a> = ();

    fn shared_future(&self) -> &SharedFuture {
        &self.future
    }

    fn enter(&self) {}

    fn spawn(&self, task: BackgroundTask<Self>) {
        assert!(self.task.lock().unwrap().replace(task).is_none(), "two background tasks");
    }

    fn completed_in_foreground(&self) {
        unreachable!("the future panics");
    }

    fn abandoned(&self, cause: Abandoned) {
        self.abandoned.lock().unwrap().push(cause);
    }
}

fn panicking() -> Arc<Owner> {
    let future = SharedFuture::new(Box::pin(async { panic!("on purpose") }));
    Arc::new(Owner { future, task: None.into(), abandoned: Vec::new().into() })
}

#[test]
fn a_panic_does_not_reach_a_caller_that_polls_once() {
    let owner = panicking();
    SharedFuture::poll_once(&owner);
    assert!(owner.task.lock().unwrap().is_some(), "the background task reports the panic");
}

#[test]
fn a_panic_reaches_one_caller_and_is_reported_once_by_the_background_task() {
    let owner = panicking();
    let mut cx = Context::from_waker(Waker::noop());
    assert!(catch_unwind(AssertUnwindSafe(|| SharedFuture::poll(&owner, &mut cx))).is_err());
    SharedFuture::request_repoll(&owner);
    let mut task = owner.task.lock().unwrap().take().expect("a background task");
    let run = move || Pin::new(&mut task).poll(&mut Context::from_waker(Waker::noop()));
    assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
    assert_eq!(*owner.abandoned.lock().unwrap(), [Abandoned::Panicked]);
    assert!(SharedFuture::poll(&owner, &mut cx).is_ready());
}
