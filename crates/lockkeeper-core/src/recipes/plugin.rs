//! Locks for hosts that load capabilities at run time: a small trait that is neither async nor generic, with handles that
//! are plain text. It can cross a WASM or process boundary.
//!
//! [`LockPlugin`] is the interface for the host. [`KeeperPlugin`] implements it on a keeper with
//! [blocking](crate::blocking) methods: it can be called from any thread, inside or outside of a runtime.
//!
//! # Only the host renews
//!
//! A lock expires after the `ttl` of `try_lock(key, ttl)` unless the host renews it. With renewals in the background, a lock
//! whose handle the host lost, or whose guest was terminated, would be held for as long as the plugin lives. So renew at a
//! third of the TTL, and stop the work if the result is [`Lost`](Standing::Lost) or does not arrive in time.
//!
//! # Where a handle is valid
//!
//! On a store with leases (memory, Redis), the handle is complete: it outlives the plugin and its process, and any plugin
//! on the same store can renew and release it. On a store with sessions (PostgreSQL, files), the plugin that acquired the
//! lock owns the session. Only that plugin can renew and release the lock, which ends when the plugin is dropped or its
//! process ends.
//!
//! # What it does not have
//!
//! Waiting, shared locks, semaphores and fences. A handle is two strings and has no field for a fence: use a
//! [`Keeper`](crate::Keeper) if the protected resource can check fences.
//!
//! # Examples
//!
//! ```
//! # use lockkeeper_core as lockkeeper;
//! use std::time::Duration;
//! use lockkeeper::{Keeper, Memory};
//! use lockkeeper::plugin::{KeeperPlugin, LockPlugin, Standing};
//!
//! let plugin: Box<dyn LockPlugin> = Box::new(KeeperPlugin::new(Keeper::new(Memory::new())));
//! let ttl = Duration::from_secs(10);
//!
//! let handle = plugin.try_lock("orders/42", ttl)?.expect("it is free");
//! assert_eq!(plugin.try_lock("orders/42", ttl)?, None); // contention is not an error
//! assert_eq!(plugin.renew(&handle, ttl)?, Standing::Held);
//! plugin.release(handle)?;
//! # Ok::<(), String>(())
//! ```

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio_util::task::AbortOnDropHandle;

use crate::blocking_runtime::{self, block_on};
use crate::clock::{Moment, sleep_until};
use crate::contract::Mode;
use crate::engine::hold::ReleaseOutcome;
use crate::error::{Error, ErrorKind, Result};
use crate::locks::detached::release_unchecked;
use crate::locks::guard::Guard;
use crate::locks::keeper::Keeper;
use crate::locks::ticket::Ticket;
use crate::name::Name;
use crate::owner::Owner;

/// The interface to locks for a host. It is object-safe. Every method may block its thread until the store answers.
pub trait LockPlugin: Send + Sync {
    /// Attempts to acquire a lock for `ttl`. Returns `None` if another client holds it or waits for it.
    ///
    /// # Errors
    ///
    /// A message: the store does not answer, or the key or the TTL is not valid. A grant that the store may have made is
    /// released, or expires with its TTL.
    fn try_lock(&self, key: &str, ttl: Duration) -> Result<Option<LockHandle>, String>;

    /// Renews a lock for `ttl` from now, which may be shorter than its remaining lease.
    ///
    /// Returns [`Lost`](Standing::Lost), without effect on a later holder, if the lock of the handle has ended.
    ///
    /// # Errors
    ///
    /// A message. The lock may or may not be renewed: try again before the TTL ends.
    fn renew(&self, handle: &LockHandle, ttl: Duration) -> Result<Standing, String>;

    /// Releases a lock. Never prolongs it, even if the release fails.
    ///
    /// Returns [`AlreadyLost`](ReleaseOutcome::AlreadyLost), without effect on a later holder, if the lock of the handle
    /// has ended.
    ///
    /// # Errors
    ///
    /// A message. The release is retried in the background, and the lock expires with its TTL at the latest. Calling it
    /// again is harmless, and may return `AlreadyLost`.
    fn release(&self, handle: LockHandle) -> Result<ReleaseOutcome, String>;
}

/// A held lock as plain text. A process that has the handle can renew and release the lock.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LockHandle {
    /// The name of the lock.
    pub key: String,
    /// The id of the hold, new for each acquire.
    pub lock_id: String,
}

/// The outcome of a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Standing {
    /// The lock is held for the requested TTL.
    Held,
    /// The lock is lost. This is final.
    Lost,
}

/// A [`LockPlugin`] on a keeper.
///
/// Dropping it releases its locks on a store with sessions, and none on a store with leases.
pub struct KeeperPlugin {
    keeper: Keeper,
    sessions: Arc<Sessions>,
}

impl KeeperPlugin {
    /// Creates a plugin on a keeper, with the keeper's label. The TTL is an argument of each call.
    ///
    /// A keeper that was opened in blocking code is best: its store depends on no other runtime than the blocking one.
    pub fn new(keeper: Keeper) -> Self {
        Self { keeper, sessions: Arc::default() }
    }

    /// Returns a ticket for the hold of a handle, on a store with leases.
    fn ticket(&self, handle: &LockHandle, ttl: Duration) -> Result<Ticket> {
        let (name, owner) = (Name::new(&*handle.key)?, handle.owner()?);
        let (label, mode, fence) = (self.keeper.options().label()?, Mode::Exclusive, None);
        Ok(Ticket { name, owner, label, mode, ttl, fence })
    }

    fn has_leases(&self) -> bool {
        self.keeper.capabilities().leases
    }

    fn acquire(&self, key: &str, ttl: Duration) -> Result<Option<LockHandle>> {
        let mutex = self.keeper.mutex(key).ttl(ttl);
        let Some(guard) = mutex.blocking_try_lock()? else { return Ok(None) };
        let handle = LockHandle { key: key.to_owned(), lock_id: guard.owner().to_string() };
        if self.has_leases() {
            let _ticket = guard.detach()?;
        } else {
            self.sessions.keep(guard, ttl);
        }
        Ok(Some(handle))
    }

    fn renew_handle(&self, handle: &LockHandle, ttl: Duration) -> Result<Standing> {
        let held = if self.has_leases() {
            let (keeper, ticket) = (&self.keeper, self.ticket(handle, ttl)?);
            let adopted = block_on(keeper.adopt_unchecked(keeper.context.for_blocking(), ticket));
            if_held(adopted.and_then(Guard::detach))?.is_some()
        } else {
            match self.sessions.find(handle)? {
                None => false,
                Some(guard) if if_held(guard.blocking_extend(ttl))?.is_some() => {
                    self.sessions.prolong(&guard, ttl)
                }
                Some(_) => {
                    drop(self.sessions.take(handle)?);
                    false
                }
            }
        };
        Ok(if held { Standing::Held } else { Standing::Lost })
    }

    fn release_handle(&self, handle: &LockHandle) -> Result<ReleaseOutcome> {
        if self.has_leases() {
            let ticket = self.ticket(handle, self.keeper.options().lease()?)?;
            return block_on(release_unchecked(self.keeper.context.for_blocking(), ticket));
        }
        match self.sessions.take(handle)?.map(Arc::into_inner) {
            // A concurrent renewal still uses the guard, and drops it.
            Some(None) => Ok(ReleaseOutcome::Released),
            Some(Some(guard)) => guard.blocking_release(),
            None => Ok(ReleaseOutcome::AlreadyLost),
        }
    }
}

impl LockPlugin for KeeperPlugin {
    fn try_lock(&self, key: &str, ttl: Duration) -> Result<Option<LockHandle>, String> {
        self.acquire(key, ttl).map_err(|error| error.to_string())
    }

    fn renew(&self, handle: &LockHandle, ttl: Duration) -> Result<Standing, String> {
        self.renew_handle(handle, ttl).map_err(|error| error.to_string())
    }

    fn release(&self, handle: LockHandle) -> Result<ReleaseOutcome, String> {
        self.release_handle(&handle).map_err(|error| error.to_string())
    }
}

impl fmt::Debug for KeeperPlugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sessions = self.sessions.table().len();
        f.debug_struct("KeeperPlugin")
            .field("keeper", &self.keeper)
            .field("sessions", &sessions)
            .finish()
    }
}

impl LockHandle {
    fn owner(&self) -> Result<Owner> {
        self.lock_id.parse().map_err(|_| {
            let message = format!("not a lock id of this plugin: {:?}", self.lock_id);
            Error::new(ErrorKind::Config, message)
        })
    }
}

/// Turns the error for a lost lock into `None`: a plugin reports a loss as an outcome.
fn if_held<T>(answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(held) => Ok(Some(held)),
        Err(error) if error.kind() == ErrorKind::Lost => Ok(None),
        Err(error) => Err(error),
    }
}

/// The holds on a store without leases, by owner. A timer ends each of them after its TTL.
#[derive(Default)]
struct Sessions(Mutex<HashMap<Owner, Session>>);

struct Session {
    guard: Arc<Guard>,
    until: Moment,
    _timer: AbortOnDropHandle<()>,
}

impl Sessions {
    fn table(&self) -> MutexGuard<'_, HashMap<Owner, Session>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn session(self: &Arc<Self>, guard: Arc<Guard>, ttl: Duration) -> Session {
        let _entered = blocking_runtime::enter();
        let until = Moment::now().add(ttl);
        let timer = tokio::spawn(end(Arc::downgrade(self), guard.owner(), until));
        Session { guard, until, _timer: AbortOnDropHandle::new(timer) }
    }

    fn keep(self: &Arc<Self>, guard: Guard, ttl: Duration) {
        // Created under the mutex, so that a timer that fires at once finds the entry.
        let mut table = self.table();
        let session = self.session(Arc::new(guard), ttl);
        table.insert(session.guard.owner(), session);
    }

    /// Returns the guard of a handle, if this plugin has it under that key.
    fn find(&self, handle: &LockHandle) -> Result<Option<Arc<Guard>>> {
        let owner = handle.owner()?;
        let found = self.table().get(&owner).map(|session| session.guard.clone());
        Ok(found.filter(|guard| guard.name() == handle.key))
    }

    fn take(&self, handle: &LockHandle) -> Result<Option<Arc<Guard>>> {
        let Some(guard) = self.find(handle)? else { return Ok(None) };
        let taken = self.table().remove(&guard.owner());
        drop(guard);
        Ok(taken.map(|session| session.guard))
    }

    /// Restarts the timer of a hold; false if it has ended.
    fn prolong(self: &Arc<Self>, guard: &Arc<Guard>, ttl: Duration) -> bool {
        let mut table = self.table();
        let Some(session) = table.get_mut(&guard.owner()) else { return false };
        *session = self.session(guard.clone(), ttl);
        true
    }
}

/// Ends a hold at `until`, unless it was renewed.
async fn end(sessions: Weak<Sessions>, owner: Owner, until: Moment) {
    sleep_until(Some(until)).await;
    let Some(sessions) = sessions.upgrade() else { return };
    let mut table = sessions.table();
    let over = table.get(&owner).is_some_and(|session| session.until <= Moment::now());
    let ended = if over { table.remove(&owner) } else { None };
    // Dropped outside of the mutex, because dropping a guard releases its lock in the store.
    drop(table);
    drop(ended);
}
