//! Jobs that run once across a cluster, not once per instance.
//!
//! Every node starts the same [`Scheduler`], with the same [`Job`]s, on the same store. At each tick of a
//! job's [`Schedule`] one node runs the job.
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
//! - **At most one run for each tick.** A tick is a job and a scheduled time. The first node to claim a tick
//!   runs it. The claim stays in the store after the run, so that a node whose clock is behind, or that
//!   started late, finds it. It is kept for as long as a tick may be attempted (a minute, or
//!   [`within`](Misfire::RunOnce), plus the [jitter](Job::jitter)), plus [`max_skew`](Scheduler::max_skew).
//! - **Two runs of a job do not overlap,** as far as a lock can guarantee that. A tick that is due while an
//!   earlier run is in progress is skipped on all nodes. A run is cancelled when its lock is lost. Where
//!   overlapping writes would still do harm, send [`Context::fence`] with them.
//! - A tick counts as taken only if another node has claimed it. If the store cannot decide (a quorum with a
//!   split vote), the node retries for up to a minute.
//! - A tick that this node does not run is skipped and logged with the reason. A job that panics
//!   stops neither the scheduler nor its next tick.
//! - A clock that is set back repeats no tick. Ticks missed because the clock was set forward, or the machine
//!   was suspended, are handled by the [misfire policy](Misfire).
//!
//! # What it does not guarantee
//!
//! - **At least one run.** If the node that claimed a tick dies, the tick is not run again, because no other
//!   node knows how far the run got. A tick is also lost if the store fails between its claim and its run.
//! - **At most one run if clocks differ by more** than `max_skew`, or if the store loses data. The store's
//!   page in `docs/backends` states what it keeps.
//! - **At most one run after a crash, on stores whose holds end with their process** (files, PostgreSQL). The
//!   node that made a claim keeps it. If that node ends too early, a node whose clock is behind may run the
//!   tick again, as long after the tick as its clock is behind. [`Misfire::RunOnce`] is refused there.
//!
//! # Locks in the store
//!
//! A run holds the lock `schedule/run/<job>`; a claim is the lock `schedule/tick/<time>/<job>`. `lockkeeper
//! ls schedule/` shows which node runs which job, and which ticks are claimed.

mod decided;
mod job;
mod outcome;
mod runner;
mod schedule;
mod scheduler;
#[cfg(feature = "metrics")]
mod tick_metrics;
#[cfg(not(feature = "metrics"))]
#[path = "no_tick_metrics.rs"]
mod tick_metrics;
mod ticks;
mod zoned_cron;

pub use job::{Context, Job, JobOutput, Misfire};
pub use schedule::Schedule;
pub use scheduler::{Running, Scheduler};

/// The guide's code, compiled and run as doctests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/scheduling.md")]
struct Guide;
