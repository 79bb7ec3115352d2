//! The lock handle: the implementation shared by all kinds of locks.

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

/// A name on a keeper's store, with options. Every kind of lock wraps one.
#[derive(Debug, Clone)]
pub(crate) struct LockHandle {
    pub(crate) context: Arc<KeeperContext>,
    pub(crate) name: Result<Name>,
    pub(crate) options: Options,
}

impl LockHandle {
    /// Acquires the lock; contention for longer than `max_wait` is an error.
    pub(crate) async fn acquire(&self, mode: Mode) -> Result<Guard> {
        self.acquire_on(self.context.live(), mode).await
    }

    /// Blocking form of [`acquire`](Self::acquire).
    pub(crate) fn blocking_acquire(&self, mode: Mode) -> Result<Guard> {
        block_on(self.acquire_on(self.context.for_blocking(), mode))
    }

    /// Acquires the lock; contention for longer than `wait` is `None`.
    pub(crate) async fn try_acquire(&self, mode: Mode, wait: Duration) -> Result<Option<Guard>> {
        self.try_acquire_on(self.context.live(), mode, wait).await
    }

    /// Blocking form of [`try_acquire`](Self::try_acquire).
    pub(crate) fn blocking_try_acquire(&self, mode: Mode, wait: Duration) -> Result<Option<Guard>> {
        block_on(self.try_acquire_on(self.context.for_blocking(), mode, wait))
    }

    /// Does what [`acquire`](Self::acquire) does, on one of the keeper's two contexts.
    pub(crate) async fn acquire_on(
        &self,
        context: &Arc<KeeperContext>,
        mode: Mode,
    ) -> Result<Guard> {
        match self.start(context, mode, self.options.max_wait).await? {
            Acquired::Held(claim) => Ok(Guard::new(claim)),
            Acquired::NotAcquired { waited } => Err(self.error(Error::timed_out(waited))),
        }
    }

    /// Does what [`try_acquire`](Self::try_acquire) does, on one of the keeper's two contexts.
    pub(crate) async fn try_acquire_on(
        &self,
        context: &Arc<KeeperContext>,
        mode: Mode,
        wait: Duration,
    ) -> Result<Option<Guard>> {
        match self.start(context, mode, Some(wait)).await? {
            Acquired::Held(claim) => Ok(Some(Guard::new(claim))),
            Acquired::NotAcquired { .. } => Ok(None),
        }
    }

    async fn start(
        &self,
        context: &Arc<KeeperContext>,
        mode: Mode,
        wait: Option<Duration>,
    ) -> Result<Acquired> {
        // A store whose futures are ready at once never yields: a loop of acquires would starve other tasks.
        tokio::task::coop::consume_budget().await;
        let claim = self.claim(context, mode, wait);
        claim.inspect_err(|error| observe::rejected(context.store, mode, error))?.await
    }

    fn claim(
        &self,
        context: &Arc<KeeperContext>,
        mode: Mode,
        wait: Option<Duration>,
    ) -> Result<Acquire> {
        let name = self.name.clone()?;
        let acquire = || {
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
        acquire().map_err(|error| error.at(context.store, "lock", &name))
    }

    /// Returns whether a guard holds this lock (or this semaphore, if `mode` is for permits).
    pub(crate) fn is_of(&self, guard: &Guard, mode: Mode) -> bool {
        let is_of = |name: &Name| guard.is_of(&self.context.backend, name, mode.kind());
        self.name.as_ref().is_ok_and(is_of)
    }

    /// Adds the store and the name of this lock to an error.
    pub(crate) fn error(&self, error: Error) -> Error {
        match &self.name {
            Ok(name) => error.at(self.context.store, "lock", name),
            Err(_) => error,
        }
    }
}
