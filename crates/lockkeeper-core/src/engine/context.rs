//! The context of a keeper: its store, its runtime, and what its locks and guards share.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};

use tokio::runtime::{EnterGuard, Handle};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::background::Background;
use crate::contract::{Backend, Capabilities, ClaimSpec, Mode};
use crate::engine::driver::Plan;
use crate::engine::floors::Floors;
use crate::engine::hold::Hold;
use crate::engine::maintenance::{Estate, steward};
use crate::engine::pending::Pending;
use crate::engine::polling::{Acquire, Driver};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;

/// What a keeper, its clones, its locks and its guards share.
pub(crate) struct KeeperContext {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) capabilities: Capabilities,
    pub(crate) closed: CancellationToken,
    pub(crate) background: OnceLock<Background>,
    /// What the next fences of the names it has locked must be above.
    pub(crate) floors: Arc<Floors>,
    /// Told when the machine has slept: timers are late then.
    pub(crate) woke: Notify,
    pub(crate) has_steward: AtomicBool,
    /// Whether the steward looks for newcomers without being told.
    pub(crate) steward_is_up: AtomicBool,
    /// Drivers of new guards, for the steward, and how it is told of them.
    pub(crate) newcomers: std::sync::Mutex<Vec<Arc<Driver>>>,
    pub(crate) came: Arc<Notify>,
    /// Acquires that wait.
    pub(crate) pending: Pending,
    pub(crate) runtime_gone: AtomicBool,
    /// The keeper's context on the blocking runtime, if this one is on another.
    pub(crate) blocking: OnceLock<Arc<KeeperContext>>,
}

impl KeeperContext {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
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
            blocking: OnceLock::new(),
        }
    }

    /// Lets nobody in any more.
    pub(crate) fn close(&self) {
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
            let message = "no tokio runtime: make or first use the keeper inside of one, open \
                           it with lockkeeper::blocking::open, or use its blocking methods";
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
    pub(crate) fn drive(
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
    pub(crate) fn take_in(&self) -> bool {
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

    pub(crate) fn newcomers(&self) -> MutexGuard<'_, Vec<Arc<Driver>>> {
        self.newcomers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn closed_error() -> Error {
        Error::new(ErrorKind::Closed, "the keeper has been closed")
    }

    pub(crate) fn runtime_gone() -> Error {
        Error::new(ErrorKind::Closed, "the keeper's runtime has been shut down")
    }
}

impl fmt::Debug for KeeperContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeeperContext").field("backend", &self.backend).finish_non_exhaustive()
    }
}
