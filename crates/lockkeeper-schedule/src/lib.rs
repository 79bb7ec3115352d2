//! Jobs that run once across a cluster, not once per instance.
//!
//! Every node starts the same [`Scheduler`], with the same [`Job`]s, on the same store. At each tick of a
//! job's [`Schedule`] one of them runs it.
//!
//! ```
//! use std::time::Duration;
//! use lockkeeper::{Keeper, Memory};
//! use lockkeeper_schedule::{Misfire, Schedule, Scheduler};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkeeper::Result<()> {
//! let keeper = Keeper::new(Memory::new()); // the store that all nodes share
//! let nightly = Schedule::cron("0 3 * * *", "Europe/Berlin")
//!     .job("nightly", |ctx| async move {
//!         println!("due at {:?}, fence {:?}", ctx.scheduled_at(), ctx.fence());
//!     })
//!     .at_most_for(Duration::from_secs(2 * 3600))
//!     .misfire(Misfire::RunOnce { within: Duration::from_secs(6 * 3600) });
//! let running = Scheduler::new(keeper).job(nightly).start()?;
//! # running.shutdown().await;
//! # Ok(())
//! # }
//! ```
//!
//! # What it guarantees
//!
//! - **At most one run for each tick,** a tick being a job and a scheduled time. The first node to ask for it
//!   has it, and its claim stays in the store after the run has ended, for long enough that a node
//!   whose clock is behind, or that started late, finds it. "Long enough" is how late a tick may be
//!   tried (a minute, or [`within`](Misfire::RunOnce), and the [jitter](Job::jitter)), and
//!   [`max_skew`](Scheduler::max_skew).
//! - **Two runs of a job do not overlap,** as far as a lock can promise that: a tick that comes while an
//!   earlier one is being run is skipped, on all nodes. A run is cancelled when its lock is lost. Where two
//!   at a time would do harm even so, send [`Context::fence`] along.
//! - A tick is "taken" only if another node has it. Where the store cannot decide (a quorum whose vote is split), the node tries
//!   again for up to a minute.
//! - A tick that this node does not run is skipped and logged with the reason. A job that panics
//!   stops neither the scheduler nor its next tick.
//! - A clock that is set back brings no tick again; one that is set forward, or a machine that slept, leaves
//!   missed ticks to the [misfire policy](Misfire).
//!
//! # What it does not
//!
//! - **At least one run.** If the node that has a tick dies, that tick is not run again: nobody
//!   knows how far it came. A tick is also lost if the store fails between its claim and its run.
//! - **At most one run if clocks are further apart** than `max_skew`, or if the store forgets. What a store
//!   keeps stands on its page in `docs/backends`.
//! - **On stores whose holds end with their process** (files, PostgreSQL), a claim is kept by the node that
//!   made it. If that node ends within the time that the claim should be kept for, a node whose clock is
//!   behind may run the tick again; how far behind it is, is how long after the tick that can happen.
//!   [`Misfire::RunOnce`] is refused there.
//!
//! # In the store
//!
//! A run holds the lock `schedule/run/<job>`; a claim is the lock `schedule/tick/<time>/<job>`. So `lockkeeper
//! ls schedule/` shows what runs where, and which ticks are claimed. PostgreSQL keeps hashes of names and cannot list
//! by prefix: there, `lockkeeper show schedule/run/<job>` shows where one job runs.

#[cfg(feature = "metrics")]
mod counting;
#[cfg(not(feature = "metrics"))]
#[path = "no_counting.rs"]
mod counting;
mod job;
mod lived;
mod outcome;
mod runner;
mod schedule;
mod scheduler;
mod ticks;
mod wall;

pub use job::{Context, Job, JobOutput, Misfire};
pub use schedule::Schedule;
pub use scheduler::{Running, Scheduler};

/// The code in the guide, so that it is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/scheduling.md")]
struct Guide;
