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

/// How far clocks may be apart, if not said otherwise.
const DEFAULT_SKEW: Duration = Duration::from_secs(10 * 60);
/// Longer makes no sense, and would make claims stay for longer than stores can count.
const MAX_SKEW: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// The jobs of one node, and the keeper whose store they meet the other nodes on.
///
/// Every node of the cluster starts the same. See the [crate](crate) for what it guarantees.
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
/// // … until the process is told to end
/// # ran.recv().await.unwrap();
/// running.shutdown().await; // lets a job that runs end
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
    /// A scheduler without jobs.
    pub fn new(keeper: Keeper) -> Self {
        Self { keeper, jobs: Vec::new(), max_skew: DEFAULT_SKEW, clock: Arc::new(SystemTime::now) }
    }

    /// Adds a job.
    pub fn job(mut self, job: Job) -> Self {
        self.jobs.push(job);
        self
    }

    /// Sets how far the clocks of two nodes may be apart, at most, without a tick being run twice (10
    /// minutes if not set). It should be the same on all nodes.
    ///
    /// The claim on each tick stays in the store for that much longer. So a job that is due every second
    /// leaves 660 of them there, if nothing is set.
    pub fn max_skew(mut self, skew: Duration) -> Self {
        self.max_skew = skew;
        self
    }

    /// Sets where the time of day comes from (the system's clock if not set), for tests.
    ///
    /// Pauses are made with tokio's timers; this clock is looked at again every ten seconds.
    pub fn clock(mut self, clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// Starts to follow the ticks of all jobs, from now on.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if something is wrong with a job or with two of the same
    /// name; [`Unsupported`](ErrorKind::Unsupported) for [`RunOnce`](crate::Misfire::RunOnce) on a store whose
    /// holds end with their process; [`Config`](ErrorKind::Config) outside of a tokio runtime, where
    /// [`blocking_start`](Self::blocking_start) is for.
    pub fn start(self) -> Result<Running> {
        let Self { keeper, jobs, max_skew, clock } = self;
        if max_skew > MAX_SKEW {
            return Err(invalid("a max_skew of more than a year is too long"));
        }
        let mut names = HashSet::new();
        for job in &jobs {
            job.check(now(&clock), keeper.capabilities())?;
            if !names.insert(&job.name) {
                return Err(invalid(format!("job {:?}: there are two of that name", job.name)));
            }
        }
        let handle = Handle::try_current().map_err(|_| {
            Error::new(ErrorKind::Config, "no tokio runtime: start the scheduler inside of one")
        })?;
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        for job in jobs {
            let (keeper, clock, tasks) = (keeper.clone(), clock.clone(), tasks.clone());
            let runner = Arc::new(Runner { keeper, job, clock, max_skew, tasks: tasks.clone() });
            tasks.spawn_on(runner.follow(stop.clone()), &handle);
        }
        Ok(Running { stop, tasks })
    }
}

impl Scheduler {
    /// Starts to follow the ticks of all jobs, from now on. Does what [`start`](Self::start) does, for code that is not async.
    ///
    /// Ticks are followed by the thread that serves all [blocking](lockkeeper_core::blocking) locks, and async jobs run there:
    /// they must not block it. A [blocking job](crate::Schedule::blocking_job) has a thread of its own.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start). It needs no runtime.
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

/// A scheduler that runs.
///
/// Dropping it is as [`shutdown`](Self::shutdown), without waiting.
#[derive(Debug)]
#[must_use = "dropping it stops the scheduler"]
pub struct Running {
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Running {
    /// Tries no further tick, and waits until the jobs that run have ended and given back their locks.
    ///
    /// Put a timeout around it if you cannot wait for as long as they may take. A store that does not
    /// answer holds it up for a minute at most.
    ///
    /// # Cancel safety
    ///
    /// Dropping it stops the waiting. The jobs run on to their end.
    pub async fn shutdown(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Tries no further tick, and blocks until the jobs that run have ended. Does what [`shutdown`](Self::shutdown) does, in
    /// code that is not async.
    pub fn blocking_shutdown(self) {
        block_on(self.shutdown());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
