//! One job on one node: follows its ticks, claims them and runs the job.

use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use lockkeeper_core::{Error, ErrorKind, Guard, Keeper, Mutex};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::job::{Context, Job, ON_TIME, RunResult, Work};
use crate::outcome::{Outcome, report, report_start};
use crate::ticks::{NextTick, Ticks, since};

/// How long after `at_most_for` a run that cannot be cancelled keeps its lock.
const STUCK_GRACE: Duration = Duration::from_secs(10);
/// The shortest TTL that locks accept.
const MIN_LEASE: Duration = Duration::from_millis(10);

/// The source of the wall-clock time.
pub(crate) type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

pub(crate) struct Runner {
    pub(crate) keeper: Keeper,
    pub(crate) job: Job,
    pub(crate) clock: Clock,
    pub(crate) max_skew: Duration,
    pub(crate) tasks: TaskTracker,
}

/// Returns the time on a clock, or the start of 1970 if the time is outside the calendar's range.
pub(crate) fn now(clock: &Clock) -> Timestamp {
    Timestamp::try_from(clock()).unwrap_or(Timestamp::UNIX_EPOCH)
}

impl Runner {
    /// Follows the job's ticks until `stop` is cancelled.
    pub(crate) async fn follow(self: Arc<Self>, stop: CancellationToken) {
        if let Err(error) = self.follow_ticks(&stop).await {
            // `Job::check` has computed a tick, so only the calendar can fail here.
            tracing::error!(job = &*self.job.name, %error, "cannot compute the next tick: the job stops");
        }
    }

    async fn follow_ticks(self: &Arc<Self>, stop: &CancellationToken) -> Result<(), Error> {
        let mut ticks = Ticks::new(&self.job, now(&self.clock))?;
        while !stop.is_cancelled() {
            match ticks.poll(now(&self.clock))? {
                NextTick::Wait(pause) => tokio::select! {
                    () = stop.cancelled() => {}
                    () = sleep(pause) => {}
                },
                NextTick::Due { tick, in_time, overtook } => {
                    if let Some(first) = overtook {
                        self.report(first, &Outcome::Missed { until: tick });
                    }
                    if in_time {
                        self.attempt(tick, stop).await;
                    } else {
                        self.report(tick, &Outcome::Missed { until: tick });
                    }
                }
                NextTick::Over => {
                    tracing::info!(
                        job = &*self.job.name,
                        "the schedule has no further tick: the job stops"
                    );
                    break;
                }
            }
        }
        Ok(())
    }

    fn report(&self, tick: Timestamp, outcome: &Outcome) {
        report(&self.job.name, tick, outcome);
    }

    /// Tries to claim a tick, and starts a run on success.
    async fn attempt(self: &Arc<Self>, tick: Timestamp, stop: &CancellationToken) {
        match self.acquire(tick, stop).await {
            // A separate task, so that a tick that is due during the run is reported as `Overlaps`.
            Ok(guard) => drop(self.tasks.spawn(self.clone().run(tick, guard))),
            Err(outcome) => self.report(tick, &outcome),
        }
    }

    /// Claims the tick, then acquires the job's lock. In this order exactly one node decides a tick, and
    /// a node that is too late for it never holds the job's lock when the next tick is due.
    async fn acquire(&self, tick: Timestamp, stop: &CancellationToken) -> Result<Guard, Outcome> {
        let failed = |error| Outcome::Unavailable { error };
        let claim = self.claim_lock(tick);
        let claim = self.try_until_decided(&claim, tick, stop).await?.ok_or(Outcome::Taken)?;
        // Checked after the grant: this process may have been suspended during the attempt, for longer
        // than another node's claim was kept.
        self.check_in_time(tick)?;
        let kept = self.keep_claim(claim, tick).map_err(failed)?;
        let lock = self.keeper.mutex(self.job.run_lock());
        let lock = match self.job.at_most_for {
            Some(limit) => lock.max_hold(limit + STUCK_GRACE),
            None => lock,
        };
        let guard = self.try_until_decided(&lock, tick, stop).await?.ok_or(Outcome::Overlaps)?;
        // The process may also have been suspended since then, and the session that kept the claim may have
        // ended: another node may have run the tick in the meantime.
        self.check_in_time(tick)?;
        if kept.is_some_and(|claim| !claim.is_held()) {
            let message = "the claim on the tick was lost before its run";
            return Err(failed(Error::new(ErrorKind::Lost, message)));
        }
        Ok(guard)
    }

    /// Tries to acquire a lock until the store decides. Retries while the tick is in time, but for at most
    /// [`ON_TIME`], because the next tick waits for this one. Undecided does not mean that another node won.
    async fn try_until_decided(
        &self,
        lock: &Mutex,
        tick: Timestamp,
        stop: &CancellationToken,
    ) -> Result<Option<Guard>, Outcome> {
        let end = Instant::now() + ON_TIME;
        loop {
            match lock.try_lock().await {
                Err(error) if error.kind() == ErrorKind::Undecided => {
                    let in_time = self.check_in_time(tick).is_ok() && Instant::now() < end;
                    if !in_time || stop.is_cancelled() {
                        return Err(Outcome::Undecided { error });
                    }
                }
                answer => return answer.map_err(|error| Outcome::Unavailable { error }),
            }
        }
    }

    fn check_in_time(&self, tick: Timestamp) -> Result<(), Outcome> {
        let late = since(now(&self.clock), tick);
        if late > self.job.latest() { Err(Outcome::Missed { until: tick }) } else { Ok(()) }
    }

    /// Returns how long a claim is kept. Two nodes that claim the same tick both do so while their clocks are
    /// between the tick and the latest time for it. In real time the claims are at most that period plus the
    /// skew apart.
    fn claimed_for(&self) -> Duration {
        self.job.latest() + self.max_skew
    }

    /// Returns the lock that represents the claim on a tick.
    fn claim_lock(&self, tick: Timestamp) -> Mutex {
        let claimed_for = self.claimed_for();
        let lock = self.keeper.mutex(self.job.tick_lock(tick));
        if self.keeper.capabilities().leases {
            lock.ttl(claimed_for).max_hold(claimed_for)
        } else {
            lock.max_hold(claimed_for * 2)
        }
    }

    /// Keeps a claim in the store for `claimed_for`, regardless of the run's outcome. Returns the guard on
    /// stores where this process has to keep it.
    fn keep_claim(&self, claim: Guard, tick: Timestamp) -> Result<Option<Arc<Guard>>, Error> {
        if self.keeper.capabilities().leases {
            // The ticket is never adopted. The claim expires with its lease.
            let _ticket = claim.detach()?;
            return Ok(None);
        }
        // The claim ends with this process at the latest, because the store has no leases.
        let claim = Arc::new(claim);
        let kept = claim.clone();
        let (job, claimed_for) = (self.job.name.clone(), self.claimed_for());
        tokio::spawn(async move {
            tokio::select! {
                () = sleep(claimed_for) => {}
                () = claim.lost() => {
                    let scheduled_at = tick;
                    tracing::warn!(job = &*job, %scheduled_at, "the claim on a tick was lost: a node \
                        whose clock is behind may run it again");
                }
            }
        });
        Ok(Some(kept))
    }

    async fn run(self: Arc<Self>, tick: Timestamp, guard: Guard) {
        let started = Instant::now();
        report_start(&self.job.name, tick, guard.fence(), guard.label().as_str());
        let context = Context::new(self.job.name.clone(), tick, &guard);
        let mut task = self.spawn_work(context, &guard);
        let limit = async {
            match self.job.at_most_for {
                Some(limit) => sleep(limit).await,
                None => pending().await,
            }
        };
        let stopped: fn(Duration) -> Outcome = tokio::select! {
            biased;
            () = guard.lost() => |took| Outcome::Lost { took },
            () = limit => |took| Outcome::TimedOut { took },
            ended = &mut task => {
                let outcome = outcome_of(ended, started.elapsed());
                self.report(tick, &outcome);
                return self.finish(guard, started).await;
            }
        };
        task.abort();
        // The lock is released only after the work has stopped.
        let _ = task.await;
        self.report(tick, &stopped(started.elapsed()));
        self.finish(guard, started).await;
    }

    /// Starts the work of a run in a separate task or thread, which contains its panics. The work checks the deadline
    /// itself: after a stall it may be polled before the task of the run.
    fn spawn_work(&self, context: Context, guard: &Guard) -> JoinHandle<Result<RunResult, Error>> {
        match self.job.work.clone() {
            Work::Async(work) => {
                tokio::spawn(guard.while_held_owned(async move { work(context).await }))
            }
            Work::Blocking(work) => tokio::task::spawn_blocking(move || {
                if !context.is_held() {
                    return Err(Error::new(
                        ErrorKind::Lost,
                        "the job's lock was lost before the run",
                    ));
                }
                Ok(work(context))
            }),
        }
    }

    /// Releases the job's lock, or keeps it until `at_least_for` is over.
    async fn finish(&self, guard: Guard, started: Instant) {
        let left = self.job.at_least_for.saturating_sub(started.elapsed());
        if left.is_zero() || !guard.is_held() {
            if let Err(error) = guard.release().await {
                let job = &*self.job.name;
                tracing::warn!(job, %error, "cannot release the job's lock: it may stay until its lease expires");
            }
            return;
        }
        // With a lease the store keeps the lock, even if this process ends.
        let lease = left.max(MIN_LEASE);
        if self.keeper.capabilities().leases && guard.extend(lease).await.is_ok() {
            // `detach` fails only if the lock has just been lost.
            let _ticket = guard.detach();
        } else {
            tokio::spawn(async move {
                sleep(left).await;
                drop(guard);
            });
        }
    }
}

/// Returns the outcome of a run that ended on its own. The outer result is the task's; the next one reports a lost lock.
fn outcome_of(ended: Result<Result<RunResult, Error>, JoinError>, took: Duration) -> Outcome {
    match ended {
        Err(error) if error.is_panic() => Outcome::Panicked { took },
        // The runtime is shutting down, or the lock was lost.
        Err(_) | Ok(Err(_)) => Outcome::Lost { took },
        Ok(Ok(Err(error))) => Outcome::Failed { took, error },
        Ok(Ok(Ok(()))) => Outcome::Ran { took },
    }
}
