//! The contract, the engine and the memory store of Lockkeeper.
//!
//! Users take the `lockkeeper` crate, which re-exports all of this. Authors of stores depend on this
//! one and implement [`Backend`] and [`Claim`].
//!
//! Layers, top to bottom; each knows only the one below:
//!
//! - locks: [`Keeper`], [`Mutex`], [`RwLock`], [`Semaphore`], [`LockAll`], for async and for [`blocking`] code; on top of
//!   them [`Election`];
//! - the engine (private): ask, wait, hold, renew, release or lose;
//! - the contract: [`Backend`], [`Claim`], [`Inspector`];
//! - stores: [`Memory`] here, the others in crates of their own;
//! - around them: [`Prefixed`], [`Slots`], [`LocalQueue`], [`Quorum`].

mod background;
mod backoff;
mod blocking_runtime;
mod clock;
pub mod coalescer;
mod contract;
mod diagnose;
mod engine;
mod error;
mod fence;
mod futures;
mod locks;
mod loss;
mod name;
mod options;
mod owner;
mod recipes;
mod release;
mod stores;
#[doc(hidden)]
pub mod text;

/// Locks in code that is not async.
///
/// Every type is used by both kinds of code. A method that waits has a counterpart that blocks its thread instead, with
/// the prefix `blocking_`: [`Mutex::lock`] and [`Mutex::blocking_lock`], [`Guard::release`] and
/// [`Guard::blocking_release`]. The two kinds exclude each other, as any two claims do.
///
/// # Where they may be called
///
/// On a plain thread, inside of `spawn_blocking`, and inside of an async task. There they block the thread of that task, as
/// any blocking call does. They do not panic inside of a runtime. Locks of `blocking_` methods are renewed and released by
/// a thread of Lockkeeper's own, the blocking runtime, so a blocked thread holds up none of that: they work on the only
/// thread of a runtime, too.
///
/// # What still depends on another runtime
///
/// - A store that was opened in an async runtime may have its connections there. If the only thread of that runtime is
///   blocked, the store does not answer. Open the store from blocking code (`lockkeeper::blocking::open`) if blocking
///   methods are called on threads of an async runtime: the keeper works in async code as well.
/// - A guard of an async method belongs to the keeper's runtime, in whatever way it is released. While all threads of that
///   runtime are blocked, the lock is not renewed, and is reported as lost in time.
///   If the store does not answer for that reason, `blocking_` methods of the guard end with an error.
/// - [`Keeper::blocking_close`] waits for the releases of async guards, which the keeper's runtime sends. On the only thread
///   of that runtime it would wait for itself: await [`Keeper::close`] there.
///
/// # Examples
///
/// ```
/// # use lockkeeper_core as lockkeeper;
/// use lockkeeper::{Keeper, Memory};
///
/// # fn main() -> lockkeeper::Result<()> {
/// let keeper = Keeper::new(Memory::new());
/// let guard = keeper.mutex("orders/42").blocking_lock()?;
/// println!("fence {:?}", guard.fence());
/// guard.blocking_release()?;
/// keeper.blocking_close();
/// # Ok(())
/// # }
/// ```
pub mod blocking {
    pub use crate::blocking_runtime::block_on;
    pub use crate::recipes::scope::blocking_scope as scope;
}

pub use background::Background;
pub use contract::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fences, Grant, Holder,
    Inspector, Kind, LockInfo, Mode, Participant, Release, Renewal, Retry,
};
pub use diagnose::{Finding, Severity};
pub use engine::hold::{ReleaseOutcome, State};
#[cfg(feature = "metrics")]
pub use engine::observe::describe_metrics;
pub use error::{Error, ErrorKind, Result};
pub use fence::Fence;
pub use locks::guard::Guard;
pub use locks::inspect::{Event, EventKind, Inspect, Watch};
pub use locks::keeper::Keeper;
pub use locks::lock_all::{Guards, LockAll};
pub use locks::mutex::Mutex;
pub use locks::rwlock::RwLock;
pub use locks::semaphore::Semaphore;
pub use locks::ticket::Ticket;
pub use loss::LossReason;
pub use name::{Label, Name};
pub use owner::Owner;
pub use recipes::election::{Election, Leader, Leadership, Observe};
pub use recipes::fence_register::{FenceCheck, FenceRegister, FenceStore};
#[doc(hidden)]
pub use recipes::locked;
pub use recipes::plugin;
pub use recipes::scope::{ScopedGuard, scope};
pub use stores::local_queue::LocalQueue;
pub use stores::memory::Memory;
pub use stores::prefixed::Prefixed;
pub use stores::quorum::Quorum;
pub use stores::slots::Slots;
