//! One job on one node: follows its ticks, claims them, runs.

use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use lockkeeper_core::{Error, ErrorKind, Guard, Keeper, Mutex};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::job::{Context, Ended, Job, ON_TIME, Work};
use crate::outcome::{Outcome, tell, tell_start};
use crate::ticks::{Look, Ticks, since};

/// How long after `at_most_for` the lock of a run that cannot be stopped is given up.
const STUCK: Duration = Duration::from_secs(10);
/// No lease is shorter.
const SHORTEST_LEASE: Duration = Duration::from_millis(10);

/// Where the time of day comes from.
pub(crate) type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

pub(crate) struct Runner {
    pub(crate) keeper: Keeper,
    pub(crate) job: Job,
    pub(crate) clock: Clock,
    pub(crate) max_skew: Duration,
    pub(crate) tasks: TaskTracker,
}

/// The time on a clock. One that is off by thousands of years is taken for the start of 1970.
pub(crate) fn now(clock: &Clock) -> Timestamp {
    Timestamp::try_from(clock()).unwrap_or(Timestamp::UNIX_EPOCH)
}

impl Runner {
    /// Follows the job's ticks until told to stop.
    pub(crate) async fn follow(self: Arc<Self>, stop: CancellationToken) {
        if let Err(error) = self.follow_ticks(&stop).await {
            // It was checked at the start, so this is a fault of the calendar.
            tracing::error!(job = &*self.job.name, %error, "no next tick: the job ends");
        }
    }

    async fn follow_ticks(self: &Arc<Self>, stop: &CancellationToken) -> Result<(), Error> {
        let mut ticks = Ticks::new(&self.job, now(&self.clock))?;
        while !stop.is_cancelled() {
            match ticks.look(now(&self.clock))? {
                Look::Wait(pause) => tokio::select! {
                    () = stop.cancelled() => {}
                    () = sleep(pause) => {}
                },
                Look::Due { tick, in_time, overtook } => {
                    if let Some(first) = overtook {
                        self.tell(first, &Outcome::Missed { until: tick });
                    }
                    if in_time {
                        self.attempt(tick, stop).await;
                    } else {
                        self.tell(tick, &Outcome::Missed { until: tick });
                    }
                }
                Look::Over => {
                    tracing::info!(job = &*self.job.name, "no tick is left");
                    break;
                }
            }
        }
        Ok(())
    }

    fn tell(&self, tick: Timestamp, outcome: &Outcome) {
        tell(&self.job.name, tick, outcome);
    }

    /// Tries for a tick, and starts a run if it is ours.
    async fn attempt(self: &Arc<Self>, tick: Timestamp, stop: &CancellationToken) {
        match self.take(tick, stop).await {
            // A task of its own, so that the next tick finds out that this one is still at it.
            Ok(guard) => drop(self.tasks.spawn(self.clone().run(tick, guard))),
            Err(outcome) => self.tell(tick, &outcome),
        }
    }

    /// Claims the tick, then the right to run. In this order exactly one node decides on a tick, and
    /// those who come too late for it never stand in the way of the next one.
    async fn take(&self, tick: Timestamp, stop: &CancellationToken) -> Result<Guard, Outcome> {
        let failed = |error| Outcome::Unavailable { error };
        let claim = self.claim_lock(tick);
        let claim = self.decided(&claim, tick, stop).await?.ok_or(Outcome::Taken)?;
        // Looked at after the grant, not before: this process may have been stopped on the way, for longer
        // than another's claim was kept.
        self.check_in_time(tick)?;
        let kept = self.keep(claim, tick).map_err(failed)?;
        let lock = self.keeper.mutex(self.job.run_lock());
        let lock = match self.job.at_most_for {
            Some(limit) => lock.max_hold(limit + STUCK),
            None => lock,
        };
        let guard = self.decided(&lock, tick, stop).await?.ok_or(Outcome::Overlaps)?;
        // It may also have been stopped since, and with it a session that kept the claim: then another node
        // may have run the tick meanwhile.
        self.check_in_time(tick)?;
        if kept.is_some_and(|claim| !claim.is_held()) {
            let message = "the claim on the tick was lost before its run";
            return Err(failed(Error::new(ErrorKind::Lost, message)));
        }
        Ok(guard)
    }

    /// Tries for a lock until the store decides: for as long as the tick is in time, but not for more than
    /// [`ON_TIME`], because the next tick waits for it. An undecided try is not one that another node has won.
    async fn decided(
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

    /// How long a claim is kept. A claim and a second one would both have been made by nodes whose clocks
    /// were between the tick and the latest time for it, so in truth they are at most that and the
    /// skew apart.
    fn claimed_for(&self) -> Duration {
        self.job.latest() + self.max_skew
    }

    /// The lock that a claim on a tick is.
    fn claim_lock(&self, tick: Timestamp) -> Mutex {
        let claimed_for = self.claimed_for();
        let lock = self.keeper.mutex(self.job.tick_lock(tick));
        if self.keeper.capabilities().leases {
            lock.ttl(claimed_for).max_hold(claimed_for)
        } else {
            lock.max_hold(claimed_for * 2)
        }
    }

    /// Sees to it that a claim stays in the store for as long as it has to, whatever becomes of the run. Where
    /// it is this process that keeps it, it can be asked whether it still does.
    fn keep(&self, claim: Guard, tick: Timestamp) -> Result<Option<Arc<Guard>>, Error> {
        if self.keeper.capabilities().leases {
            // Nobody will adopt it: it ends with its lease, which is as long as needed.
            let _ticket = claim.detach()?;
            return Ok(None);
        }
        // It ends with this process at the latest: that is all that such a store can do.
        let claim = Arc::new(claim);
        let kept = claim.clone();
        let (job, claimed_for) = (self.job.name.clone(), self.claimed_for());
        tokio::spawn(async move {
            tokio::select! {
                () = sleep(claimed_for) => {}
                () = claim.lost() => {
                    let scheduled_at = tick;
                    tracing::warn!(job = &*job, %scheduled_at, "the claim on a tick is lost: a node \
                        whose clock is behind may run it again");
                }
            }
        });
        Ok(Some(kept))
    }

    async fn run(self: Arc<Self>, tick: Timestamp, guard: Guard) {
        let started = Instant::now();
        tell_start(&self.job.name, tick, guard.fence(), guard.label().as_str());
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
                let outcome = ended_as(ended, started.elapsed());
                self.tell(tick, &outcome);
                return self.leave(guard, started).await;
            }
        };
        task.abort();
        // The lock is not given back under work that still goes on.
        let _ = task.await;
        self.tell(tick, &stopped(started.elapsed()));
        self.leave(guard, started).await;
    }

    /// Starts the work of a run, in a task or on a thread of its own, so that its panic is its own. It checks the deadline
    /// itself: after a stall it may run before the task of the run does.
    fn spawn_work(&self, context: Context, guard: &Guard) -> JoinHandle<Result<Ended, Error>> {
        match self.job.work.clone() {
            Work::Async(work) => {
                tokio::spawn(guard.while_held_owned(async move { work(context).await }))
            }
            Work::Blocking(work) => tokio::task::spawn_blocking(move || {
                if !context.is_held() {
                    return Err(Error::new(ErrorKind::Lost, "the lock was lost before the run"));
                }
                Ok(work(context))
            }),
        }
    }

    /// Gives the lock of a run back: now, or when `at_least_for` is over.
    async fn leave(&self, guard: Guard, started: Instant) {
        let left = self.job.at_least_for.saturating_sub(started.elapsed());
        if left.is_zero() || !guard.is_held() {
            if let Err(error) = guard.release().await {
                let job = &*self.job.name;
                tracing::warn!(job, %error, "the job's lock may stay until its lease ends");
            }
            return;
        }
        // In the store, where it outlives this process.
        let lease = left.max(SHORTEST_LEASE);
        if self.keeper.capabilities().leases && guard.extend(lease).await.is_ok() {
            // If it is lost in this very moment, there is nothing to be kept.
            let _ticket = guard.detach();
        } else {
            tokio::spawn(keep_for(guard, left));
        }
    }
}

async fn keep_for(guard: Guard, time: Duration) {
    sleep(time).await;
    drop(guard);
}

/// What a run that ended by itself came to. The outer result is the task's, the next one tells of a lost lock.
fn ended_as(ended: Result<Result<Ended, Error>, JoinError>, took: Duration) -> Outcome {
    match ended {
        Err(error) if error.is_panic() => Outcome::Panicked { took },
        // The runtime is being shut down, or the lock is lost.
        Err(_) | Ok(Err(_)) => Outcome::Lost { took },
        Ok(Ok(Err(error))) => Outcome::Failed { took, error },
        Ok(Ok(Ok(()))) => Outcome::Ran { took },
    }
}
