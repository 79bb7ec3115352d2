//! The keeper: a store, defaults, and the runtime that everything in the background runs on.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::{EnterGuard, Handle};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::backend::{Backend, Capabilities, ClaimSpec, Mode};
use crate::background::Background;
use crate::clock;
use crate::driver::Plan;
use crate::election::{self, Election};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;
use crate::floors::Floors;
use crate::guard::Guard;
use crate::hold::{Hold, RUNTIME_GONE};
use crate::inspect::Inspect;
use crate::lock_all::LockAll;
use crate::mutex::Mutex;
use crate::name::Name;
use crate::observe::{self, Watch};
use crate::options::{Options, check_lease, option_setters};
use crate::owner::Owner;
use crate::pending::Pending;
use crate::polling::{Acquire, Acquired, Driver};
use crate::rwlock::RwLock;
use crate::semaphore::Semaphore;
use crate::ticket::Ticket;

/// How often to look whether the machine has slept.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A shorter sleep is a thread that was held up between two clocks.
const FLICKER: Duration = Duration::from_millis(10);
/// How long the steward lets newcomers wait: not a millisecond, since a timer that close makes every wait
/// for the store dearer. Until then nobody listens whether the store tells of a
/// loss; the deadline counts all the same.
const ROUND: Duration = Duration::from_millis(10);

/// The entry: a store with default options, from which locks are made.
///
/// Cheap to clone; clones share everything. Belongs to the runtime in which it was made (or, if that
/// was outside of one, first used): renewals and background releases run there.
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
    pub(crate) shared: Arc<Shared>,
    options: Options,
}

impl Keeper {
    /// A keeper on a store.
    pub fn new(backend: impl Backend) -> Self {
        Self::from_backend(Arc::new(backend))
    }

    /// A keeper on a store that others use too.
    pub fn from_backend(backend: Arc<dyn Backend>) -> Self {
        let shared = Arc::new(Shared::new(backend));
        // Outside of a runtime this fails, and the first use tries again.
        let _ = shared.background();
        Self { shared, options: Options::default() }
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
        LockAll::new(self.clone(), names.into_iter().map(Name::new).collect(), self.options.clone())
    }

    /// An election, in which one of all who campaign leads at a time.
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election::new(self.clone(), self.lock(election::lock_name(name.as_ref())))
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    pub(crate) fn lock(&self, name: impl Into<Arc<str>>) -> Lock {
        let options = self.options.clone();
        Lock { shared: self.shared.clone(), name: Name::new(name), options }
    }

    pub(crate) fn lock_with(&self, name: Name, options: Options) -> Mutex {
        Mutex::new(Lock { shared: self.shared.clone(), name: Ok(name), options })
    }

    /// Runs a closure while holding a mutex, and gives it back before returning.
    ///
    /// The closure's future is dropped if the lock is lost, as by
    /// [`while_held`](Guard::while_held).
    ///
    /// # Errors
    ///
    /// Those of [`Mutex::lock`], and [`ErrorKind::Lost`] if the lock was lost before the work was
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

    /// Makes a guard from a [detached](Guard::detach) hold again, and renews it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Lost`] if the lease had ended, or the ticket's owner, mode or fence are not those of the hold (which
    /// stores compare the fence is said at [`Ticket`]);
    /// [`ErrorKind::InvalidOption`] if the ticket cannot be one, before anything is asked;
    /// [`ErrorKind::Unsupported`] on a store without leases.
    ///
    /// # Cancel safety
    ///
    /// Dropping it leaves the lock in the store as it was, until its lease ends.
    pub async fn adopt(&self, ticket: Ticket) -> Result<Guard> {
        if self.shared.capabilities.leases {
            let checked = ticket.check(self.shared.capabilities.fences);
            checked.map_err(|error| error.at(self.shared.backend.name(), "adopt", &ticket.name))?;
        }
        self.take_up(ticket).await
    }

    /// The same, for a ticket of our own making, which may lack the fence.
    pub(crate) async fn take_up(&self, ticket: Ticket) -> Result<Guard> {
        let Ticket { name, owner, label, mode, ttl, fence } = ticket;
        let at = |error: Error| error.at(self.shared.backend.name(), "adopt", &name);
        if !self.shared.capabilities.leases {
            return Err(at(Error::unsupported("leases, and so no tickets")));
        }
        self.shared.check(mode).map_err(at)?;
        let background = self.shared.background().map_err(at)?.clone();
        let ttl = check_lease(ttl, self.options.max_hold).map_err(at)?;
        let spec = ClaimSpec::new(name.clone(), ttl, background);
        let spec = ClaimSpec { owner, label, mode, ticket: fence, ..spec };
        let plan = Plan { wait: None, max_hold: self.options.max_hold, adopt: true };
        match self.shared.drive(spec, plan, fence).map_err(at)?.await? {
            Acquired::Guard(guard) => Ok(guard),
            // Nothing is waited for, so there is no time to run out of.
            Acquired::NotInTime { waited } => Err(at(Error::timed_out(waited))),
        }
    }

    /// Looks into the store: who holds, who waits.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`] if the store cannot be looked into.
    pub fn inspect(&self) -> Result<Inspect> {
        Inspect::new(self.shared.clone())
    }

    /// The owners of this keeper's acquires that wait at this moment, in the order in which they began: for
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
    ///     let is_ours = |who: &lockkeeper::Party| who.owner.is_some_and(|id| ours.contains(&id));
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
        let living = self.shared.pending.living().into_iter();
        living.filter(|driver| driver.hold.is_waiting()).map(|driver| driver.hold.owner).collect()
    }

    /// What the store can do.
    pub fn capabilities(&self) -> Capabilities {
        self.shared.capabilities
    }

    /// Ends the keeper and all its clones: waits until no release is under way.
    ///
    /// Whoever waits for a lock gets [`ErrorKind::Closed`], and so does every acquire from now on.
    /// Guards that still live keep their locks and are not waited for. If the store is down, this
    /// waits until the leases have run out: put a timeout around it if you cannot.
    ///
    /// # Cancel safety
    ///
    /// Dropping it stops the waiting, not the releases. The keeper stays closed.
    pub async fn close(&self) {
        let mut closed = vec![&self.shared];
        self.shared.close();
        // Looked for only now: a twin that is being made finds that all is closed, or is found here.
        while let Some(twin) = closed.last().and_then(|shared| shared.twin.get()) {
            twin.close();
            closed.push(twin);
        }
        for shared in closed {
            if let Some(background) = shared.background.get() {
                background.settled().await;
            }
        }
    }

    /// A keeper on the same store, with the same options, that belongs to the runtime in which this is
    /// called.
    pub(crate) fn twin(&self) -> Self {
        let new = || {
            let floors = self.shared.floors.clone();
            Arc::new(Shared { floors, ..Shared::new(self.shared.backend.clone()) })
        };
        let shared = self.shared.twin.get_or_init(new).clone();
        if self.shared.closed.is_cancelled() {
            shared.close();
        }
        let _ = shared.background();
        Self { shared, options: self.options.clone() }
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper")
            .field("backend", &self.shared.backend)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// How long an acquire may wait for other holders.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wait {
    /// As the lock's `max_wait` says.
    AsSet,
    /// This long.
    For(Duration),
}

/// What every kind of lock is made of.
#[derive(Clone)]
pub(crate) struct Lock {
    pub(crate) shared: Arc<Shared>,
    pub(crate) name: Result<Name>,
    pub(crate) options: Options,
}

impl Lock {
    /// Acquires; contention for longer than `max_wait` is an error.
    pub(crate) async fn acquire(&self, mode: Mode) -> Result<Guard> {
        match self.start(mode, Wait::AsSet).await? {
            Acquired::Guard(guard) => Ok(guard),
            Acquired::NotInTime { waited } => Err(self.error(Error::timed_out(waited))),
        }
    }

    /// Acquires; contention for longer than `wait` is `None`.
    pub(crate) async fn try_acquire(&self, mode: Mode, wait: Duration) -> Result<Option<Guard>> {
        match self.start(mode, Wait::For(wait)).await? {
            Acquired::Guard(guard) => Ok(Some(guard)),
            Acquired::NotInTime { .. } => Ok(None),
        }
    }

    async fn start(&self, mode: Mode, wait: Wait) -> Result<Acquired> {
        // A store whose answers are always there would never let other tasks of this thread run.
        tokio::task::coop::consume_budget().await;
        let claim = self.claim(mode, wait);
        claim.inspect_err(|error| Watch::turned_away(&self.shared, mode, error))?.await
    }

    fn claim(&self, mode: Mode, wait: Wait) -> Result<Acquire> {
        let wait = match wait {
            Wait::AsSet => self.options.max_wait,
            Wait::For(wait) => Some(wait),
        };
        let name = self.name.clone()?;
        let spec = || {
            self.shared.check(mode)?;
            let (label, ttl) = (self.options.label()?, self.options.lease()?);
            let background = self.shared.background()?.clone();
            let queue = wait != Some(Duration::ZERO);
            let spec = ClaimSpec::new(name.clone(), ttl, background);
            let spec = ClaimSpec { label, mode, queue, max_wait: wait, ..spec };
            let plan = Plan { wait, max_hold: self.options.max_hold, adopt: false };
            self.shared.drive(spec, plan, None)
        };
        spec().map_err(|error| error.at(self.shared.backend.name(), "lock", &name))
    }

    /// An error about this lock.
    pub(crate) fn error(&self, error: Error) -> Error {
        match &self.name {
            Ok(name) => error.at(self.shared.backend.name(), "lock", name),
            Err(_) => error,
        }
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("store", &self.shared.backend.name())
            .field("name", &self.name)
            .field("options", &self.options)
            .finish()
    }
}

/// What a keeper, its clones, its locks and its guards share.
pub(crate) struct Shared {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) capabilities: Capabilities,
    pub(crate) closed: CancellationToken,
    background: OnceLock<Background>,
    /// What the next fences of the names it has locked must be above.
    pub(crate) floors: Arc<Floors>,
    /// Told when the machine has slept: timers are late then.
    woke: Notify,
    has_steward: AtomicBool,
    /// Whether the steward looks for newcomers without being told.
    steward_is_up: AtomicBool,
    /// Drivers of new guards, for the steward, and how it is told of them.
    newcomers: std::sync::Mutex<Vec<Arc<Driver>>>,
    came: Arc<Notify>,
    /// Acquires that wait.
    pending: Pending,
    runtime_gone: AtomicBool,
    /// The same for blocking code, where it is used from there, too.
    twin: OnceLock<Arc<Shared>>,
}

impl Shared {
    fn new(backend: Arc<dyn Backend>) -> Self {
        Self {
            capabilities: backend.capabilities(),
            backend,
            closed: CancellationToken::new(),
            background: OnceLock::new(),
            floors: Arc::default(),
            woke: Notify::new(),
            has_steward: AtomicBool::new(false),
            steward_is_up: AtomicBool::new(false),
            newcomers: std::sync::Mutex::default(),
            came: Arc::default(),
            pending: Pending::default(),
            runtime_gone: AtomicBool::new(false),
            twin: OnceLock::new(),
        }
    }

    /// Lets nobody in any more.
    fn close(&self) {
        self.closed.cancel();
        // Those who wait leave the queue before all is settled, even if nobody polls them.
        for driver in self.pending.take() {
            if driver.hold.close() {
                driver.nudge();
            }
        }
    }

    /// Where the keeper's background work runs.
    pub(crate) fn background(&self) -> Result<&Background> {
        if let Some(background) = self.background.get() {
            return Ok(background);
        }
        let handle = Handle::try_current().map_err(|_| {
            let message = "no tokio runtime: make or first use the keeper inside of one, or take \
                           lockkeeper's blocking::Keeper";
            Error::new(ErrorKind::Config, message)
        })?;
        Ok(self.background.get_or_init(|| Background::new(handle)))
    }

    /// Whether a claim of this mode can be made now.
    pub(crate) fn check(&self, mode: Mode) -> Result<()> {
        if self.closed.is_cancelled() {
            return Err(Self::closed_error());
        }
        if self.runtime_gone.load(Ordering::Relaxed) {
            return Err(Self::runtime_gone());
        }
        match mode {
            Mode::Shared if !self.capabilities.shared => Err(Error::unsupported("shared locks")),
            Mode::Permits { .. } if !self.capabilities.permits => {
                Err(Error::unsupported("semaphores"))
            }
            _ => Ok(()),
        }
    }

    /// Makes a claim and what drives it.
    fn drive(
        self: &Arc<Self>,
        spec: ClaimSpec,
        plan: Plan,
        fence: Option<Fence>,
    ) -> Result<Acquire> {
        let who = (spec.name.clone(), spec.owner, spec.label.clone());
        let (mode, ttl) = (spec.mode, spec.ttl);
        let claim = self.backend.claim(spec)?;
        let hold = Arc::new(Hold::new(self.clone(), who, mode, ttl, fence));
        Ok(Acquire::new(Driver::new(claim, hold, plan)))
    }

    pub(crate) fn enter(&self) -> Option<EnterGuard<'_>> {
        self.background.get().map(Background::enter)
    }

    pub(crate) fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        if let Some(background) = self.background.get() {
            background.spawn_untracked(future);
        }
    }

    pub(crate) fn token(&self) -> Option<TaskTrackerToken> {
        self.background.get().map(Background::token)
    }

    /// Ready when the machine has woken from sleep.
    pub(crate) async fn woken(&self) {
        self.woke.notified().await;
    }

    /// Sees to it that a driver whose guard has just been made gets a tender, unless it is done
    /// before the steward's next round. False if there is no runtime any more to run one.
    pub(crate) fn entrust(self: &Arc<Self>, driver: &Arc<Driver>) -> bool {
        self.newcomers().push(driver.clone());
        if !self.steward_is_up.swap(true, Ordering::SeqCst) {
            self.employ_steward();
            self.came.notify_one();
        }
        // The steward was dropped with its runtime; it may have missed this one.
        !self.runtime_gone.load(Ordering::SeqCst)
    }

    /// A driver is done: if it was the last to come, as in a lock that is held for a moment only,
    /// nobody need look after it.
    pub(crate) fn dismiss(&self, driver: &Driver) {
        let mut newcomers = self.newcomers();
        if newcomers.last().is_some_and(|last| std::ptr::eq(&raw const **last, driver)) {
            newcomers.pop();
        }
    }

    /// Gives newcomers their tenders; false if nobody came.
    fn take_in(&self) -> bool {
        let newcomers = std::mem::take(&mut *self.newcomers());
        for driver in &newcomers {
            driver.tend();
        }
        !newcomers.is_empty()
    }

    /// Remembers an acquire that goes on, for `close` and for the steward.
    pub(crate) fn list(self: &Arc<Self>, driver: &Arc<Driver>) {
        self.pending.add(driver);
        self.employ_steward();
    }

    fn employ_steward(self: &Arc<Self>) {
        if !self.has_steward.load(Ordering::Relaxed)
            && !self.has_steward.swap(true, Ordering::Relaxed)
        {
            self.spawn(steward(Estate(Arc::downgrade(self))));
        }
    }

    /// Whether the runtime has been shut down: then a task ends as soon as it is spawned.
    pub(crate) fn runtime_is_gone(&self) -> bool {
        let Some(background) = self.background.get() else { return false };
        let gone = self.runtime_gone.load(Ordering::SeqCst) || background.is_gone();
        if gone {
            self.runtime_gone.store(true, Ordering::SeqCst);
        }
        gone
    }

    fn newcomers(&self) -> MutexGuard<'_, Vec<Arc<Driver>>> {
        self.newcomers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn closed_error() -> Error {
        Error::new(ErrorKind::Closed, "the keeper has been closed")
    }

    pub(crate) fn runtime_gone() -> Error {
        Error::new(ErrorKind::Closed, "the keeper's runtime has been shut down")
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("backend", &self.backend).finish_non_exhaustive()
    }
}

/// What the steward looks after.
struct Estate(Weak<Shared>);

impl Drop for Estate {
    fn drop(&mut self) {
        // Dropped before the keeper: the runtime is being shut down.
        if let Some(shared) = self.0.upgrade() {
            shared.runtime_gone.store(true, Ordering::SeqCst);
            let newcomers = std::mem::take(&mut *shared.newcomers());
            for driver in newcomers {
                driver.abandon(RUNTIME_GONE);
            }
        }
    }
}

/// One task for each keeper, from its first guard or wait on.
///
/// It gives every new guard a tender, in rounds: a lock that is given back before the next round, as
/// most are, never costs a task. Between rounds it sleeps for a moment, and when nobody
/// came it waits to be told. And it tells everybody when the machine has slept, because a timer is
/// then late by as long as it did, and looks for acquires that nobody polls any more.
async fn steward(estate: Estate) {
    let mut asleep = clock::asleep();
    let mut looked = Instant::now();
    let Some(came) = estate.0.upgrade().map(|shared| shared.came.clone()) else { return };
    loop {
        tokio::select! {
            () = came.notified() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        loop {
            tokio::time::sleep(ROUND).await;
            let Some(shared) = estate.0.upgrade() else { return };
            let before = std::mem::replace(&mut asleep, clock::asleep());
            // Compared with the last round, not with the last sleep: slow drift between the clocks is no sleep.
            if asleep.abs_diff(before) > FLICKER {
                observe::slept(asleep.saturating_sub(before));
                shared.woke.notify_waiters();
            }
            let pause = looked.elapsed();
            if pause >= LOOK_EVERY {
                looked = Instant::now();
                shared.pending.give_up_the_forgotten(pause > LOOK_EVERY * 2);
            }
            if !shared.take_in() {
                shared.steward_is_up.store(false, Ordering::SeqCst);
                // Whoever came just before that has told nobody.
                if !shared.take_in() {
                    break;
                }
            }
        }
    }
}
