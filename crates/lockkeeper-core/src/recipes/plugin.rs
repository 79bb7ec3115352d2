//! Locks for hosts that load capabilities at run time: a small trait that is neither async nor generic, with
//! handles that are plain text, so that it can be carried across a WASM or process boundary.
//!
//! [`LockPlugin`] is what the host sees. [`KeeperPlugin`] implements it on a keeper, by its
//! [blocking](crate::blocking) methods: it may be called from any thread, inside of a runtime or not.
//!
//! # Nobody renews but the host
//!
//! `try_lock(key, ttl)` says how long: a lock that is not renewed ends with its ttl. Were it renewed in the
//! background, one whose handle the host forgot, or whose guest was ended, would be held for as long
//! as the plugin lives. So renew well before the ttl ends, at a third of it, and stop the work if the
//! answer is [`Lost`](Standing::Lost), or if there is none in time.
//!
//! # Where a handle is good
//!
//! On a store with leases (memory, Redis) the handle is all there is: it outlives the plugin and its process, and
//! any plugin on the same store can renew and release it. On a store with sessions (PostgreSQL, files) the
//! plugin that took the lock has the session in it. Only that one can renew and release, and its locks
//! end when it is dropped, or with its process.
//!
//! # What it does not have
//!
//! Waiting, shared locks and semaphores; and fences, which a handle of two strings has no place for: take a
//! [`Keeper`](crate::Keeper) where what the lock guards can check them.
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
//! let handle = plugin.try_lock("orders/42", ttl)?.expect("nobody has it");
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
use crate::locks::guard::Guard;
use crate::locks::keeper::Keeper;
use crate::locks::ticket::Ticket;
use crate::name::Name;
use crate::owner::Owner;

/// Locks, as a host sees them. Object-safe; every method may block its thread for as long as the store
/// takes to answer.
pub trait LockPlugin: Send + Sync {
    /// Takes a lock for `ttl`, unless another holds it or waits for it: then the answer is `None`.
    ///
    /// # Errors
    ///
    /// What is wrong, in words: the store does not answer, or the key or the ttl cannot be used. Whatever
    /// the store granted all the same is given back, or ends with its ttl.
    fn try_lock(&self, key: &str, ttl: Duration) -> Result<Option<LockHandle>, String>;

    /// Makes a lock last for `ttl` from now, which may be shorter than what it had.
    ///
    /// A handle whose lock has ended, or has been given to another since, is [`Lost`](Standing::Lost), and
    /// changes nothing for whoever holds it now.
    ///
    /// # Errors
    ///
    /// What is wrong, in words. The lock may or may not have been renewed: ask again, while there is time.
    fn renew(&self, handle: &LockHandle, ttl: Duration) -> Result<Standing, String>;

    /// Gives a lock back. Never makes it last longer, also if it fails.
    ///
    /// If the lock has ended before, or been given to another since, the answer is
    /// [`AlreadyLost`](ReleaseOutcome::AlreadyLost), and the holder of today keeps it.
    ///
    /// # Errors
    ///
    /// What is wrong, in words. The release is sent again in the background, and the lock ends with its ttl at the
    /// latest. To call it again is harmless; the answer may then be `AlreadyLost`.
    fn release(&self, handle: LockHandle) -> Result<ReleaseOutcome, String>;
}

/// A lock that is held, as plain text. Whoever has it can renew and release the lock.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LockHandle {
    /// The name of the lock.
    pub key: String,
    /// Which hold of it: new each time.
    pub lock_id: String,
}

/// Whether a handle still has its lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Standing {
    /// It has, for the ttl that was asked for.
    Held,
    /// It has not, and never will again.
    Lost,
}

/// A [`LockPlugin`] on a keeper.
///
/// Dropping it gives back the locks of sessions that it has; on a store with leases it gives back
/// nothing.
pub struct KeeperPlugin {
    keeper: Keeper,
    sessions: Arc<Sessions>,
}

impl KeeperPlugin {
    /// A plugin on a keeper, with the keeper's label. The ttl comes with each call.
    ///
    /// Best with a keeper that was opened in blocking code: its store depends on no runtime but the blocking one.
    pub fn new(keeper: Keeper) -> Self {
        Self { keeper, sessions: Arc::default() }
    }

    /// Takes up a hold that is in the store only, and renews it.
    fn adopt(&self, handle: &LockHandle, ttl: Duration) -> Result<Option<Guard>> {
        let keeper = &self.keeper;
        let (name, owner) = (Name::new(&*handle.key)?, handle.owner()?);
        let (label, mode, fence) = (keeper.options().label()?, Mode::Exclusive, None);
        let ticket = Ticket { name, owner, label, mode, ttl, fence };
        if_held(block_on(keeper.take_up(keeper.context.for_blocking(), ticket)))
    }

    fn has_leases(&self) -> bool {
        self.keeper.capabilities().leases
    }

    fn take(&self, key: &str, ttl: Duration) -> Result<Option<LockHandle>> {
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

    fn prolong(&self, handle: &LockHandle, ttl: Duration) -> Result<Standing> {
        let held = if self.has_leases() {
            let guard = self.adopt(handle, ttl)?;
            guard.map(Guard::detach).map_or(Ok(None), if_held)?.is_some()
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

    fn give_back(&self, handle: &LockHandle) -> Result<ReleaseOutcome> {
        if self.has_leases() {
            let (name, owner) = (Name::new(&*handle.key)?, handle.owner()?);
            let context = self.keeper.context.for_blocking();
            return block_on(self.keeper.release_detached(context, name, owner));
        }
        match self.sessions.take(handle)?.map(Arc::into_inner) {
            // A renewal of it is under way, and drops it when it is done.
            Some(None) => Ok(ReleaseOutcome::Released),
            Some(Some(guard)) => guard.blocking_release(),
            None => Ok(ReleaseOutcome::AlreadyLost),
        }
    }
}

impl LockPlugin for KeeperPlugin {
    fn try_lock(&self, key: &str, ttl: Duration) -> Result<Option<LockHandle>, String> {
        self.take(key, ttl).map_err(|error| error.to_string())
    }

    fn renew(&self, handle: &LockHandle, ttl: Duration) -> Result<Standing, String> {
        self.prolong(handle, ttl).map_err(|error| error.to_string())
    }

    fn release(&self, handle: LockHandle) -> Result<ReleaseOutcome, String> {
        self.give_back(&handle).map_err(|error| error.to_string())
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
            let message = format!("no lock id of this plugin: {:?}", self.lock_id);
            Error::new(ErrorKind::Config, message)
        })
    }
}

/// `None` if the lock is lost: that is an answer here, and not a failure.
fn if_held<T>(answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(held) => Ok(Some(held)),
        Err(error) if error.kind() == ErrorKind::Lost => Ok(None),
        Err(error) => Err(error),
    }
}

/// The holds of a store without leases, by owner. Each ends by itself when its time is over.
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
        // Made under the lock, so that a timer that is over at once finds it.
        let mut table = self.table();
        let session = self.session(Arc::new(guard), ttl);
        table.insert(session.guard.owner(), session);
    }

    /// The hold of a handle, if it is one of ours and of that key.
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

    /// Counts the time of a hold from now; false if it has ended meanwhile.
    fn prolong(self: &Arc<Self>, guard: &Arc<Guard>, ttl: Duration) -> bool {
        let mut table = self.table();
        let Some(session) = table.get_mut(&guard.owner()) else { return false };
        *session = self.session(guard.clone(), ttl);
        true
    }
}

/// Ends a hold when its time is over.
async fn end(sessions: Weak<Sessions>, owner: Owner, until: Moment) {
    sleep_until(Some(until)).await;
    let Some(sessions) = sessions.upgrade() else { return };
    let mut table = sessions.table();
    let over = table.get(&owner).is_some_and(|session| session.until <= Moment::now());
    let ended = if over { table.remove(&owner) } else { None };
    // Not under our lock: it gives the lock back.
    drop(table);
    drop(ended);
}
