//! The keeper: a store, defaults, and the runtime that everything in the background runs on.

use std::fmt;
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

/// The entry: a store with default options, from which locks are made.
///
/// Cheap to clone; clones share everything. It creates locks ([`mutex`](Self::mutex), [`rw_lock`](Self::rw_lock),
/// [`semaphore`](Self::semaphore), [`lock_all`](Self::lock_all)) and [elections](Self::election), runs work under a lock
/// ([`with_lock`](Self::with_lock)), [adopts](Self::adopt) detached holds, [looks into](Self::inspect) the store and
/// [ends](Self::close) in good order. Dropping it releases nothing: guards do that.
///
/// # Async and blocking code
///
/// Every method that waits has a counterpart that blocks: [`Mutex::lock`] and [`Mutex::blocking_lock`]. One keeper
/// serves both. See [`blocking`](crate::blocking) for where those may be called.
///
/// # Which runtime it uses
///
/// Renewals and background releases need a runtime. For locks of `blocking_` methods it is always the blocking runtime, one thread
/// of Lockkeeper's own that is started on first use and never shut down. For locks of async methods it is the tokio
/// runtime in which the keeper was created. A keeper that was created outside of a runtime belongs to the
/// first one that uses it: to the caller's runtime if that is an async method, to the blocking runtime if it is a
/// `blocking_` method. If the keeper's runtime is shut down, its guards are lost, and the blocking runtime serves later
/// async calls.
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
#[derive(Clone)]
pub struct Keeper {
    pub(crate) context: Arc<KeeperContext>,
    options: Options,
}

impl Keeper {
    /// A keeper on a store.
    pub fn new(backend: impl Backend) -> Self {
        Self::from_backend(Arc::new(backend))
    }

    /// A keeper on a store that others use too.
    pub fn from_backend(backend: Arc<dyn Backend>) -> Self {
        let context = Arc::new(KeeperContext::new(backend));
        // Outside of a runtime this fails, and the first use tries again.
        let _ = context.background();
        Self { context, options: Options::default() }
    }

    option_setters!(options);

    /// A lock for one at a time. The name is checked when the lock is asked for.
    pub fn mutex(&self, name: impl Into<Arc<str>>) -> Mutex {
        Mutex::new(self.lock(name))
    }

    /// A lock for many readers or one writer.
    pub fn rw_lock(&self, name: impl Into<Arc<str>>) -> RwLock {
        RwLock::new(self.lock(name))
    }

    /// A lock for at most `permits` at a time. See [`Semaphore`] for what happens if clients disagree
    /// about their number.
    pub fn semaphore(&self, name: impl Into<Arc<str>>, permits: u32) -> Semaphore {
        Semaphore::new(self.lock(name), permits)
    }

    /// Several mutexes at once: all or nothing, and never a deadlock with another who does the same.
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

    /// Runs a closure while holding a mutex, and gives it back before returning.
    ///
    /// The closure's future is dropped if the lock is lost, as by
    /// [`while_held`](Guard::while_held).
    ///
    /// # Errors
    ///
    /// Those of [`Mutex::lock`], and [`Lost`](crate::ErrorKind::Lost) if the lock was lost before the work was
    /// done. That the release failed is logged and not an error: the work is done.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the work and gives the lock back in the background.
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
        guard.give_back().await;
        output
    }

    /// Runs a closure while holding a mutex, and releases it before returning. As [`with_lock`](Self::with_lock), in
    /// [blocking code](crate::blocking).
    ///
    /// A closure cannot be stopped when the lock is lost: it can ask [`is_held`](Guard::is_held).
    ///
    /// # Errors
    ///
    /// As [`with_lock`](Self::with_lock).
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
        block_on(guard.give_back());
        output
    }

    /// Makes a guard from a [detached](Guard::detach) hold again, and renews it.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the lease had ended, or the ticket's owner, mode or fence are not those of the hold (which
    /// stores compare the fence is said at [`Ticket`]);
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption) if the ticket cannot be one, before anything is asked;
    /// [`Unsupported`](crate::ErrorKind::Unsupported) on a store without leases.
    ///
    /// # Cancel safety
    ///
    /// Dropping it leaves the lock in the store as it was, until its lease ends.
    pub async fn adopt(&self, ticket: Ticket) -> Result<Guard> {
        self.adopt_on(self.context.live(), ticket).await
    }

    /// Makes a guard from a [detached](Guard::detach) hold again. Does what [`adopt`](Self::adopt) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`adopt`](Self::adopt).
    pub fn blocking_adopt(&self, ticket: Ticket) -> Result<Guard> {
        block_on(self.adopt_on(self.context.for_blocking(), ticket))
    }

    async fn adopt_on(&self, context: &Arc<KeeperContext>, ticket: Ticket) -> Result<Guard> {
        if context.capabilities.leases {
            let checked = ticket.check(context.capabilities.fences);
            checked.map_err(|error| error.at(context.backend.name(), "adopt", &ticket.name))?;
        }
        self.take_up(context, ticket).await
    }

    /// Adopts a ticket that was made in this process, which may lack the fence.
    pub(crate) async fn take_up(
        &self,
        context: &Arc<KeeperContext>,
        ticket: Ticket,
    ) -> Result<Guard> {
        let Ticket { name, owner, label, mode, ttl, fence } = ticket;
        let at = |error: Error| error.at(context.backend.name(), "adopt", &name);
        if !context.capabilities.leases {
            return Err(at(Error::unsupported("leases, and so no tickets")));
        }
        context.check(mode).map_err(at)?;
        let background = context.background().map_err(at)?.clone();
        let ttl = check_lease(ttl, self.options.max_hold).map_err(at)?;
        let spec = ClaimSpec::new(name.clone(), ttl, background);
        let spec = ClaimSpec { owner, label, mode, ticket: fence, ..spec };
        let (max_hold, method) = (self.options.max_hold, AcquireMethod::Adopt);
        let options = AcquireOptions { wait: None, max_hold, method };
        match Acquire::new(context, spec, options, fence).map_err(at)?.await? {
            Acquired::Held(claim) => Ok(Guard::new(claim)),
            // Nothing is waited for, so there is no time to run out of.
            Acquired::NotInTime { waited } => Err(at(Error::timed_out(waited))),
        }
    }

    /// Looks into the store: who holds, who waits.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](crate::ErrorKind::Unsupported) if the store cannot be looked into.
    pub fn inspect(&self) -> Result<Inspect> {
        Inspect::new(self.context.clone())
    }

    /// The owners of this keeper's acquires that wait at this moment, in the order in which they began, those of blocking
    /// methods last: for
    /// finding one's own place among the [waiters](crate::LockInfo::waiters) of a lock.
    ///
    /// An acquire is among them from when it was first polled and the store had no answer at once, until it
    /// ends or is dropped. Clones of a keeper are one keeper here.
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

    /// What the store can do.
    pub fn capabilities(&self) -> Capabilities {
        self.context.capabilities
    }

    /// Returns this keeper on the blocking runtime, for integrations that start async work from blocking code: its async
    /// methods depend on no other runtime. Closing this keeper closes that one, too.
    #[doc(hidden)]
    #[must_use]
    pub fn on_blocking_runtime(&self) -> Self {
        Self { context: self.context.for_blocking().clone(), options: self.options.clone() }
    }

    /// Ends the keeper and all its clones: waits until no release is under way.
    ///
    /// Waiting acquires end with [`Closed`](crate::ErrorKind::Closed), and so does every acquire from now on.
    /// Guards that still live keep their locks and are not waited for. If the store is down, this
    /// waits until the leases have run out: put a timeout around it if you cannot.
    ///
    /// # Cancel safety
    ///
    /// Dropping it stops the waiting, not the releases. The keeper stays closed.
    pub async fn close(&self) {
        self.context.close();
        // Looked for after that: a blocking context that is being made is found here, or finds that the keeper is closed.
        if let Some(blocking) = self.context.blocking.get() {
            blocking.close();
        }
        for context in self.context.both() {
            if let Some(background) = context.background.get() {
                background.settled().await;
            }
        }
    }

    /// Ends the keeper and all its clones, and blocks until no release is under way. Does what [`close`](Self::close)
    /// does, in [blocking code](crate::blocking).
    ///
    /// Not for the only thread of the runtime that async guards of this keeper belong to: their releases need it.
    pub fn blocking_close(&self) {
        block_on(self.close());
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper")
            .field("backend", &self.context.backend)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
