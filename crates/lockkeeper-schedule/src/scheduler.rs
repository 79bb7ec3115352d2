//! The scheduler of one node.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use lockkeeper_core::blocking::block_on;
use lockkeeper_core::{Error, ErrorKind, Keeper, Result};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::job::Job;
use crate::runner::{Clock, Runner, now};
use crate::schedule::invalid;

/// The default of `max_skew`.
const DEFAULT_SKEW: Duration = Duration::from_secs(10 * 60);
/// The longest `max_skew` that is accepted.
const MAX_SKEW: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// The jobs of one node, and the keeper of the store that all nodes share.
///
/// Every node of the cluster starts the same jobs. See the [crate](crate) for what it guarantees.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use lockkeeper::{Keeper, Memory};
/// use lockkeeper_schedule::{Schedule, Scheduler};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// # let (done, mut ran) = tokio::sync::mpsc::channel(1);
/// let keeper = Keeper::new(Memory::new());
/// let nightly = Schedule::cron("0 3 * * *", "Europe/Berlin")
///     .job("nightly", |ctx| async move { println!("due at {:?}", ctx.scheduled_at()) })
///     .at_most_for(Duration::from_secs(3600));
/// let pulse = Schedule::every(Duration::from_secs(1)).job("pulse", move |ctx| {
/// #   let done = done.clone();
///     async move {
///         println!("fence {:?}", ctx.fence());
/// #       done.send(()).await.unwrap();
///     }
/// });
///
/// let running = Scheduler::new(keeper).job(nightly).job(pulse).start()?;
/// // … until the process receives a signal to stop
/// # ran.recv().await.unwrap();
/// running.shutdown().await; // waits for running jobs
/// # Ok(())
/// # }
/// ```
#[must_use = "a scheduler does nothing until it is started"]
pub struct Scheduler {
    keeper: Keeper,
    jobs: Vec<Job>,
    max_skew: Duration,
    clock: Clock,
}

impl Scheduler {
    /// Creates a scheduler without jobs.
    pub fn new(keeper: Keeper) -> Self {
        Self { keeper, jobs: Vec::new(), max_skew: DEFAULT_SKEW, clock: Arc::new(SystemTime::now) }
    }

    /// Adds a job.
    pub fn job(mut self, job: Job) -> Self {
        self.jobs.push(job);
        self
    }

    /// Sets by how much the clocks of two nodes may differ without a tick being run twice (10 minutes by
    /// default). It should be the same on all nodes.
    ///
    /// The claim on each tick stays in the store for that much longer. By default a job that is due every second
    /// keeps 660 claims there.
    pub fn max_skew(mut self, skew: Duration) -> Self {
        self.max_skew = skew;
        self
    }

    /// Sets the source of the wall-clock time (the system's clock by default), for tests.
    ///
    /// The scheduler waits with tokio's timers and reads this clock at least every ten seconds.
    pub fn clock(mut self, clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// Starts to follow the ticks of all jobs.
    ///
    /// # Errors
    ///
    /// - [`InvalidOption`](ErrorKind::InvalidOption) if a job or an option is invalid, or if two jobs have the same name.
    /// - [`Unsupported`](ErrorKind::Unsupported) for [`RunOnce`](crate::Misfire::RunOnce) on a store whose holds end with
    ///   their process.
    /// - [`Config`](ErrorKind::Config) outside a tokio runtime. Use [`blocking_start`](Self::blocking_start) there.
    pub fn start(self) -> Result<Running> {
        let Self { keeper, jobs, max_skew, clock } = self;
        if max_skew > MAX_SKEW {
            return Err(invalid(format!(
                "max_skew {max_skew:?} is too long: the maximum is 366 days"
            )));
        }
        let mut names = HashSet::new();
        for job in &jobs {
            job.check(now(&clock), keeper.capabilities())?;
            if !names.insert(&job.name) {
                return Err(invalid(format!("job {:?}: another job has the same name", job.name)));
            }
        }
        let handle = Handle::try_current().map_err(|_| {
            let message = "no tokio runtime: call start inside one, or use blocking_start";
            Error::new(ErrorKind::Config, message)
        })?;
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        for job in jobs {
            let (keeper, clock, tasks) = (keeper.clone(), clock.clone(), tasks.clone());
            let runner = Arc::new(Runner { keeper, job, clock, max_skew, tasks: tasks.clone() });
            tasks.spawn_on(runner.follow(stop.clone()), &handle);
        }
        Ok(Running { stop, tasks })
    }

    /// Starts to follow the ticks of all jobs, like [`start`](Self::start), from code that is not async.
    ///
    /// The scheduler and async jobs run on the thread that serves all [blocking](lockkeeper_core::blocking) locks. Async jobs
    /// must not block it. A [blocking job](crate::Schedule::blocking_job) runs on a separate thread.
    ///
    /// # Errors
    ///
    /// The same as [`start`](Self::start), except that it needs no runtime.
    pub fn blocking_start(mut self) -> Result<Running> {
        self.keeper = self.keeper.on_blocking_runtime();
        block_on(async { self.start() })
    }
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduler")
            .field("jobs", &self.jobs)
            .field("max_skew", &self.max_skew)
            .finish_non_exhaustive()
    }
}

/// A started scheduler.
///
/// Dropping it stops the scheduler without waiting for running jobs.
#[derive(Debug)]
#[must_use = "dropping it stops the scheduler"]
pub struct Running {
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Running {
    /// Starts no further run, and waits until running jobs have ended and released their locks.
    ///
    /// Wrap it in a timeout to bound the wait. If the store does not respond, pending attempts and releases have
    /// to time out first.
    ///
    /// # Cancel safety
    ///
    /// Dropping it stops the wait. Running jobs continue to their end.
    pub async fn shutdown(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Starts no further run, and blocks until running jobs have ended, like [`shutdown`](Self::shutdown).
    pub fn blocking_shutdown(self) {
        block_on(self.shutdown());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
