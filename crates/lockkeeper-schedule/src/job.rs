//! Jobs, their options, and the context of a run.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use lockkeeper_core::{BoxFuture, Capabilities, Error, Fence, Guard, Name, Result};
use tokio_util::sync::CancellationToken;

use crate::schedule::{Schedule, invalid};

/// How late a tick may be attempted and still count as on time. Allows for late timers on a busy machine and
/// for a slow store.
pub(crate) const ON_TIME: Duration = Duration::from_secs(60);

/// The longest duration that an option accepts.
const MAX_DURATION: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// The policy for ticks that were missed because no node was running, or because this node's clock was wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Misfire {
    /// Skips missed ticks. A tick that is attempted within a minute of its time is not missed.
    #[default]
    Skip,
    /// Runs the last missed tick as soon as it is noticed, including at the start of the scheduler, if that is
    /// `within` this time of the tick. The others are skipped.
    ///
    /// The claim on a tick is kept in the store for at least this long, so that a node that starts late knows
    /// whether the tick was run. Stores whose holds end with their process cannot keep it; there, `start` returns
    /// [`Unsupported`](lockkeeper_core::ErrorKind::Unsupported).
    RunOnce {
        /// How late a tick may run.
        within: Duration,
    },
}

/// A named task with a schedule. Created by [`Schedule::job`] and [`Schedule::blocking_job`].
#[derive(Clone)]
#[must_use = "a job does nothing until it is added to a scheduler"]
pub struct Job {
    pub(crate) name: Arc<str>,
    pub(crate) schedule: Schedule,
    pub(crate) work: Work,
    pub(crate) at_most_for: Option<Duration>,
    pub(crate) at_least_for: Duration,
    pub(crate) misfire: Misfire,
    pub(crate) jitter: Duration,
}

/// Creates the work of one run.
#[derive(Clone)]
pub(crate) enum Work {
    Async(Arc<dyn Fn(Context) -> BoxFuture<'static, RunResult> + Send + Sync>),
    /// Runs on a thread that it may block.
    Blocking(Arc<dyn Fn(Context) -> RunResult + Send + Sync>),
}

/// The result of a run. The error is logged.
pub(crate) type RunResult = std::result::Result<(), String>;

impl Job {
    pub(crate) fn new<F, O>(
        schedule: Schedule,
        name: Arc<str>,
        work: impl Fn(Context) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = O> + Send + 'static,
        O: JobOutput,
    {
        let work = Work::Async(Arc::new(move |context| {
            let run = work(context);
            Box::pin(async move { run.await.into_result() })
        }));
        Self::with_work(schedule, name, work)
    }

    pub(crate) fn blocking<O: JobOutput>(
        schedule: Schedule,
        name: Arc<str>,
        work: impl Fn(Context) -> O + Send + Sync + 'static,
    ) -> Self {
        let work = Work::Blocking(Arc::new(move |context| work(context).into_result()));
        Self::with_work(schedule, name, work)
    }

    fn with_work(schedule: Schedule, name: Arc<str>, work: Work) -> Self {
        let (at_most_for, at_least_for, jitter) = (None, Duration::ZERO, Duration::ZERO);
        Self { name, schedule, work, at_most_for, at_least_for, misfire: Misfire::Skip, jitter }
    }

    /// Sets how long a run may take (no limit by default). After that its future is dropped.
    ///
    /// Only code that awaits can be cancelled. A run that does not await, like every [blocking](Schedule::blocking_job) run, loses
    /// its lock ten seconds after the limit, so that one stuck node does not stop the job on all nodes. Its writes
    /// carry a lower [fence](Context::fence) than those of the next run.
    pub fn at_most_for(mut self, limit: Duration) -> Self {
        self.at_most_for = Some(limit);
        self
    }

    /// Sets how long a run keeps the job's lock at least, from the start of the run (zero by default). A tick that is
    /// due during that time is skipped on every node.
    ///
    /// Nodes with skewed clocks do not run a tick twice even without this option. On stores whose holds end with
    /// their process, the lock ends with the process.
    pub fn at_least_for(mut self, time: Duration) -> Self {
        self.at_least_for = time;
        self
    }

    /// Sets the policy for missed ticks ([`Misfire::Skip`] by default).
    pub fn misfire(mut self, misfire: Misfire) -> Self {
        self.misfire = misfire;
        self
    }

    /// Delays each attempt on each node by a random time up to `max` (zero by default).
    ///
    /// This spreads the load on the store, and spreads the runs over the nodes: without jitter the node whose
    /// clock is furthest ahead runs every tick. The jitter should be shorter than the time between ticks, because a
    /// tick that is overtaken by the next one is missed.
    pub fn jitter(mut self, max: Duration) -> Self {
        self.jitter = max;
        self
    }

    /// Returns how late a tick may still be attempted.
    pub(crate) fn latest(&self) -> Duration {
        let late = match self.misfire {
            Misfire::Skip => ON_TIME,
            Misfire::RunOnce { within } => within.max(ON_TIME),
        };
        late + self.jitter
    }

    /// Returns the name of the lock that a run holds, so that runs do not overlap.
    pub(crate) fn run_lock(&self) -> String {
        format!("schedule/run/{}", self.name)
    }

    /// Returns the name of the lock that represents a tick. The time precedes the job's name, which may contain slashes.
    pub(crate) fn tick_lock(&self, tick: Timestamp) -> String {
        format!("schedule/tick/{tick}/{}", self.name)
    }

    /// Checks the options, and that the schedule has a tick after `now`.
    pub(crate) fn check(&self, now: Timestamp, store: Capabilities) -> Result<()> {
        let wrong = |what: String| Err(invalid(format!("job {:?}: {what}", self.name)));
        if self.name.is_empty() {
            return wrong("the name is empty".into());
        }
        if let Err(error) = Name::new(self.tick_lock(Timestamp::MAX)) {
            return wrong(error.to_string());
        }
        let within = match self.misfire {
            Misfire::Skip => Duration::ZERO,
            Misfire::RunOnce { within } => within,
        };
        let limit = self.at_most_for.unwrap_or(Duration::MAX);
        for time in [within, self.jitter, self.at_least_for, self.at_most_for.unwrap_or_default()] {
            if time > MAX_DURATION {
                return wrong(format!("{time:?} is too long: the maximum is 366 days"));
            }
        }
        if limit.is_zero() {
            return wrong("at_most_for is zero".into());
        }
        if self.at_least_for > limit {
            return wrong("at_least_for is longer than at_most_for".into());
        }
        if self.schedule.interval().is_some_and(|interval| self.jitter >= interval) {
            return wrong("the jitter must be shorter than the interval".into());
        }
        match self.schedule.next(now) {
            Ok(Some(_)) => {}
            Ok(None) => return wrong("its schedule has no tick in the future".into()),
            Err(error) => return wrong(error.to_string()),
        }
        if self.misfire != Misfire::Skip && !store.leases {
            let what = "this store cannot keep a claim after its process has ended, so a node cannot \
                        know whether a past tick was run: use Misfire::Skip";
            let kind = lockkeeper_core::ErrorKind::Unsupported;
            return Err(Error::new(kind, format!("job {:?}: {what}", self.name)));
        }
        Ok(())
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("name", &self.name)
            .field("at_most_for", &self.at_most_for)
            .field("at_least_for", &self.at_least_for)
            .field("misfire", &self.misfire)
            .field("jitter", &self.jitter)
            .finish_non_exhaustive()
    }
}

/// The tick, the fence and the lock state of a run.
#[derive(Clone)]
pub struct Context {
    job: Arc<str>,
    tick: Timestamp,
    fence: Option<Fence>,
    lost: CancellationToken,
    is_held: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl Context {
    pub(crate) fn new(job: Arc<str>, tick: Timestamp, guard: &Guard) -> Self {
        let (fence, lost) = (guard.fence(), guard.lost_token());
        Self { job, tick, fence, lost, is_held: Arc::new(guard.is_held_owned()) }
    }

    /// Returns the name of the job.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// Returns the time of the tick that this run is for.
    ///
    /// A run may start late. Use this time instead of the clock to compute periods such as "the last hour".
    pub fn scheduled_at(&self) -> SystemTime {
        self.tick.into()
    }

    /// Returns the fencing token of this run, which is higher than that of every earlier run of the job; `None` if the
    /// store has no fences.
    pub fn fence(&self) -> Option<Fence> {
        self.fence
    }

    /// Returns whether the job's lock is held, as far as this process knows. False after the lock is released.
    ///
    /// [Blocking jobs](crate::Schedule::blocking_job) cannot be cancelled and should check it at each step.
    pub fn is_held(&self) -> bool {
        (self.is_held)()
    }

    /// Completes when the job's lock is lost.
    ///
    /// The run's future is dropped at that time. Tasks that the run has spawned are not: they can await this.
    ///
    /// # Cancel safety
    ///
    /// Dropping it has no effect.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static + use<> {
        self.lost.clone().cancelled_owned()
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("job", &self.job)
            .field("tick", &self.tick)
            .field("fence", &self.fence)
            .field("is_held", &self.is_held())
            .finish_non_exhaustive()
    }
}

/// The output of a run: `()`, or a `Result<(), E>` whose error is logged.
pub trait JobOutput {
    /// Converts the output into a result.
    ///
    /// # Errors
    ///
    /// Returns the error as text if the run failed.
    fn into_result(self) -> std::result::Result<(), String>;
}

impl JobOutput for () {
    fn into_result(self) -> std::result::Result<(), String> {
        Ok(())
    }
}

impl<E: fmt::Display> JobOutput for std::result::Result<(), E> {
    fn into_result(self) -> std::result::Result<(), String> {
        self.map_err(|error| error.to_string())
    }
}
