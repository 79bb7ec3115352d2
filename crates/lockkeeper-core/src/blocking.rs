//! The same locks for code that is not async.
//!
//! Every type has the name and the methods of its async twin, without the `await`. They work from a
//! plain thread, from inside `spawn_blocking` and, if you must, from inside an async task, where they
//! block that task's thread like any blocking call. Renewals and background releases run on a thread
//! of their own, so a blocked caller holds none of them up.
//!
//! # Examples
//!
//! ```
//! # use lockkeeper_core as lockkeeper;
//! use lockkeeper::{Memory, blocking::Keeper};
//!
//! # fn main() -> lockkeeper::Result<()> {
//! let keeper = Keeper::new(Memory::new());
//! let guard = keeper.mutex("orders/42").lock()?;
//! println!("fence {:?}", guard.fence());
//! guard.release()?;
//! # Ok(())
//! # }
//! ```

mod scoped;

use std::future::Future;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use tokio::runtime::{Builder, EnterGuard, Runtime};

use crate::contract::{Backend, LockInfo};
use crate::engine::hold::ReleaseOutcome;
use crate::error::Result;
use crate::locks::inspect::Event;
use crate::locks::ticket::Ticket;

pub use self::scoped::{ScopedGuard, scope};

/// The runtime of all blocking keepers. Never shut down: releases in the background always run.
fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("lockkeeper").enable_all();
        builder.build().expect("the operating system gives a thread")
    })
}

/// Makes timers and tasks of this scope belong to the runtime of all blocking keepers.
pub(crate) fn enter() -> EnterGuard<'static> {
    runtime().enter()
}

/// Blocks this thread until the future is ready.
///
/// Not a runtime's `block_on`, which panics inside of another runtime. Timers that the future makes
/// belong to the runtime of all blocking keepers.
pub fn wait<F: Future>(future: F) -> F::Output {
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
    let _entered = enter();
    let unpark = Arc::new(Unpark { thread: std::thread::current(), woken: AtomicBool::new(false) });
    let waker = Waker::from(unpark.clone());
    // Inside a task of some runtime its budget for polls would run out, and never be filled again
    // because the task does not get back to that runtime.
    let mut future = std::pin::pin!(tokio::task::unconstrained(future));
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        // A wait inside of this one may have used up our unpark: the mark tells.
        while !unpark.woken.swap(false, Ordering::Acquire) {
            std::thread::park();
        }
    }
}

/// A type, its async twin and the setters they share.
macro_rules! twin {
    ($(#[$doc:meta])* $name:ident, $twin:ty) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $name($twin);

        impl $name {
            /// Sets how long the lock lasts in the store without renewal. As the async twin's.
            #[must_use]
            pub fn ttl(self, ttl: Duration) -> Self {
                Self(self.0.ttl(ttl))
            }

            /// Sets how long to wait for other holders. As the async twin's.
            #[must_use]
            pub fn max_wait(self, max_wait: Duration) -> Self {
                Self(self.0.max_wait(max_wait))
            }

            /// Sets after how long a hold is lost even though its holder lives. As the async twin's.
            #[must_use]
            pub fn max_hold(self, max_hold: Duration) -> Self {
                Self(self.0.max_hold(max_hold))
            }

            /// Sets who asks, for people who inspect the lock. As the async twin's.
            #[must_use]
            pub fn label(self, label: impl Into<Arc<str>>) -> Self {
                Self(self.0.label(label))
            }
        }
    };
}

twin! {
    /// The blocking twin of [`Keeper`](crate::Keeper).
    Keeper, crate::Keeper
}

impl Keeper {
    /// A keeper on a store.
    pub fn new(backend: impl Backend) -> Self {
        Self::from_backend(Arc::new(backend))
    }

    /// A keeper on a store that others use too.
    pub fn from_backend(backend: Arc<dyn Backend>) -> Self {
        let _entered = enter();
        Self(crate::Keeper::from_backend(backend))
    }

    /// A lock for one at a time.
    pub fn mutex(&self, name: impl Into<Arc<str>>) -> Mutex {
        Mutex(self.0.mutex(name))
    }

    /// A lock for many readers or one writer.
    pub fn rw_lock(&self, name: impl Into<Arc<str>>) -> RwLock {
        RwLock(self.0.rw_lock(name))
    }

    /// A lock for at most `permits` at a time.
    pub fn semaphore(&self, name: impl Into<Arc<str>>, permits: u32) -> Semaphore {
        Semaphore(self.0.semaphore(name, permits))
    }

    /// Several mutexes at once: all or nothing.
    pub fn lock_all<N: Into<Arc<str>>>(&self, names: impl IntoIterator<Item = N>) -> LockAll {
        LockAll(self.0.lock_all(names))
    }

    /// Runs a closure while holding a mutex, and gives it back before returning. A closure cannot be
    /// stopped when the lock is lost: it can ask [`is_held`](crate::Guard::is_held).
    ///
    /// # Errors
    ///
    /// Those of [`Mutex::lock`], and [`Lost`](crate::ErrorKind::Lost) if the lock was lost before the
    /// work was done.
    pub fn with_lock<T>(
        &self,
        name: impl Into<Arc<str>>,
        work: impl FnOnce(&crate::Guard) -> T,
    ) -> Result<T> {
        wait(self.0.with_lock(name, async |guard| work(guard)))
    }

    /// Makes a guard from a detached hold again. See [`Keeper::adopt`](crate::Keeper::adopt).
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the lease had ended.
    pub fn adopt(&self, ticket: Ticket) -> Result<Guard> {
        wait(self.0.adopt(ticket)).map(Guard)
    }

    /// Looks into the store.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) if the store cannot be looked into.
    pub fn inspect(&self) -> Result<Inspect> {
        self.0.inspect().map(Inspect)
    }

    /// What the store can do.
    pub fn capabilities(&self) -> crate::Capabilities {
        self.0.capabilities()
    }

    /// Ends the keeper and all its clones: waits until no release is under way.
    pub fn close(&self) {
        wait(self.0.close());
    }
}

twin! {
    /// The blocking twin of [`Mutex`](crate::Mutex).
    Mutex, crate::Mutex
}

impl Mutex {
    /// Waits for the lock, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// As [`Mutex::lock`](crate::Mutex::lock).
    pub fn lock(&self) -> Result<Guard> {
        wait(self.0.lock()).map(Guard)
    }

    /// Asks once.
    ///
    /// # Errors
    ///
    /// As [`Mutex::try_lock`](crate::Mutex::try_lock).
    pub fn try_lock(&self) -> Result<Option<Guard>> {
        Ok(wait(self.0.try_lock())?.map(Guard))
    }

    /// Waits for at most this long.
    ///
    /// # Errors
    ///
    /// As [`Mutex::try_lock_for`](crate::Mutex::try_lock_for).
    pub fn try_lock_for(&self, duration: Duration) -> Result<Option<Guard>> {
        Ok(wait(self.0.try_lock_for(duration))?.map(Guard))
    }
}

twin! {
    /// The blocking twin of [`RwLock`](crate::RwLock).
    RwLock, crate::RwLock
}

impl RwLock {
    /// Waits to read, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// As [`RwLock::read`](crate::RwLock::read).
    pub fn read(&self) -> Result<Guard> {
        wait(self.0.read()).map(Guard)
    }

    /// Asks once to read.
    ///
    /// # Errors
    ///
    /// As [`RwLock::try_read`](crate::RwLock::try_read).
    pub fn try_read(&self) -> Result<Option<Guard>> {
        Ok(wait(self.0.try_read())?.map(Guard))
    }

    /// Waits to read for at most this long.
    ///
    /// # Errors
    ///
    /// As [`RwLock::try_read_for`](crate::RwLock::try_read_for).
    pub fn try_read_for(&self, duration: Duration) -> Result<Option<Guard>> {
        Ok(wait(self.0.try_read_for(duration))?.map(Guard))
    }

    /// Waits to write, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// As [`RwLock::write`](crate::RwLock::write).
    pub fn write(&self) -> Result<Guard> {
        wait(self.0.write()).map(Guard)
    }

    /// Asks once to write.
    ///
    /// # Errors
    ///
    /// As [`RwLock::try_write`](crate::RwLock::try_write).
    pub fn try_write(&self) -> Result<Option<Guard>> {
        Ok(wait(self.0.try_write())?.map(Guard))
    }

    /// Waits to write for at most this long.
    ///
    /// # Errors
    ///
    /// As [`RwLock::try_write_for`](crate::RwLock::try_write_for).
    pub fn try_write_for(&self, duration: Duration) -> Result<Option<Guard>> {
        Ok(wait(self.0.try_write_for(duration))?.map(Guard))
    }
}

twin! {
    /// The blocking twin of [`Semaphore`](crate::Semaphore).
    Semaphore, crate::Semaphore
}

impl Semaphore {
    /// Waits for one permit, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// As [`Semaphore::acquire`](crate::Semaphore::acquire).
    pub fn acquire(&self) -> Result<Guard> {
        wait(self.0.acquire()).map(Guard)
    }

    /// Waits for several permits at once, for at most `max_wait`.
    ///
    /// # Errors
    ///
    /// As [`Semaphore::acquire_many`](crate::Semaphore::acquire_many).
    pub fn acquire_many(&self, permits: u32) -> Result<Guard> {
        wait(self.0.acquire_many(permits)).map(Guard)
    }

    /// Asks once for a permit.
    ///
    /// # Errors
    ///
    /// As [`Semaphore::try_acquire`](crate::Semaphore::try_acquire).
    pub fn try_acquire(&self) -> Result<Option<Guard>> {
        Ok(wait(self.0.try_acquire())?.map(Guard))
    }

    /// Asks once for several permits.
    ///
    /// # Errors
    ///
    /// As [`Semaphore::try_acquire_many`](crate::Semaphore::try_acquire_many).
    pub fn try_acquire_many(&self, permits: u32) -> Result<Option<Guard>> {
        Ok(wait(self.0.try_acquire_many(permits))?.map(Guard))
    }

    /// Waits for a permit for at most this long.
    ///
    /// # Errors
    ///
    /// As [`Semaphore::try_acquire_for`](crate::Semaphore::try_acquire_for).
    pub fn try_acquire_for(&self, duration: Duration) -> Result<Option<Guard>> {
        Ok(wait(self.0.try_acquire_for(duration))?.map(Guard))
    }

    /// Waits for several permits for at most this long.
    ///
    /// # Errors
    ///
    /// As [`Semaphore::try_acquire_many_for`](crate::Semaphore::try_acquire_many_for).
    pub fn try_acquire_many_for(&self, permits: u32, duration: Duration) -> Result<Option<Guard>> {
        Ok(wait(self.0.try_acquire_many_for(permits, duration))?.map(Guard))
    }

    /// How many permits are not in use at this moment.
    ///
    /// # Errors
    ///
    /// As [`Semaphore::available`](crate::Semaphore::available).
    pub fn available(&self) -> Result<u32> {
        wait(self.0.available())
    }
}

twin! {
    /// The blocking twin of [`LockAll`](crate::LockAll).
    LockAll, crate::LockAll
}

impl LockAll {
    /// Waits for all of them, for at most `max_wait` in all.
    ///
    /// # Errors
    ///
    /// As [`LockAll::lock`](crate::LockAll::lock).
    pub fn lock(&self) -> Result<Guards> {
        wait(self.0.lock()).map(Guards)
    }

    /// Asks once for each.
    ///
    /// # Errors
    ///
    /// As [`LockAll::try_lock`](crate::LockAll::try_lock).
    pub fn try_lock(&self) -> Result<Option<Guards>> {
        Ok(wait(self.0.try_lock())?.map(Guards))
    }

    /// Waits for all of them for at most this long in all.
    ///
    /// # Errors
    ///
    /// As [`LockAll::try_lock_for`](crate::LockAll::try_lock_for).
    pub fn try_lock_for(&self, duration: Duration) -> Result<Option<Guards>> {
        Ok(wait(self.0.try_lock_for(duration))?.map(Guards))
    }
}

/// The blocking twin of [`Guard`](crate::Guard). What does not wait is found on the async guard, which
/// this dereferences to.
#[derive(Debug)]
#[must_use = "dropping the guard gives the lock back at once"]
pub struct Guard(crate::Guard);

impl Guard {
    /// Makes the lease last `ttl` from now. See [`Guard::extend`](crate::Guard::extend).
    ///
    /// # Errors
    ///
    /// As the async twin's.
    pub fn extend(&self, ttl: Duration) -> Result<()> {
        wait(self.0.extend(ttl))
    }

    /// Turns a write hold into a read hold. See [`Guard::downgrade`](crate::Guard::downgrade).
    ///
    /// # Errors
    ///
    /// As the async twin's.
    pub fn downgrade(&self) -> Result<()> {
        wait(self.0.downgrade())
    }

    /// Takes the hold out of the guard. See [`Guard::detach`](crate::Guard::detach).
    ///
    /// # Errors
    ///
    /// As the async twin's.
    pub fn detach(self) -> Result<Ticket> {
        self.0.detach()
    }

    /// Gives the lock back and tells whether it was still held.
    ///
    /// # Errors
    ///
    /// As the async twin's.
    pub fn release(self) -> Result<ReleaseOutcome> {
        wait(self.0.release())
    }
}

impl Deref for Guard {
    type Target = crate::Guard;

    fn deref(&self) -> &crate::Guard {
        &self.0
    }
}

/// The blocking twin of [`Guards`](crate::Guards), which this dereferences to.
#[derive(Debug)]
#[must_use = "dropping the guards gives the locks back at once"]
pub struct Guards(crate::Guards);

impl Guards {
    /// Gives all of them back, and tells whether all were held until then.
    ///
    /// # Errors
    ///
    /// As the async twin's.
    pub fn release(self) -> Result<ReleaseOutcome> {
        wait(self.0.release())
    }
}

impl Deref for Guards {
    type Target = crate::Guards;

    fn deref(&self) -> &crate::Guards {
        &self.0
    }
}

/// The blocking twin of [`Inspect`](crate::Inspect).
#[derive(Debug, Clone)]
pub struct Inspect(crate::Inspect);

impl Inspect {
    /// Every lock and semaphore whose name starts with `prefix`.
    ///
    /// # Errors
    ///
    /// As the async twin's.
    pub fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        wait(self.0.list(prefix))
    }

    /// What is known of one name.
    ///
    /// # Errors
    ///
    /// As the async twin's.
    pub fn show(&self, name: impl Into<Arc<str>>) -> Result<Vec<LockInfo>> {
        wait(self.0.show(name))
    }

    /// Takes a name away from all who hold it. The next holder may enter before the old one is told: see
    /// [`break_lock`](crate::Inspect::break_lock).
    ///
    /// # Errors
    ///
    /// As the async twin's.
    pub fn break_lock(&self, name: impl Into<Arc<str>>) -> Result<usize> {
        wait(self.0.break_lock(name))
    }

    /// Watches what changes from now on.
    ///
    /// # Errors
    ///
    /// As the async twin's.
    pub fn watch(&self, prefix: &str) -> Result<Watch> {
        wait(self.0.watch(prefix)).map(Watch)
    }
}

/// The blocking twin of [`Watch`](crate::Watch).
#[derive(Debug)]
pub struct Watch(crate::Watch);

impl Watch {
    /// Waits for the next event.
    ///
    /// # Errors
    ///
    /// As the async twin's.
    #[expect(clippy::should_implement_trait, reason = "named as its async twin, and may fail")]
    pub fn next(&mut self) -> Result<Event> {
        wait(self.0.next())
    }
}
