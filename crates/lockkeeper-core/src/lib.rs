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
mod background;
mod backoff;
pub mod blocking;
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

pub use any_keeper::AnyKeeper;
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
pub use stores::memory::Memory;
pub use stores::prefixed::Prefixed;
pub use stores::quorum::Quorum;
pub use stores::slots::Slots;
