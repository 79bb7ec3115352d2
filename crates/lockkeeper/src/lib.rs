//! Distributed locks with tokio's words, on the store you already run.
//!
//! # The promise
//!
//! 1. **Loss is known in time.** A guard reports "lost" *before* the store can grant the lock to another
//!    client, even while requests hang, and work can be cancelled at that moment. Every exclusive grant
//!    carries a fencing token that rises. Exceptions: see [`Guard`].
//! 2. **It leaks nothing.** Drop a future at any await, kill a process at any instruction, restart the
//!    store: no lock stays held past its lease, no waiter stays queued, no key stays behind.
//! 3. **It hands over at wire speed.** Releasing gives the lock to the next in line, in order, and
//!    tells it: no polling, where the store can push.
//!
//! # A dozen lines
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkeeper::Result<()> {
//! # if !cfg!(feature = "memory") { return Ok(()) }
//! let keeper = lockkeeper::open("memory:").await?;
//! let orders = keeper.mutex("orders/42");
//!
//! let guard = orders.lock().await?; // waits for whoever holds it
//! assert!(orders.try_lock().await?.is_none()); // contention is not an error
//!
//! let fence = guard.fence(); // send it along with each write
//! guard.while_held(async { println!("working under {fence:?}") }).await?; // stopped if lost
//! guard.release().await?; // dropping it would do, too
//!
//! keeper.with_lock("orders/43", async |guard| println!("holding {}", guard.name())).await?;
//! # keeper.close().await;
//! # Ok(())
//! # }
//! ```
//!
//! # Which lock do I need?
//!
//! | what must not happen | lock |
//! |---|---|
//! | two at a time, in one process | `tokio::sync::Mutex`: you do not need this crate |
//! | two at a time, in several processes | [`Mutex`] |
//! | a writer beside anyone else; readers may be many | [`RwLock`] |
//! | more than *n* at a time | [`Semaphore`] |
//! | a change of several things by halves | [`LockAll`], from [`lock_all`] |
//! | two who both act as the leader | [`Election`], from [`election`] |
//! | two at a time in a whole function | `#[locked]`, with the feature `macros` |
//! | a lock that ends with the process that took it | [`Guard::detach`] and [`adopt`] |
//!
//! [`lock_all`]: Keeper::lock_all
//! [`adopt`]: Keeper::adopt
//! [`election`]: Keeper::election
//!
//! Each is for async and for [`blocking`] code. The stores have modules of their own (`redis`, `postgres`, `file`), and so has
//! what the author of a store needs: [`backend`].
//!
//! # What it does not promise
//!
//! - **Exclusion, if nobody checks the fence.** A process may be paused between a look at
//!   [`is_held`](Guard::is_held) and the next line, for longer than its lease. It then writes while
//!   another holds. Where that does harm, send the [`Fence`] along and let the thing you write to
//!   refuse a lower one than it has seen.
//! - **Exclusion, if clocks jump.** Leases are counted on this machine's clock and on the store's. An
//!   allowance of 1 % and 2 ms covers their drift; nothing covers one that jumps or runs at
//!   another speed.
//! - **Re-entrancy by itself.** Two guards exclude each other, even in one task. Within a [`scope`](fn@scope),
//!   those who ask for it count up.
//! - **That the store keeps its word.** A store that forgets what it acknowledged gives a lock twice.
//!   What each one guarantees stands in `docs/backends`.
//! - **Other processes, on [`Memory`].** It excludes only the process that it lives in; files exclude
//!   only the machine that they are on.
//!
//! # Features
//!
//! - `memory` (default): `memory:` URLs. Off, a production build cannot be configured to exclude
//!   nobody but itself. The type [`Memory`] is always there, for tests.
//! - `macros`: the attribute `#[locked]`, a function that runs under a lock, and `install`.
//! - `redis`: `redis://`, `redis+sentinel://`, `redis+cluster://` and `redlock://` URLs.
//! - `redis-tls`: the same over TLS, `rediss://`.
//! - `file`: `file:` URLs and the module `file`: locks between the processes of one machine, on Unix.
//! - `postgres`: `postgres:` URLs, locks on a PostgreSQL server; `postgres-tls`: the same, with TLS; `deadpool`: with
//!   connections from a pool of the crate `deadpool-postgres`.
//! - `serde`: tickets, fences and what inspection tells can be written and read.
//! - `metrics`: counters and histograms by the facade of the `metrics` crate; `spans`: spans of `tracing`. What
//!   they tell stands in `docs/guides/observability.md`. Off, they cost nothing.

pub mod backend;
pub mod blocking;
mod diagnose;
#[cfg(feature = "macros")]
mod install;
mod open;

pub use diagnose::diagnose;
pub use open::open;

// The keeper, its locks, and what one has while holding them.
pub use lockkeeper_core::{
    Fence, Guard, Guards, Keeper, Label, LockAll, Mode, Mutex, Name, Owner, ReleaseOutcome, RwLock,
    Semaphore, State, Ticket,
};

// Who leads.
pub use lockkeeper_core::{Election, Leader, Leadership, Observe};
// The same as an attribute on a function, and re-entrancy.
#[cfg(feature = "macros")]
pub use install::install;
pub use lockkeeper_core::{ScopedGuard, scope};
#[cfg(feature = "macros")]
pub use lockkeeper_macros::locked;

// For hosts that load locks as a plugin.
pub use lockkeeper_core::plugin;

// Errors.
pub use lockkeeper_core::{Error, ErrorKind, Result};
// For the command, which shows what others wrote.
#[doc(hidden)]
pub use lockkeeper_core::text;

// Fences, on the side of what a lock protects.
pub use lockkeeper_core::{FenceCheck, FenceRegister, FenceStore};
// What locks do, as metrics.
#[cfg(feature = "metrics")]
pub use lockkeeper_core::describe_metrics;

// A look into the store.
pub use lockkeeper_core::{
    Event, EventKind, Finding, Inspect, Kind, LockInfo, LossReason, Participant, Severity, Watch,
};

// The store for tests; the others have modules of their own.
pub use lockkeeper_core::Memory;

/// Locks between the processes of one machine, in a directory: the store behind `file:` URLs.
#[cfg(feature = "file")]
pub mod file {
    pub use lockkeeper_file::{File, Options};
}

/// Locks on Redis: the stores behind `redis://`, `redis+sentinel://`, `redis+cluster://` and `redlock://` URLs.
#[cfg(feature = "redis")]
pub mod redis {
    pub use lockkeeper_redis::{Config, Fences, Protocol, Redis, redlock};
}

/// Locks on PostgreSQL: the store behind `postgres://` URLs, and advisory locks for any driver.
#[cfg(feature = "postgres")]
pub mod postgres {
    pub use lockkeeper_postgres::{AdvisoryKey, Fences, Postgres, TransactionLock};
}

/// What `#[locked]` writes calls to. It changes without notice.
#[cfg(feature = "macros")]
#[doc(hidden)]
pub mod __private {
    pub use crate::install::installed;
    pub use lockkeeper_core::locked::{
        Wanted, run, run_blocking, run_blocking_reentrant, run_reentrant,
    };
}

/// The code in the README, so that it is compiled and run.
#[cfg(all(doctest, feature = "memory"))]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// The code in the guide to elections.
#[cfg(all(doctest, feature = "memory"))]
#[doc = include_str!("../../../docs/guides/election.md")]
struct ElectionGuide;

/// The code on the pages of the stores.
#[cfg(all(doctest, feature = "redis"))]
#[doc = include_str!("../../../docs/backends/redis.md")]
struct RedisPage;

/// The code in the guide to functions under a lock.
#[cfg(all(doctest, feature = "macros"))]
#[doc = include_str!("../../../docs/guides/locked.md")]
struct LockedGuide;
