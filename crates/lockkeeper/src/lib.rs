//! Distributed `Mutex`, `RwLock` and `Semaphore` for tokio, on Redis, PostgreSQL, files or memory.
//!
//! # Promises
//!
//! 1. **Loss is known in time.** A guard reports `Lost` *before* the store can grant the lock to another client, even
//!    while requests hang. Work can be cancelled at that moment. Each exclusive grant has a higher fencing token (its
//!    [`Fence`]) than the one before. Exceptions: see [`Guard`].
//! 2. **Nothing leaks.** Dropping a future at any await point, killing a process at any instruction or restarting the
//!    store leaves nothing in the store past the lease: no held lock, no queued waiter, no stray key. Exceptions: the
//!    lock of a [`Ticket`] stays held for its TTL without a process, and the file store keeps the files of idle locks.
//! 3. **Contended locks are handed off, not polled for.** Releasing grants the lock to the next waiter in order and
//!    notifies it, on stores that can notify. Exceptions: Redlock has no order, and files have one within a process.
//!    On PostgreSQL and files, the first waiter of a semaphore polls.
//!
//! # Example
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkeeper::Result<()> {
//! # if !cfg!(feature = "memory") { return Ok(()) }
//! // `memory:` is for tests. redis://…, postgres://… and file:… lock across processes, with the same code.
//! let keeper = lockkeeper::open("memory:").await?;
//! let orders = keeper.mutex("orders/42");
//!
//! let guard = orders.lock().await?; // waits for the current holder
//! assert!(orders.try_lock().await?.is_none()); // contention is not an error
//!
//! let fence = guard.fence(); // the fencing token: send it with every write
//! guard.while_held(async { println!("working under {fence:?}") }).await?; // dropped if the lock is lost
//! guard.release().await?; // dropping the guard releases in the background
//!
//! keeper.with_lock("orders/43", async |guard| println!("holding {}", guard.name())).await?;
//! # keeper.close().await;
//! # Ok(())
//! # }
//! ```
//!
//! # Which lock to use
//!
//! | to prevent | use |
//! |---|---|
//! | concurrent access within one process | `tokio::sync::Mutex`; this crate is not needed |
//! | concurrent access by several processes | [`Mutex`] |
//! | a writer beside readers or another writer | [`RwLock`] |
//! | more than *n* concurrent holders | [`Semaphore`] |
//! | deadlock between clients that need several locks | [`LockAll`], from [`lock_all`] |
//! | two leaders | [`Election`], from [`election`] |
//! | concurrent calls of a function | `#[locked]`, with the feature `macros` |
//! | that a lock ends with the process that acquired it | [`Guard::detach`] and [`adopt`] |
//!
//! [`lock_all`]: Keeper::lock_all
//! [`adopt`]: Keeper::adopt
//! [`election`]: Keeper::election
//!
//! All types have async and [`blocking`] methods. The modules `redis`, `postgres` and `file` have the types of the
//! stores, and [`backend`] has the contract for other stores.
//!
//! # What it does not promise
//!
//! - **Exclusion when a process pauses and nothing checks the fence.** A process may be paused between a call of
//!   [`is_held`](Guard::is_held) and the next line, for longer than its lease, and then write while another process
//!   holds the lock. Where that does harm, send the [`Fence`] with every write, and have the resource reject a fence
//!   that is lower than the highest it has seen ([`FenceRegister`]).
//! - **Exclusion when clocks jump.** Leases are measured by the client and by the store. An allowance of 1 % and 2 ms
//!   covers clock drift. Nothing covers a clock that is set, or whose speed is wrong by more.
//! - **Exclusion beyond the store's reach.** [`Memory`] excludes within its process, files within their machine.
//! - **Safety on a store that forgets.** A store that loses an acknowledged write can grant a lock twice. The pages in
//!   `docs/backends` state what each store guarantees.
//! - **Implicit re-entrancy.** Two guards of one name exclude each other, even in one task, unless both are acquired
//!   for a [`scope`](fn@scope).
//!
//! # Features
//!
//! - `memory` (default): `memory:` URLs. Turn it off so that a production build cannot be configured with a store that
//!   excludes only its own process. The type [`Memory`] is always available, for tests.
//! - `redis`: `redis://`, `redis+unix://`, `redis+sentinel://`, `redis+cluster://` and `redlock://` URLs. `redis-tls`:
//!   the same over TLS, `rediss://` and so on.
//! - `postgres`: `postgres://` URLs. `postgres-tls`: the same with TLS. `deadpool`: connections from a pool of the
//!   `deadpool-postgres` crate.
//! - `file`: `file:` URLs, on Unix.
//! - `macros`: the attribute `#[locked]`, and `install`.
//! - `serde`: `Serialize` for tickets, fences and inspection results, and `Deserialize` for tickets and fences.
//! - `metrics`: counters and histograms for the `metrics` crate. `spans`: `tracing` spans. Both are described in
//!   `docs/guides/observability.md`, and cost nothing while they are off.

pub mod backend;
pub mod blocking;
mod diagnose;
#[cfg(feature = "macros")]
mod install;
mod open;

pub use diagnose::diagnose;
pub use open::open;

// The keeper, its locks and their guards.
pub use lockkeeper_core::{
    Fence, Guard, Guards, Keeper, Label, LockAll, Mode, Mutex, Name, Owner, ReleaseOutcome, RwLock,
    Semaphore, State, Ticket,
};

// Leader election.
pub use lockkeeper_core::{Election, Leader, Leadership, Observe};
// `#[locked]` and re-entrancy.
#[cfg(feature = "macros")]
pub use install::install;
pub use lockkeeper_core::{ScopedGuard, scope};
#[cfg(feature = "macros")]
pub use lockkeeper_macros::locked;

// A small sync trait for hosts that load locks as a plugin.
pub use lockkeeper_core::plugin;

// Errors.
pub use lockkeeper_core::{Error, ErrorKind, Result};
// For `lockkeeper-cli`, which prints names and labels that other clients chose.
#[doc(hidden)]
pub use lockkeeper_core::text;

// Fence checks, on the side of the resource.
pub use lockkeeper_core::{FenceCheck, FenceRegister, FenceStore};
// Metrics.
#[cfg(feature = "metrics")]
pub use lockkeeper_core::describe_metrics;

// Inspection and diagnosis.
pub use lockkeeper_core::{
    Event, EventKind, Finding, Inspect, Kind, LockInfo, LossReason, Participant, Severity, Watch,
};

// The store for tests. The other stores have their own modules.
pub use lockkeeper_core::Memory;

/// The store behind `file:` URLs: locks between the processes of one machine, in a directory.
#[cfg(feature = "file")]
pub mod file {
    pub use lockkeeper_file::{File, Options};
}

/// The stores behind `redis://`, `redis+unix://`, `redis+sentinel://`, `redis+cluster://` and `redlock://` URLs.
#[cfg(feature = "redis")]
pub mod redis {
    pub use lockkeeper_redis::{Config, Fences, Protocol, Redis, redlock};
}

/// The store behind `postgres://` URLs, and advisory locks for any driver.
#[cfg(feature = "postgres")]
pub mod postgres {
    pub use lockkeeper_postgres::{AdvisoryKey, Fences, Postgres, TransactionLock};
}

/// The functions that code generated by `#[locked]` calls. It changes without notice.
#[cfg(feature = "macros")]
#[doc(hidden)]
pub mod __private {
    pub use crate::install::installed;
    pub use lockkeeper_core::locked::{
        Wanted, run, run_blocking, run_blocking_reentrant, run_reentrant,
    };
}

/// The code in the README, which is also an example that `./check examples` runs.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// The code in the guide to leader election.
#[cfg(all(doctest, feature = "memory"))]
#[doc = include_str!("../../../docs/guides/election.md")]
struct ElectionGuide;

/// The code on the page of the Redis store.
#[cfg(all(doctest, feature = "redis"))]
#[doc = include_str!("../../../docs/backends/redis.md")]
struct RedisPage;

/// The code in the guide to `#[locked]`.
#[cfg(all(doctest, feature = "macros"))]
#[doc = include_str!("../../../docs/guides/locked.md")]
struct LockedGuide;
