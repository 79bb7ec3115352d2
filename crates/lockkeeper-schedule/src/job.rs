//! What is done at a tick, and what it is told.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use lockkeeper_core::{BoxFuture, Capabilities, Error, Fence, Guard, Name, Result};
use tokio_util::sync::CancellationToken;

use crate::schedule::{Schedule, invalid};

/// How late a tick may be tried and still be on time. Timers are late on a busy machine, and so is a
/// store that is slow to answer.
pub(crate) const ON_TIME: Duration = Duration::from_secs(60);

/// The longest time that any option may be.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// What becomes of ticks that came while no node was there to see them, or while this node's clock was
/// wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Misfire {
    /// They are skipped. A tick that is tried within a minute of its time is on time.
    #[default]
    Skip,
    /// The last of them is run as soon as it is noticed, also when the scheduler starts, if that is
    /// `within` so long of its time. The others are skipped.
    ///
    /// The claim on a tick is kept in the store for as long, so that a node which comes late knows whether
    /// it has been run. On stores whose holds end with their process that cannot be known, and so it is
    /// [`Unsupported`](lockkeeper_core::ErrorKind::Unsupported).
    RunOnce {
        /// How late a tick may be run.
        within: Duration,
    },
}

/// A name, a schedule, and what to do. From [`Schedule::job`].
#[derive(Clone)]
#[must_use = "a job does nothing until it is given to a scheduler"]
pub struct Job {
    pub(crate) name: Arc<str>,
    pub(crate) schedule: Schedule,
    pub(crate) work: Work,
    pub(crate) at_most_for: Option<Duration>,
    pub(crate) at_least_for: Duration,
    pub(crate) misfire: Misfire,
    pub(crate) jitter: Duration,
}

/// Makes the work of one run. An error is for the log.
#[derive(Clone)]
pub(crate) enum Work {
    Async(Arc<dyn Fn(Context) -> BoxFuture<'static, Ended> + Send + Sync>),
    /// On a thread that it may block.
    Blocking(Arc<dyn Fn(Context) -> Ended + Send + Sync>),
}

/// How the work of a run ended.
pub(crate) type Ended = std::result::Result<(), String>;

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

    /// Sets how long a run may take (without limit if not set). Then its future is dropped.
    ///
    /// Only code that awaits can be stopped. A run that does not, like every [blocking](Schedule::blocking_job) one, loses its lock ten seconds later all
    /// the same, so that one stuck node does not stop the job everywhere: what it still does has a
    /// lower [fence](Context::fence) than what the next run does.
    pub fn at_most_for(mut self, limit: Duration) -> Self {
        self.at_most_for = Some(limit);
        self
    }

    /// Sets how long the job counts as busy at least, from the start of a run, however short the run is
    /// (not at all if not set). A tick that comes meanwhile is skipped, on every node.
    ///
    /// It is not needed to keep nodes with skewed clocks from running a tick twice: they do not. On stores
    /// whose holds end with their process, this time does, too.
    pub fn at_least_for(mut self, time: Duration) -> Self {
        self.at_least_for = time;
        self
    }

    /// Sets what becomes of missed ticks ([`Misfire::Skip`] if not set).
    pub fn misfire(mut self, misfire: Misfire) -> Self {
        self.misfire = misfire;
        self
    }

    /// Lets each node try each tick a random time later, up to this long (at once if not set).
    ///
    /// So they do not all ask the store in the same moment, and it is not always the node whose clock is
    /// the fastest that runs the job. It should be shorter than the time between ticks: a tick that is
    /// overtaken by the next is missed.
    pub fn jitter(mut self, most: Duration) -> Self {
        self.jitter = most;
        self
    }

    /// How late a tick may still be tried.
    pub(crate) fn latest(&self) -> Duration {
        let late = match self.misfire {
            Misfire::Skip => ON_TIME,
            Misfire::RunOnce { within } => within.max(ON_TIME),
        };
        late + self.jitter
    }

    /// The lock that a run has, so that no two overlap.
    pub(crate) fn run_lock(&self) -> String {
        format!("schedule/run/{}", self.name)
    }

    /// The lock that stands for a tick. The time is before the name, which may contain anything.
    pub(crate) fn tick_lock(&self, tick: Timestamp) -> String {
        format!("schedule/tick/{tick}/{}", self.name)
    }

    /// Whether this can work, on such a store, from now on.
    pub(crate) fn check(&self, now: Timestamp, store: Capabilities) -> Result<()> {
        let wrong = |what: String| Err(invalid(format!("job {:?}: {what}", self.name)));
        if self.name.is_empty() {
            return wrong("a job needs a name".into());
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
            if time > LONGEST {
                return wrong(format!("{time:?} is too long: a year is the most"));
            }
        }
        if limit.is_zero() {
            return wrong("at_most_for leaves it no time".into());
        }
        if self.at_least_for > limit {
            return wrong("at_least_for is longer than at_most_for".into());
        }
        if self.schedule.interval().is_some_and(|interval| self.jitter >= interval) {
            return wrong("the jitter is not shorter than the interval".into());
        }
        match self.schedule.next(now) {
            Ok(Some(_)) => {}
            Ok(None) => return wrong("its schedule has no tick from now on".into()),
            Err(error) => return wrong(error.to_string()),
        }
        if self.misfire != Misfire::Skip && !store.leases {
            let what = "this store cannot keep a claim when its process has ended, and so a missed \
                        tick cannot be told from one that was run: take Misfire::Skip";
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

/// What a run is told.
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

    /// The name of the job.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// The tick that this run is for. Take this and not the clock, where the run works on "the last
    /// hour": it may have started late.
    pub fn scheduled_at(&self) -> SystemTime {
        self.tick.into()
    }

    /// The fencing token of this run, higher than that of any run of the job before; `None` where the store
    /// has none.
    pub fn fence(&self) -> Option<Fence> {
        self.fence
    }

    /// Whether the job's lock is held, as far as this process knows; false when the run is over.
    ///
    /// For [blocking jobs](crate::Schedule::blocking_job), which cannot be stopped: ask it at each step.
    pub fn is_held(&self) -> bool {
        (self.is_held)()
    }

    /// Ready when the job's lock is lost, and with it the right to go on.
    ///
    /// The run's future is dropped at that moment anyway. This is for what it has spawned elsewhere.
    ///
    /// # Cancel safety
    ///
    /// Dropping it changes nothing.
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

/// What a run may return: nothing, or a result whose error is logged.
pub trait JobOutput {
    /// The error as text, if there is one.
    ///
    /// # Errors
    ///
    /// If the run failed.
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
