//! When a job is due.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use lockkeeper_core::{Error, ErrorKind, Result};

use crate::job::{Context, Job, JobOutput};
use crate::wall::WallTimes;

/// The shortest interval: each tick leaves a claim in the store for a while.
const SHORTEST: Duration = Duration::from_secs(1);

/// The ticks at which a job is due: the same on every node, whenever it was started.
///
/// What is wrong with it is told when the scheduler is [started](crate::Scheduler::start), or by
/// [`next_after`](Self::next_after).
///
/// # Daylight saving time
///
/// [`cron`](Self::cron) follows the clock on the wall of its time zone, as Vixie's cron does:
///
/// | | fixed times (`30 2 * * *`) | with `*` or a step in minutes or hours (`30 * * * *`, `*/15 * * * *`) |
/// |---|---|---|
/// | a time that does not exist, because the clock is set forward | once, at the first moment after the gap | not for that hour |
/// | a time that exists twice, because the clock is set back | once, the first time | both times |
///
/// So a job at 02:30 or at 03:00 runs once on each day of the year. [`every`](Self::every) counts seconds, and
/// knows nothing of time zones.
///
/// # Examples
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use lockkeeper_schedule::Schedule;
///
/// # fn main() -> lockkeeper::Result<()> {
/// let nightly = Schedule::cron("0 3 * * *", "Europe/Berlin");
/// let next = nightly.next_after(SystemTime::UNIX_EPOCH)?.unwrap();
/// assert_eq!(next, SystemTime::UNIX_EPOCH + Duration::from_secs(2 * 3600)); // 03:00 there
///
/// assert!(Schedule::cron("0 25 * * *", "UTC").next_after(next).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Schedule(Result<Pattern>);

#[derive(Debug, Clone)]
enum Pattern {
    Cron(Box<WallTimes>),
    Every(Duration),
}

impl Schedule {
    /// At the times that a cron pattern matches, in a time zone.
    ///
    /// The pattern has five fields: minute, hour, day of the month, month, day of the week (0 and 7 are
    /// Sunday), or six, with seconds first. Lists, ranges, steps, names (`MON`, `JAN`), `L`, `W`, `#` and
    /// `@daily` and its like are understood. The zone is a name of the IANA database: `UTC`,
    /// `Europe/Berlin`. What the machine knows of zones is used if it knows any, else what was built in.
    #[must_use]
    pub fn cron(pattern: &str, zone: &str) -> Self {
        Self(WallTimes::new(pattern, zone).map(|times| Pattern::Cron(Box::new(times))))
    }

    /// Every so often, at the multiples of `interval` since 1970 in UTC, so that all nodes agree: every
    /// hour is on the hour, every 24 hours at midnight in UTC. At least a second.
    #[must_use]
    pub fn every(interval: Duration) -> Self {
        let every = if interval < SHORTEST {
            let least = format!("{SHORTEST:?} is the least");
            Err(invalid(format!("an interval of {interval:?} is too short: {least}")))
        } else {
            Ok(Pattern::Every(interval))
        };
        Self(every)
    }

    /// What is to be done at these times, under a name that is the same on all nodes and that no
    /// other job has.
    ///
    /// The closure makes the work of one run; what that returns is `()` or a `Result<(), E>`, whose error
    /// is logged.
    pub fn job<F, O>(
        self,
        name: impl Into<Arc<str>>,
        work: impl Fn(Context) -> F + Send + Sync + 'static,
    ) -> Job
    where
        F: Future<Output = O> + Send + 'static,
        O: JobOutput,
    {
        Job::new(self, name.into(), work)
    }

    /// Returns a job for code that is not async: `work` runs on a thread of its own at these times, and may block it.
    ///
    /// As [`job`](Self::job), except that **a run cannot be stopped**. If its lock is lost, or `at_most_for` is over, it runs on until it
    /// returns, and may meet the next run on another node. It asks [`Context::is_held`] at each step, and sends
    /// [`Context::fence`] along where two at a time would do harm. A shutdown waits for it.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockkeeper::{Keeper, Memory};
    /// use lockkeeper_schedule::{Schedule, Scheduler};
    ///
    /// # fn main() -> lockkeeper::Result<()> {
    /// # let (done, ran) = std::sync::mpsc::channel();
    /// let pulse = Schedule::every(Duration::from_secs(1)).blocking_job("pulse", move |ctx| {
    ///     for part in 0..3 {
    ///         if !ctx.is_held() {
    ///             return; // another node may run by now
    ///         }
    ///         println!("part {part}, fence {:?}", ctx.fence());
    ///     }
    /// #   let _ = done.send(());
    /// });
    /// let running = Scheduler::new(Keeper::new(Memory::new())).job(pulse).blocking_start()?;
    /// // … until the process is told to end
    /// # ran.recv().unwrap();
    /// running.blocking_shutdown();
    /// # Ok(())
    /// # }
    /// ```
    pub fn blocking_job<O: JobOutput>(
        self,
        name: impl Into<Arc<str>>,
        work: impl Fn(Context) -> O + Send + Sync + 'static,
    ) -> Job {
        Job::blocking(self, name.into(), work)
    }

    /// The first tick after a moment; `None` if there is none any more.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if the pattern cannot be understood, the zone is
    /// unknown or the interval too short.
    pub fn next_after(&self, time: SystemTime) -> Result<Option<SystemTime>> {
        let after = Timestamp::try_from(time).map_err(|_| invalid("a time before year -9999"))?;
        Ok(self.next(after)?.map(SystemTime::from))
    }

    pub(crate) fn next(&self, after: Timestamp) -> Result<Option<Timestamp>> {
        match self.0.as_ref().map_err(Error::clone)? {
            Pattern::Cron(times) => times.next(after),
            Pattern::Every(interval) => Ok(next_multiple(*interval, after)),
        }
    }

    /// The interval, where it is always the same.
    pub(crate) fn interval(&self) -> Option<Duration> {
        match self.0 {
            Ok(Pattern::Every(interval)) => Some(interval),
            _ => None,
        }
    }
}

fn next_multiple(interval: Duration, after: Timestamp) -> Option<Timestamp> {
    let interval = i128::try_from(interval.as_nanos()).ok()?;
    let next = after.as_nanosecond().div_euclid(interval).checked_add(1)?.checked_mul(interval)?;
    Timestamp::from_nanosecond(next).ok()
}

pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}
