//! The keeper: a store, default options, and the runtime for background work.

use std::sync::Arc;

use crate::blocking_runtime::block_on;
use crate::contract::{Backend, Capabilities, ClaimSpec};
use crate::engine::acquire::{Acquire, Acquired};
use crate::engine::claim_driver::{AcquireMethod, AcquireOptions};
use crate::engine::context::KeeperContext;
use crate::error::{Error, Result};
use crate::locks::guard::Guard;
use crate::locks::handle::LockHandle;
use crate::locks::inspect::Inspect;
use crate::locks::lock_all::LockAll;
use crate::locks::mutex::Mutex;
use crate::locks::rwlock::RwLock;
use crate::locks::semaphore::Semaphore;
use crate::locks::ticket::Ticket;
use crate::name::Name;
use crate::options::{Options, check_lease, option_setters};
use crate::owner::Owner;

/// The entry point: a store with default options, which creates locks.
///
/// A keeper creates locks ([`mutex`](Self::mutex), [`rw_lock`](Self::rw_lock), [`semaphore`](Self::semaphore),
/// [`lock_all`](Self::lock_all)) and [elections](Self::election), runs work under a lock
/// ([`with_lock`](Self::with_lock)), [adopts](Self::adopt) detached holds and [inspects](Self::inspect) the store. It is
/// cheap to clone, and clones share their store and runtime. Dropping a keeper releases no locks: guards do that.
///
/// # Async and blocking code
///
/// Every method that waits has a counterpart that blocks: [`Mutex::lock`] and [`Mutex::blocking_lock`]. One keeper
/// serves both. The module [`blocking`](crate::blocking) describes where blocking methods may be called.
///
/// # Which runtime it uses
///
/// Renewals and background releases need a runtime.
///
/// - Locks acquired by `blocking_` methods use the blocking runtime: one thread that Lockkeeper starts on first use and
///   never shuts down.
/// - Locks acquired by async methods use the tokio runtime in which the keeper was created.
/// - A keeper created outside of a runtime is bound to the first one that uses it: the caller's runtime for an async
///   method, the blocking runtime for a `blocking_` method.
/// - If the keeper's runtime is shut down, its guards are lost, and the blocking runtime serves later async calls.
///
/// # Examples
///
/// ```
/// # use lockkeeper_core as lockkeeper;
/// use std::time::Duration;
/// use lockkeeper::{Keeper, Memory};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// let keeper = Keeper::new(Memory::new()).ttl(Duration::from_secs(10));
/// let guard = keeper.mutex("orders/42").lock().await?;
/// println!("fence {:?}", guard.fence());
/// guard.release().await?;
/// keeper.close().await;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Keeper {
    pub(crate) context: Arc<KeeperContext>,
    options: Options,
}

impl Keeper {
    /// Creates a keeper on a store.
    pub fn new(backend: impl Backend) -> Self {
        Self::from_backend(Arc::new(backend))
    }

    /// Creates a keeper on a store that is shared with other code.
    pub fn from_backend(backend: Arc<dyn Backend>) -> Self {
        let context = Arc::new(KeeperContext::new(backend));
        // Fails outside of a runtime. The first use tries again.
        let _ = context.background();
        Self { context, options: Options::default() }
    }

    option_setters!(options);

    /// Returns a mutex: a lock for one holder at a time. The name is checked at the first attempt to acquire it.
    pub fn mutex(&self, name: impl Into<Arc<str>>) -> Mutex {
        Mutex::new(self.lock(name))
    }

    /// Returns a readers-writer lock: a lock for many readers or one writer.
    pub fn rw_lock(&self, name: impl Into<Arc<str>>) -> RwLock {
        RwLock::new(self.lock(name))
    }

    /// Returns a semaphore with `permits` permits. [`Semaphore`] states what happens if clients disagree about the number.
    pub fn semaphore(&self, name: impl Into<Arc<str>>, permits: u32) -> Semaphore {
        Semaphore::new(self.lock(name), permits)
    }

    /// Returns a set of mutexes that is acquired as a whole. Clients with overlapping sets do not deadlock.
    pub fn lock_all<N: Into<Arc<str>>>(&self, names: impl IntoIterator<Item = N>) -> LockAll {
        let names = names.into_iter().map(Name::new).collect();
        LockAll::new(self.context.clone(), names, self.options.clone())
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    pub(crate) fn lock(&self, name: impl Into<Arc<str>>) -> LockHandle {
        let options = self.options.clone();
        LockHandle { context: self.context.clone(), name: Name::new(name), options }
    }

    /// Runs a closure while holding a mutex, and releases the mutex before returning.
    ///
    /// If the lock is lost, the closure's future is dropped, as with [`while_held`](Guard::while_held).
    ///
    /// # Errors
    ///
    /// Same as [`Mutex::lock`], and [`Lost`](crate::ErrorKind::Lost) if the lock was lost before the work completed. A
    /// failed release is logged and is not an error, because the work is complete.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work and releases the lock in the background.
    ///
    /// # Examples
    ///
    /// ```
    /// # use lockkeeper_core as lockkeeper;
    /// # use lockkeeper::{Keeper, Memory};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockkeeper::Result<()> {
    /// # let keeper = Keeper::new(Memory::new());
    /// let fence = keeper.with_lock("orders/42", async |guard| guard.fence()).await?;
    /// # assert!(fence.is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn with_lock<T>(
        &self,
        name: impl Into<Arc<str>>,
        work: impl AsyncFnOnce(&Guard) -> T,
    ) -> Result<T> {
        let guard = self.mutex(name).lock().await?;
        let output = guard.while_held(work(&guard)).await;
        guard.release_after_work().await;
        output
    }

    /// Runs a closure while holding a mutex, and releases the mutex before returning. The [blocking](crate::blocking) form
    /// of [`with_lock`](Self::with_lock).
    ///
    /// The closure is not stopped when the lock is lost. It can check [`is_held`](Guard::is_held).
    ///
    /// # Errors
    ///
    /// Same as [`with_lock`](Self::with_lock).
    ///
    /// # Examples
    ///
    /// ```
    /// # use lockkeeper_core as lockkeeper;
    /// # use lockkeeper::{Keeper, Memory};
    /// # fn main() -> lockkeeper::Result<()> {
    /// # let keeper = Keeper::new(Memory::new());
    /// let fence = keeper.blocking_with_lock("orders/42", |guard| guard.fence())?;
    /// # assert!(fence.is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn blocking_with_lock<T>(
        &self,
        name: impl Into<Arc<str>>,
        work: impl FnOnce(&Guard) -> T,
    ) -> Result<T> {
        let guard = self.mutex(name).blocking_lock()?;
        let output = work(&guard);
        let output = if guard.is_held() { Ok(output) } else { Err(guard.lost_error()) };
        block_on(guard.release_after_work());
        output
    }

    /// Turns a [detached](Guard::detach) hold into a guard again, and renews it.
    ///
    /// # Errors
    ///
    /// - [`Lost`](crate::ErrorKind::Lost) if the lease has expired, or if the owner, mode or fence of the ticket does not
    ///   match the hold. [`Ticket`] states which stores compare the fence.
    /// - [`InvalidOption`](crate::ErrorKind::InvalidOption), before any I/O, if the ticket is not valid.
    /// - [`Unsupported`](crate::ErrorKind::Unsupported) on a store without leases.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the lock stays held in the store until its lease expires.
    pub async fn adopt(&self, ticket: Ticket) -> Result<Guard> {
        self.adopt_on(self.context.live(), ticket).await
    }

    /// Turns a [detached](Guard::detach) hold into a guard again, and renews it. The [blocking](crate::blocking) form of
    /// [`adopt`](Self::adopt).
    ///
    /// # Errors
    ///
    /// Same as [`adopt`](Self::adopt).
    pub fn blocking_adopt(&self, ticket: Ticket) -> Result<Guard> {
        block_on(self.adopt_on(self.context.for_blocking(), ticket))
    }

    async fn adopt_on(&self, context: &Arc<KeeperContext>, ticket: Ticket) -> Result<Guard> {
        let checked = ticket.check(context.capabilities);
        checked.map_err(|error| error.at(context.store, "adopt", &ticket.name))?;
        self.adopt_unchecked(context, ticket).await
    }

    /// Adopts a ticket that was created in this process and may lack the fence, on a store with leases.
    pub(crate) async fn adopt_unchecked(
        &self,
        context: &Arc<KeeperContext>,
        ticket: Ticket,
    ) -> Result<Guard> {
        let Ticket { name, owner, label, mode, ttl, fence } = ticket;
        let at = |error: Error| error.at(context.store, "adopt", &name);
        context.check(mode).map_err(at)?;
        let background = context.background().map_err(at)?.clone();
        let ttl = check_lease(ttl, self.options.max_hold).map_err(at)?;
        let spec = ClaimSpec::new(name.clone(), ttl, background);
        let spec = ClaimSpec { owner, label, mode, ticket: fence, ..spec };
        let (max_hold, method) = (self.options.max_hold, AcquireMethod::Adopt);
        let options = AcquireOptions { wait: None, max_hold, method };
        match Acquire::new(context, spec, options, fence).map_err(at)?.await? {
            Acquired::Held(claim) => Ok(Guard::new(claim)),
            // Unreachable: an adoption has no time limit.
            Acquired::NotAcquired { waited } => Err(at(Error::timed_out(waited))),
        }
    }

    /// Returns a view of the store: which clients hold locks, and which wait.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) if the store does not support inspection.
    pub fn inspect(&self) -> Result<Inspect> {
        Inspect::new(self.context.clone())
    }

    /// Returns the owner ids of this keeper's acquires that are waiting, oldest first; acquires of blocking methods come
    /// last. Use it to find this keeper's own acquires among the [waiters](crate::LockInfo::waiters) of a lock.
    ///
    /// An acquire is included from its first poll, if the store does not answer at once, until it ends or is dropped.
    /// Clones of a keeper share the list.
    ///
    /// # Examples
    ///
    /// ```
    /// # use lockkeeper_core as lockkeeper;
    /// # use lockkeeper::{Keeper, Memory};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockkeeper::Result<()> {
    /// let keeper = Keeper::new(Memory::new());
    /// let _held = keeper.mutex("orders/42").lock().await?;
    /// let mutex = keeper.mutex("orders/42");
    /// let place = async {
    ///     let shown = keeper.inspect()?.show("orders/42").await?;
    ///     let ours = keeper.waiting();
    ///     let is_ours = |who: &lockkeeper::Participant| who.owner.is_some_and(|id| ours.contains(&id));
    ///     lockkeeper::Result::Ok(shown[0].waiters.iter().position(is_ours))
    /// };
    /// tokio::select! {
    ///     biased;
    ///     guard = mutex.lock() => drop(guard?),
    ///     ahead = place => assert_eq!(ahead?, Some(0)),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn waiting(&self) -> Vec<Owner> {
        self.context.both().flat_map(|context| context.waiting_owners()).collect()
    }

    /// Returns the capabilities of the store.
    pub fn capabilities(&self) -> Capabilities {
        self.context.capabilities
    }

    /// Returns this keeper on the blocking runtime, for integrations that start async work from blocking code. The async
    /// methods of the result depend on no other runtime. Closing this keeper closes the result, too.
    #[doc(hidden)]
    #[must_use]
    pub fn on_blocking_runtime(&self) -> Self {
        Self { context: self.context.for_blocking().clone(), options: self.options.clone() }
    }

    /// Closes the keeper and all its clones, and waits until all releases in flight are complete.
    ///
    /// Waiting acquires fail with [`Closed`](crate::ErrorKind::Closed), and so do all later ones. Live guards keep their
    /// locks and are not waited for. If the store is down, this waits until the leases have expired: add a timeout if
    /// that is too long.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future stops the wait, not the releases. The keeper stays closed.
    pub async fn close(&self) {
        self.context.close();
        // Read after `close`: a blocking context that is created concurrently is found here, or finds the keeper closed.
        if let Some(blocking) = self.context.blocking.get() {
            blocking.close();
        }
        for context in self.context.both() {
            if let Some(background) = context.background.get() {
                background.settled().await;
            }
        }
    }

    /// Closes the keeper and all its clones, and blocks until all releases in flight are complete. The
    /// [blocking](crate::blocking) form of [`close`](Self::close).
    ///
    /// Do not call it on the only thread of the runtime that serves async guards of this keeper: their releases need that
    /// thread.
    pub fn blocking_close(&self) {
        block_on(self.close());
    }
}
