//! Schedules: cron patterns and intervals.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use lockkeeper_core::{Error, ErrorKind, Result};

use crate::job::{Context, Job, JobOutput};
use crate::zoned_cron::ZonedCron;

/// The shortest interval. Each tick leaves a claim in the store until it expires.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// The ticks at which a job is due. They are the same on every node, regardless of when it was started.
///
/// An invalid schedule is reported when the scheduler is [started](crate::Scheduler::start), or by
/// [`next_after`](Self::next_after).
///
/// # Daylight saving time
///
/// [`cron`](Self::cron) follows the local time of its time zone, as Vixie cron does:
///
/// | | fixed times (`30 2 * * *`) | with `*` or a step in minutes or hours (`30 * * * *`, `*/15 * * * *`) |
/// |---|---|---|
/// | a time that does not exist, because the clock is set forward | once, at the end of the gap | not for that hour |
/// | a time that exists twice, because the clock is set back | once, the first time | both times |
///
/// A job at 02:30 or at 03:00 is due once on each day of the year. [`every`](Self::every) counts seconds and
/// ignores time zones.
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
    Cron(Box<ZonedCron>),
    Every(Duration),
}

impl Schedule {
    /// Creates a schedule with a tick at every time that matches a cron pattern, in a time zone.
    ///
    /// The pattern has five fields: minute, hour, day of the month, month, day of the week (0 and 7 are
    /// Sunday), or six, with seconds first. It may contain lists, ranges, steps, names (`MON`, `JAN`), `L`, `W`
    /// and `#`, or be a nickname such as `@daily`. The zone is a name of the IANA database, such as `UTC` or
    /// `Europe/Berlin`. The system's zone database is used if there is one, otherwise the bundled one.
    #[must_use]
    pub fn cron(pattern: &str, zone: &str) -> Self {
        Self(ZonedCron::new(pattern, zone).map(|times| Pattern::Cron(Box::new(times))))
    }

    /// Creates a schedule with a tick at every multiple of `interval` since 1970 in UTC. Every hour is on the
    /// hour; every 24 hours is midnight in UTC. The interval must be at least one second.
    #[must_use]
    pub fn every(interval: Duration) -> Self {
        let every = if interval < MIN_INTERVAL {
            let minimum = format!("the minimum is {MIN_INTERVAL:?}");
            Err(invalid(format!("an interval of {interval:?} is too short: {minimum}")))
        } else {
            Ok(Pattern::Every(interval))
        };
        Self(every)
    }

    /// Creates a job that runs at these ticks. Its name must be the same on all nodes and unique among the jobs.
    ///
    /// The closure creates the future of one run. Its output is `()` or a `Result<(), E>` whose error is logged.
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

    /// Creates a job for code that is not async: each run has a separate thread, which `work` may block.
    ///
    /// The same as [`job`](Self::job), except that **a run cannot be cancelled**. If its lock is lost, or `at_most_for` is over, it
    /// continues until it returns, and may overlap with the next run on another node. It should check [`Context::is_held`] at each
    /// step, and send [`Context::fence`] where overlapping writes would do harm. A shutdown waits for it.
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
    ///             return; // another node may run the job by now
    ///         }
    ///         println!("part {part}, fence {:?}", ctx.fence());
    ///     }
    /// #   let _ = done.send(());
    /// });
    /// let running = Scheduler::new(Keeper::new(Memory::new())).job(pulse).blocking_start()?;
    /// // … until the process receives a signal to stop
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

    /// Returns the first tick after `time`, or `None` if there is none.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) if the pattern is invalid, the zone is unknown, the interval is too
    /// short or `time` is outside the years -9999 to 9999.
    pub fn next_after(&self, time: SystemTime) -> Result<Option<SystemTime>> {
        let after = Timestamp::try_from(time)
            .map_err(|_| invalid("time outside the years -9999 to 9999"))?;
        Ok(self.next(after)?.map(SystemTime::from))
    }

    pub(crate) fn next(&self, after: Timestamp) -> Result<Option<Timestamp>> {
        match self.0.as_ref().map_err(Error::clone)? {
            Pattern::Cron(times) => times.next(after),
            Pattern::Every(interval) => Ok(next_multiple(*interval, after)),
        }
    }

    /// Returns the interval of an [`every`](Self::every) schedule.
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
