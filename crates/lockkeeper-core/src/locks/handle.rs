//! The lock handle: what every kind of lock is made of.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::blocking_runtime::block_on;
use crate::contract::{ClaimSpec, Mode};
use crate::engine::acquire::{Acquire, Acquired};
use crate::engine::claim_driver::{AcquireMethod, AcquireOptions};
use crate::engine::context::KeeperContext;
use crate::engine::observe;
use crate::error::{Error, Result};
use crate::locks::guard::Guard;
use crate::name::Name;
use crate::options::Options;

/// How long an acquire may wait for other holders.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wait {
    /// As the lock's `max_wait` says.
    AsSet,
    /// This long.
    For(Duration),
}

/// What every kind of lock is made of: a name on the store of a keeper, and options.
#[derive(Clone)]
pub(crate) struct LockHandle {
    pub(crate) context: Arc<KeeperContext>,
    pub(crate) name: Result<Name>,
    pub(crate) options: Options,
}

impl LockHandle {
    /// Acquires; contention for longer than `max_wait` is an error.
    pub(crate) async fn acquire(&self, mode: Mode) -> Result<Guard> {
        self.acquire_on(self.context.live(), mode).await
    }

    /// Acquires from blocking code; contention for longer than `max_wait` is an error.
    pub(crate) fn blocking_acquire(&self, mode: Mode) -> Result<Guard> {
        block_on(self.acquire_on(self.context.for_blocking(), mode))
    }

    /// Acquires; contention for longer than `wait` is `None`.
    pub(crate) async fn try_acquire(&self, mode: Mode, wait: Duration) -> Result<Option<Guard>> {
        self.try_acquire_on(self.context.live(), mode, wait).await
    }

    /// Acquires from blocking code; contention for longer than `wait` is `None`.
    pub(crate) fn blocking_try_acquire(&self, mode: Mode, wait: Duration) -> Result<Option<Guard>> {
        block_on(self.try_acquire_on(self.context.for_blocking(), mode, wait))
    }

    /// Acquires on one of the keeper's two contexts.
    pub(crate) async fn acquire_on(
        &self,
        context: &Arc<KeeperContext>,
        mode: Mode,
    ) -> Result<Guard> {
        match self.start(context, mode, Wait::AsSet).await? {
            Acquired::Held(claim) => Ok(Guard::new(claim)),
            Acquired::NotInTime { waited } => Err(self.error(Error::timed_out(waited))),
        }
    }

    /// Acquires on one of the keeper's two contexts; contention for longer than `wait` is `None`.
    pub(crate) async fn try_acquire_on(
        &self,
        context: &Arc<KeeperContext>,
        mode: Mode,
        wait: Duration,
    ) -> Result<Option<Guard>> {
        match self.start(context, mode, Wait::For(wait)).await? {
            Acquired::Held(claim) => Ok(Some(Guard::new(claim))),
            Acquired::NotInTime { .. } => Ok(None),
        }
    }

    async fn start(
        &self,
        context: &Arc<KeeperContext>,
        mode: Mode,
        wait: Wait,
    ) -> Result<Acquired> {
        // A store whose answers are always there would never let other tasks of this thread run.
        tokio::task::coop::consume_budget().await;
        let claim = self.claim(context, mode, wait);
        claim.inspect_err(|error| observe::rejected(context.store, mode, error))?.await
    }

    fn claim(&self, context: &Arc<KeeperContext>, mode: Mode, wait: Wait) -> Result<Acquire> {
        let wait = match wait {
            Wait::AsSet => self.options.max_wait,
            Wait::For(wait) => Some(wait),
        };
        let name = self.name.clone()?;
        let spec = || {
            context.check(mode)?;
            let (label, ttl) = (self.options.label()?, self.options.lease()?);
            let background = context.background()?.clone();
            let queue = wait != Some(Duration::ZERO);
            let spec = ClaimSpec::new(name.clone(), ttl, background);
            let spec = ClaimSpec { label, mode, queue, max_wait: wait, ..spec };
            let (max_hold, method) = (self.options.max_hold, AcquireMethod::Attempt);
            let options = AcquireOptions { wait, max_hold, method };
            Acquire::new(context, spec, options, None)
        };
        spec().map_err(|error| error.at(context.backend.name(), "lock", &name))
    }

    /// Whether a guard is a hold of this lock, or of this semaphore.
    pub(crate) fn is_of(&self, guard: &Guard, mode: Mode) -> bool {
        let is_of = |name: &Name| guard.is_of(&self.context.backend, name, mode.kind());
        self.name.as_ref().is_ok_and(is_of)
    }

    /// An error about this lock.
    pub(crate) fn error(&self, error: Error) -> Error {
        match &self.name {
            Ok(name) => error.at(self.context.backend.name(), "lock", name),
            Err(_) => error,
        }
    }
}

impl fmt::Debug for LockHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockHandle")
            .field("store", &self.context.backend.name())
            .field("name", &self.name)
            .field("options", &self.options)
            .finish()
    }
}
