//! The contract, the engine and the memory store of Lockkeeper.
//!
//! Applications use the `lockkeeper` crate, which re-exports this one. Authors of stores depend on this crate and
//! implement [`Backend`] and [`Claim`].
//!
//! Layers, from top to bottom. Imports point downwards only:
//!
//! - recipes: [`Election`], [`scope`], [`plugin`], [`FenceRegister`];
//! - locks: [`Keeper`], [`Mutex`], [`RwLock`], [`Semaphore`], [`LockAll`], for async and [`blocking`] code;
//! - the engine (private): acquire, wait, hold, renew, release or lose;
//! - stores: [`Memory`], the combinators [`Prefixed`], [`Slots`], [`LocalQueue`] and [`Quorum`]; one crate for each
//!   external store;
//! - the contract: [`Backend`], [`Claim`], [`Inspector`];
//! - base types: [`Error`], [`Name`], [`Owner`], [`Fence`], [`coalescer`].

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
/// Async and blocking code use the same types. Each async method that waits has a counterpart that blocks its thread,
/// with the prefix `blocking_`: [`Mutex::lock`] and [`Mutex::blocking_lock`], [`Guard::release`] and
/// [`Guard::blocking_release`]. Locks of both kinds exclude each other.
///
/// # Where they may be called
///
/// On a plain thread, inside `spawn_blocking`, and inside an async task, whose thread they block. They do not panic
/// inside a runtime. A thread of Lockkeeper, the blocking runtime, renews and releases the locks of `blocking_` methods.
/// So these methods work even on the only thread of a runtime.
///
/// # What still depends on another runtime
///
/// - The connections of a store that was opened in an async runtime may belong to that runtime. If its only thread is
///   blocked, the store does not answer. If blocking methods are called on threads of an async runtime, open the store
///   with `lockkeeper::blocking::open`: the keeper works in async code as well.
/// - A guard of an async method belongs to the keeper's runtime, even if a blocking method releases it. While all threads
///   of that runtime are blocked, the lock is not renewed, and is reported as lost in time. If the store does not answer
///   for that reason, `blocking_` methods of the guard return an error.
/// - [`Keeper::blocking_close`] waits for the releases of async guards, which the keeper's runtime sends. On the only
///   thread of that runtime it would deadlock: await [`Keeper::close`] there.
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
