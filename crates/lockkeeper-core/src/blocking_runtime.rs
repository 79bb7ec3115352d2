//! The runtime of all `blocking_` methods, and `block_on` for any thread.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use tokio::runtime::{Builder, EnterGuard, Handle, Runtime, RuntimeFlavor};

/// How long `block_on` waits before it lets other workers run the task that this thread has woken.
const QUICK_ANSWER: Duration = Duration::from_micros(100);

/// Returns the blocking runtime: one thread for the whole process, started on first use.
///
/// It is never shut down, so background releases of blocking code always run.
pub(crate) fn handle() -> &'static Handle {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("lockkeeper").enable_all();
        builder.build().expect("the operating system provides a thread and an event queue")
    });
    runtime.handle()
}

/// Makes timers and tasks of this scope belong to the blocking runtime.
pub(crate) fn enter() -> EnterGuard<'static> {
    handle().enter()
}

/// Blocks this thread until the future is ready.
///
/// Unlike a runtime's `block_on` it does not panic inside another runtime. Timers, connections and tasks that the future
/// creates belong to the blocking runtime, which is never shut down.
///
/// # Examples
///
/// ```
/// # use lockkeeper_core as lockkeeper;
/// use std::time::Duration;
///
/// let answer = lockkeeper::blocking::block_on(async {
///     tokio::time::sleep(Duration::from_millis(1)).await;
///     42
/// });
/// assert_eq!(answer, 42);
/// ```
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark {
        thread: Thread,
        woken: AtomicBool,
    }
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.woken.store(true, Ordering::Release);
            self.thread.unpark();
        }
    }
    let outer = Handle::try_current().ok();
    let outer = outer.filter(|outer| outer.runtime_flavor() == RuntimeFlavor::MultiThread);
    let _entered = enter();
    let unpark = Arc::new(Unpark { thread: std::thread::current(), woken: AtomicBool::new(false) });
    let waker = Waker::from(unpark.clone());
    // Inside a task, tokio's coop budget would run out. It is refilled only when the task returns to its runtime.
    let mut future = std::pin::pin!(tokio::task::unconstrained(future));
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        let mut outer = outer.as_ref();
        // A nested `block_on` may have consumed this thread's unpark token, so the flag decides.
        while !unpark.woken.swap(false, Ordering::Acquire) {
            let Some(runtime) = outer.take() else {
                std::thread::park();
                continue;
            };
            std::thread::park_timeout(QUICK_ANSWER);
            if !unpark.woken.load(Ordering::Acquire) {
                // The task that a worker has woken last, for example that of a connection, is in its LIFO slot, from
                // which other workers cannot steal (documentation of tokio's `Builder::disable_lifo_slot`). Another
                // task in that slot moves it to the queue.
                drop(runtime.spawn(async {}));
            }
        }
    }
}
