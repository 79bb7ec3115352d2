//! The contract, the engine and the memory store of Lockkeeper.
//!
//! Users take the `lockkeeper` crate, which re-exports all of this. Authors of stores depend on this
//! one and implement [`Backend`] and [`Claim`].
//!
//! Layers, top to bottom; each knows only the one below:
//!
//! - facades: [`Mutex`], [`RwLock`], [`Semaphore`], [`LockAll`], and their [`blocking`] twins; on top of
//!   them [`Election`];
//! - the engine (private): ask, wait, hold, renew, release or lose;
//! - the contract: [`Backend`], [`Claim`], [`Inspector`];
//! - stores: [`Memory`] here, the others in crates of their own;
//! - around them: [`Prefixed`], [`Slots`], [`Quorum`].

mod any_keeper;
mod backend;
mod background;
mod backoff;
pub mod blocking;
mod clock;
mod detached;
mod driver;
mod election;
mod error;
mod fence;
mod fence_register;
mod finding;
mod floors;
mod guard;
mod hold;
mod inspect;
mod join;
mod keeper;
mod lock_all;
#[doc(hidden)]
pub mod locked;
mod memory;
mod mutex;
mod name;
mod observe;
mod options;
mod owner;
mod pending;
pub mod plugin;
mod polling;
mod prefixed;
mod quorum;
mod rwlock;
mod scope;
mod semaphore;
mod slots;
#[doc(hidden)]
pub mod text;
mod ticket;
mod until_lost;

pub use any_keeper::AnyKeeper;
pub use backend::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fences, Grant, Holder,
    Inspector, Kind, LockInfo, Mode, Party, Release, Renewal,
};
pub use background::Background;
pub use election::{Election, Leader, Leadership, Observe};
pub use error::{Error, ErrorKind, Result};
pub use fence::Fence;
pub use fence_register::{FenceCheck, FenceRegister, FenceStore};
pub use finding::{Finding, Verdict};
pub use guard::Guard;
pub use hold::{ReleaseOutcome, State};
pub use inspect::{Event, Inspect, Watch, What};
pub use keeper::Keeper;
pub use lock_all::{Guards, LockAll};
pub use memory::Memory;
pub use mutex::Mutex;
pub use name::{Label, Name};
#[cfg(feature = "metrics")]
pub use observe::describe_metrics;
pub use owner::Owner;
pub use prefixed::Prefixed;
pub use quorum::Quorum;
pub use rwlock::RwLock;
pub use scope::{ScopedGuard, scope};
pub use semaphore::Semaphore;
pub use slots::Slots;
pub use ticket::Ticket;
