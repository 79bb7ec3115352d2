//! The context of a keeper: its store, its runtime, and the state that its locks and guards share.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, OnceLock};

use tokio::runtime::{EnterGuard, Handle};
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::background::Background;
use crate::contract::{Backend, Capabilities, Mode};
use crate::engine::floors::Floors;
use crate::engine::maintenance::{Maintained, Maintenance};
use crate::error::{Error, ErrorKind, Result};
use crate::owner::Owner;

/// The state that a keeper, its clones, its locks and its guards share.
pub(crate) struct KeeperContext {
    pub(crate) backend: Arc<dyn Backend>,
    /// The store's name.
    pub(crate) store: &'static str,
    pub(crate) capabilities: Capabilities,
    pub(crate) closed: CancellationToken,
    pub(crate) background: OnceLock<Background>,
    /// The lowest fences that this keeper accepts for its next grants.
    pub(crate) floors: Arc<Floors>,
    pub(super) maintenance: Arc<Maintenance>,
    /// The keeper's context on the blocking runtime, if this one is on another.
    pub(crate) blocking: OnceLock<Arc<KeeperContext>>,
}

impl KeeperContext {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        Self {
            capabilities: backend.capabilities(),
            store: backend.name(),
            backend,
            closed: CancellationToken::new(),
            background: OnceLock::new(),
            floors: Arc::default(),
            maintenance: Arc::default(),
            blocking: OnceLock::new(),
        }
    }

    /// Returns a new context on the same store, on the blocking runtime, that shares the floors.
    pub(crate) fn new_blocking(&self) -> Self {
        let background = OnceLock::from(Background::blocking());
        Self { background, floors: self.floors.clone(), ..Self::new(self.backend.clone()) }
    }

    /// Fails waiting and future acquires.
    pub(crate) fn close(&self) {
        self.closed.cancel();
        // Waiters leave the queue before `close` returns, even if they are not polled.
        self.maintenance.close();
    }

    /// Returns the handle that spawns background work. The first call binds the keeper to the current runtime.
    pub(crate) fn background(&self) -> Result<&Background> {
        if let Some(background) = self.background.get() {
            return Ok(background);
        }
        let handle = Handle::try_current().map_err(|_| {
            let message = "no tokio runtime: create or first use the keeper inside a runtime, open it with \
                           lockkeeper::blocking::open, or use its blocking methods";
            Error::new(ErrorKind::Config, message)
        })?;
        Ok(self.background.get_or_init(|| Background::new(handle)))
    }

    /// Checks that the keeper is open and that the store supports a mode.
    pub(crate) fn check(&self, mode: Mode) -> Result<()> {
        if self.closed.is_cancelled() {
            return Err(Self::closed_error());
        }
        if self.maintenance.runtime_is_gone() {
            return Err(Self::runtime_gone_error());
        }
        match mode {
            Mode::Shared if !self.capabilities.shared => Err(Error::unsupported("shared locks")),
            Mode::Permits { .. } if !self.capabilities.permits => {
                Err(Error::unsupported("semaphores"))
            }
            _ => Ok(()),
        }
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

    /// Registers a new hold to be driven in the background. Returns false if the runtime has been shut down.
    pub(crate) fn register_hold(&self, claim: Arc<dyn Maintained>) -> bool {
        self.maintenance.register_hold(claim, self.background.get())
    }

    /// Registers an acquire that waits, for `close` and for the maintenance task.
    pub(crate) fn register_pending(&self, claim: &Arc<impl Maintained + 'static>) {
        let claim = Arc::downgrade(claim);
        self.maintenance.register_pending(claim, self.background.get());
    }

    /// Returns the owners of the acquires that wait, in the order in which they began.
    pub(crate) fn waiting_owners(&self) -> Vec<Owner> {
        self.maintenance.waiting_owners()
    }

    /// Returns whether the runtime has been shut down. Spawns a task to find out.
    pub(crate) fn runtime_is_gone(&self) -> bool {
        let Some(background) = self.background.get() else { return false };
        let gone = self.maintenance.runtime_is_gone() || background.is_gone();
        if gone {
            self.maintenance.set_runtime_gone();
        }
        gone
    }

    /// Returns whether the runtime has been shut down. Cheap enough for every acquire: the maintenance task records the end
    /// of its runtime. Only a keeper without a maintenance task spawns a task to find out.
    pub(crate) fn runtime_is_known_gone(&self) -> bool {
        self.maintenance.runtime_is_gone()
            || (!self.maintenance.has_task() && self.runtime_is_gone())
    }

    pub(crate) fn closed_error() -> Error {
        Error::new(ErrorKind::Closed, "the keeper has been closed")
    }

    pub(crate) fn runtime_gone_error() -> Error {
        Error::new(ErrorKind::Closed, "the keeper's runtime has been shut down")
    }
}

impl fmt::Debug for KeeperContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeeperContext").field("backend", &self.backend).finish_non_exhaustive()
    }
}
