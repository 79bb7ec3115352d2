//! The runtime behind every `blocking_` method, and the way to wait for a future on any thread.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use tokio::runtime::{Builder, EnterGuard, Handle, Runtime, RuntimeFlavor};

/// Returns the blocking runtime: one thread for the whole process, started on first use.
///
/// It is never shut down, so background releases of blocking code always run.
fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("lockkeeper").enable_all();
        builder.build().expect("the operating system gives a thread")
    })
}

/// Returns the handle of the blocking runtime.
pub(crate) fn handle() -> &'static Handle {
    runtime().handle()
}

/// Makes timers and tasks of this scope belong to the blocking runtime.
pub(crate) fn enter() -> EnterGuard<'static> {
    runtime().enter()
}

/// How long an answer is awaited before the task that may have to bring it is freed.
const QUICK_ANSWER: Duration = Duration::from_micros(100);

/// Lets the other workers of a runtime run what this thread has woken, if this thread is a worker of it.
///
/// The task that a worker has woken last, for instance that of a connection, has a slot which other workers do not steal
/// from. Another task in that slot moves it to the queue, which they do steal from.
fn free_next_task(runtime: &Handle) {
    drop(runtime.spawn(async {}));
}

/// Blocks this thread until the future is ready.
///
/// Unlike a runtime's `block_on` it does not panic inside of another runtime. Timers, connections and tasks that the
/// future creates belong to the thread that serves all blocking locks, which is never shut down.
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
    // Inside of a task, tokio's budget for polls would run out, and would not be refilled because the task does not
    // return to its runtime.
    let mut future = std::pin::pin!(tokio::task::unconstrained(future));
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        let mut outer = outer.as_ref();
        // A nested `block_on` may have consumed this thread's unpark token: the flag is what counts.
        while !unpark.woken.swap(false, Ordering::Acquire) {
            let Some(runtime) = outer.take() else {
                std::thread::park();
                continue;
            };
            std::thread::park_timeout(QUICK_ANSWER);
            if !unpark.woken.load(Ordering::Acquire) {
                free_next_task(runtime);
            }
        }
    }
}
