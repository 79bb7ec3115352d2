//! Invariant 7, with the types of the standard library: a panic poisons those of loom.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};

use self::shared_future::{Abandoned, BackgroundTask, SharedFuture, SharedFutureOwner};

mod sync {
    pub(crate) use std::sync::atomic::{AtomicBool, Ordering};
    pub(crate) use std::sync::{Mutex, MutexGuard};
}

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
        unreachable!("it panics");
    }

    fn abandoned(&self, cause: Abandoned) {
        self.abandoned.lock().unwrap().push(cause);
    }
}

#[test]
fn a_panic_reaches_one_caller_and_is_reported_once_by_the_background_task() {
    let future = SharedFuture::new(Box::pin(async { panic!("a panic of the test") }));
    let owner = Arc::new(Owner { future, task: None.into(), abandoned: Vec::new().into() });
    let mut cx = Context::from_waker(Waker::noop());
    assert!(catch_unwind(AssertUnwindSafe(|| SharedFuture::poll(&owner, &mut cx))).is_err());
    // Not this caller: a drop must not panic.
    SharedFuture::poll_once(&owner);
    SharedFuture::request_repoll(&owner);
    let mut task = owner.task.lock().unwrap().take().expect("a background task");
    let run = move || Pin::new(&mut task).poll(&mut Context::from_waker(Waker::noop()));
    assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
    assert_eq!(*owner.abandoned.lock().unwrap(), [Abandoned::Panicked]);
    assert!(SharedFuture::poll(&owner, &mut cx).is_ready());
}
