//! The invariants of `SharedFuture`, over the interleavings of a few threads.
//!
//! The engine's source file is compiled here with loom's synchronization types. Loom runs a test once for each
//! interleaving of its threads, up to three preemptions, and reports a lost wake-up as a deadlock.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]
#![allow(
    clippy::duplicate_mod,
    reason = "the same file is compiled with loom's types and with those of the standard library"
)]

use std::future::poll_fn;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Waker};

use loom::future::block_on;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use loom::thread::{self, JoinHandle};
use shared_future::{Abandoned, BackgroundTask, SharedFuture, SharedFutureOwner};

mod panics;

/// Loom's types, with one more preemption point: before a thread unlocks. Loom preempts only when a lock is taken, so
/// it would miss a `try_lock` that fails just before the unlock.
mod sync {
    use std::ops::{Deref, DerefMut};
    use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};

    pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};

    pub(crate) struct Mutex<T> {
        mutex: loom::sync::Mutex<T>,
        step: AtomicBool,
    }

    pub(crate) struct MutexGuard<'a, T> {
        guard: loom::sync::MutexGuard<'a, T>,
        step: &'a AtomicBool,
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self { mutex: loom::sync::Mutex::new(value), step: AtomicBool::new(false) }
        }

        #[allow(clippy::unnecessary_wraps, reason = "the signature of the standard library")]
        pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
            let guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(MutexGuard { guard, step: &self.step })
        }

        pub(crate) fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
            let guard = self.mutex.try_lock().map_err(|_| TryLockError::WouldBlock)?;
            Ok(MutexGuard { guard, step: &self.step })
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            &self.guard
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            &mut self.guard
        }
    }

    impl<T> Drop for MutexGuard<'_, T> {
        fn drop(&mut self) {
            self.step.store(true, Ordering::SeqCst);
        }
    }
}

#[path = "../../src/engine/shared_future.rs"]
mod shared_future;

/// The state of the future, shared with the threads of a test.
struct State {
    /// The number of requests. The future completes when it reaches `complete_at`.
    requested: AtomicUsize,
    complete_at: usize,
    /// Whether a thread is polling.
    polling: AtomicBool,
    completed: AtomicBool,
    /// Called inside each poll.
    in_poll: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Called when the future is dropped.
    on_drop: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// The waker of the last poll.
    waker: Mutex<Option<Waker>>,
    dropped: AtomicUsize,
    spawned: AtomicUsize,
    abandoned: AtomicUsize,
    completed_in_foreground: AtomicUsize,
}

/// What the runtime does with a background task.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Runtime {
    Runs,
    /// Drops the task, like a runtime that is shutting down.
    Drops,
}

struct Owner {
    future: SharedFuture,
    state: Arc<State>,
    runtime: Runtime,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl SharedFutureOwner for Owner {
    type Scope<'a> = ();

    fn shared_future(&self) -> &SharedFuture {
        &self.future
    }

    fn enter(&self) {}

    fn spawn(&self, task: BackgroundTask<Self>) {
        self.state.spawned.fetch_add(1, SeqCst);
        let run = match self.runtime {
            Runtime::Runs => thread::spawn(move || block_on(task)),
            Runtime::Drops => thread::spawn(move || drop(task)),
        };
        self.tasks.lock().unwrap().push(run);
    }

    fn completed_in_foreground(&self) {
        self.state.completed_in_foreground.fetch_add(1, SeqCst);
    }

    fn abandoned(&self, _: Abandoned) {
        self.state.abandoned.fetch_add(1, SeqCst);
    }
}

/// Counts the drops of the future.
struct OnDrop(Arc<State>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.dropped.fetch_add(1, SeqCst);
        if let Some(on_drop) = self.0.on_drop.get() {
            on_drop();
        }
    }
}

impl Owner {
    fn new(complete_at: usize) -> Arc<Self> {
        Self::on(Runtime::Runs, complete_at)
    }

    fn on(runtime: Runtime, complete_at: usize) -> Arc<Self> {
        let state = Arc::new(State {
            requested: AtomicUsize::new(0),
            complete_at,
            polling: AtomicBool::new(false),
            completed: AtomicBool::new(false),
            in_poll: OnceLock::new(),
            on_drop: OnceLock::new(),
            waker: Mutex::new(None),
            dropped: AtomicUsize::new(0),
            spawned: AtomicUsize::new(0),
            abandoned: AtomicUsize::new(0),
            completed_in_foreground: AtomicUsize::new(0),
        });
        let drops = OnDrop(state.clone());
        let future = poll_fn(move |cx| drops.0.poll(cx));
        let (future, tasks) = (SharedFuture::new(Box::pin(future)), Mutex::new(Vec::new()));
        Arc::new(Self { future, state, runtime, tasks })
    }

    /// Makes a request without a wake-up.
    fn request(&self) {
        self.state.requested.fetch_add(1, SeqCst);
    }

    fn request_repoll(self: &Arc<Self>) {
        self.request();
        SharedFuture::request_repoll(self);
    }

    /// Polls like a caller that ignores wake-ups and does not poll again.
    fn poll(self: &Arc<Self>) -> Poll<()> {
        let poll = SharedFuture::poll(self, &mut Context::from_waker(Waker::noop()));
        assert!(poll.is_pending() || self.state.completed.load(SeqCst), "ready too early");
        poll
    }

    fn poll_and_leave(self: &Arc<Self>) {
        let _ = self.poll();
    }

    /// Waits until the background task has ended. Returns false if there is none.
    fn join_task(&self) -> bool {
        let task = self.tasks.lock().unwrap().pop();
        task.map(|task| task.join().unwrap()).is_some()
    }

    /// Waits for all background tasks and checks that the future is completed or abandoned, and dropped once.
    fn join(&self) {
        while self.join_task() {}
        assert!(self.state.spawned.load(SeqCst) <= 1, "two background tasks");
        assert_eq!(self.state.dropped.load(SeqCst), 1, "drops of the future");
        let ended = self.state.completed.load(SeqCst) || self.state.abandoned.load(SeqCst) == 1;
        assert!(ended, "the future is neither completed nor abandoned");
    }
}

impl State {
    fn poll(&self, cx: &Context<'_>) -> Poll<()> {
        assert!(!self.polling.swap(true, SeqCst), "two threads poll");
        assert!(!self.completed.load(SeqCst), "polled after completion");
        *self.waker.lock().unwrap() = Some(cx.waker().clone());
        let complete = self.requested.load(SeqCst) >= self.complete_at;
        if let Some(in_poll) = self.in_poll.get() {
            in_poll();
        }
        self.completed.store(complete, SeqCst);
        self.polling.store(false, SeqCst);
        if complete { Poll::Ready(()) } else { Poll::Pending }
    }
}

fn explore(test: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    // Without a bound some tests run for minutes.
    model.preemption_bound = Some(3);
    model.check(test);
}

/// Invariant 1.
#[test]
fn at_most_one_thread_polls_and_none_after_completion() {
    explore(|| {
        let owner = Owner::new(1);
        let pollers: Vec<_> = (0..2)
            .map(|_| {
                let owner = owner.clone();
                thread::spawn(move || owner.poll_and_leave())
            })
            .collect();
        owner.request();
        SharedFuture::poll_once(&owner);
        for poller in pollers {
            poller.join().unwrap();
        }
        owner.join();
    });
}

/// Invariant 2.
#[test]
fn a_request_during_a_poll_of_another_thread_is_served() {
    explore(|| {
        let owner = Owner::new(1);
        let poller = owner.clone();
        let poller = thread::spawn(move || poller.poll_and_leave());
        owner.request_repoll();
        poller.join().unwrap();
        owner.join();
    });
}

/// Invariant 2.
#[test]
fn two_requests_at_once_are_both_served() {
    explore(|| {
        let owner = Owner::new(2);
        let other = owner.clone();
        let other = thread::spawn(move || other.request_repoll());
        owner.request_repoll();
        other.join().unwrap();
        owner.join();
    });
}

/// Invariant 2.
#[test]
fn a_request_while_the_background_task_is_being_spawned_is_served() {
    explore(|| {
        let owner = Owner::new(1);
        let maintenance = owner.clone();
        let maintenance = thread::spawn(move || SharedFuture::run_in_background(&maintenance));
        owner.request_repoll();
        maintenance.join().unwrap();
        owner.join();
    });
}

/// Invariant 2.
#[test]
fn a_request_while_a_second_background_task_is_refused_is_served() {
    explore(|| {
        let owner = Owner::new(1);
        SharedFuture::run_in_background(&owner);
        let maintenance = owner.clone();
        let maintenance = thread::spawn(move || SharedFuture::run_in_background(&maintenance));
        owner.request_repoll();
        maintenance.join().unwrap();
        owner.join();
    });
}

/// Invariant 3.
#[test]
fn a_future_may_request_its_own_repoll() {
    explore(|| {
        let owner = Owner::new(1);
        let weak = Arc::downgrade(&owner);
        let repoll = move || upgraded(&weak, Owner::request_repoll);
        assert!(owner.state.in_poll.set(Box::new(repoll)).is_ok());
        owner.poll_and_leave();
        owner.join();
    });
}

/// Invariant 3.
#[test]
fn two_futures_may_request_a_repoll_of_each_other() {
    explore(|| {
        let owners = [Owner::new(1), Owner::new(1)];
        for (one, other) in [(0, 1), (1, 0)] {
            let weak = Arc::downgrade(&owners[other]);
            let repoll = move || upgraded(&weak, Owner::request_repoll);
            assert!(owners[one].state.in_poll.set(Box::new(repoll)).is_ok());
        }
        let other = owners[1].clone();
        let other = thread::spawn(move || other.poll_and_leave());
        owners[0].poll_and_leave();
        other.join().unwrap();
        // The task of one owner may spawn the task of the other.
        while owners.iter().any(|owner| owner.join_task()) {}
        for owner in owners {
            owner.join();
        }
    });
}

fn upgraded(owner: &Weak<Owner>, then: impl Fn(&Arc<Owner>)) {
    if let Some(owner) = owner.upgrade() {
        then(&owner);
    }
}

/// Invariant 4.
#[test]
fn the_background_task_receives_wake_ups_after_a_caller_has_stopped_polling() {
    explore(|| {
        let owner = Owner::new(1);
        let store = owner.clone();
        // An event of the store wakes only the task that polled last.
        let store = thread::spawn(move || {
            store.request();
            let waker = store.state.waker.lock().unwrap().clone();
            if let Some(waker) = waker {
                waker.wake();
            }
        });
        owner.poll_and_leave();
        SharedFuture::request_repoll(&owner);
        store.join().unwrap();
        owner.join();
    });
}

/// Invariant 5.
#[test]
fn completion_in_a_caller_ends_the_background_task_and_drops_the_future_once() {
    explore(|| {
        let owner = Owner::new(1);
        let weak = Arc::downgrade(&owner);
        // Deadlocks if the future is dropped while the slot is locked.
        let on_drop = move || upgraded(&weak, SharedFuture::run_in_background);
        assert!(owner.state.on_drop.set(Box::new(on_drop)).is_ok());
        SharedFuture::run_in_background(&owner);
        owner.request();
        assert!(owner.poll().is_ready());
        owner.join();
        assert_eq!(owner.state.completed_in_foreground.load(SeqCst), 0);
    });
}

/// Invariant 5.
#[test]
fn completion_without_a_background_task_is_reported_once() {
    explore(|| {
        let owner = Owner::new(0);
        let other = owner.clone();
        let other = thread::spawn(move || other.poll_and_leave());
        owner.poll_and_leave();
        other.join().unwrap();
        SharedFuture::request_repoll(&owner);
        owner.join();
        assert_eq!(owner.state.completed_in_foreground.load(SeqCst), 1);
        assert_eq!(owner.state.spawned.load(SeqCst), 0);
    });
}

/// Invariant 6.
#[test]
fn dropping_the_background_task_abandons_the_future() {
    explore(|| {
        let owner = Owner::on(Runtime::Drops, 1);
        SharedFuture::run_in_background(&owner);
        let _ = SharedFuture::poll(&owner, &mut Context::from_waker(Waker::noop()));
        owner.join();
        assert_eq!(owner.state.abandoned.load(SeqCst), 1);
    });
}

/// Invariant 6.
#[test]
fn a_future_is_completed_or_abandoned_and_not_both() {
    explore(|| {
        let owner = Owner::on(Runtime::Drops, 1);
        SharedFuture::run_in_background(&owner);
        owner.request();
        let poll = SharedFuture::poll(&owner, &mut Context::from_waker(Waker::noop()));
        assert!(poll.is_ready(), "completed or abandoned");
        owner.join();
        let completed = owner.state.completed.load(SeqCst);
        let abandoned = owner.state.abandoned.load(SeqCst);
        assert_eq!(abandoned, usize::from(!completed), "either abandoned or completed");
    });
}

/// Invariant 6.
#[test]
fn a_future_that_is_abandoned_twice_reports_it_once() {
    explore(|| {
        let owner = Owner::on(Runtime::Drops, 1);
        SharedFuture::run_in_background(&owner);
        SharedFuture::abandon(&*owner, Abandoned::RuntimeShutdown);
        owner.join();
        assert_eq!(owner.state.abandoned.load(SeqCst), 1);
    });
}
