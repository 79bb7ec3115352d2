//! A slice: one make, at one work, for a short time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::load::{self, Meter};
use crate::make::{Lock, Make, Mode, Outcome};
use crate::referee::{Phase, Referee};

/// The longest that the tasks of a slice may take to come to their end before they are dropped.
const GRACE: Duration = Duration::from_millis(200);

/// What came of a slice.
#[derive(Debug, Default, Clone)]
pub(crate) struct Slice {
    pub(crate) took: Duration,
    /// Confirmed releases, by task.
    pub(crate) turns: Vec<u64>,
    /// Those of readers among them.
    pub(crate) reads: u64,
    /// From one task to another, in µs: from before the release was called to when the other had its guard.
    pub(crate) hand_overs: Vec<f64>,
    /// The longest that a task waited, also in vain.
    pub(crate) longest: Duration,
    /// How often somebody entered beside another.
    pub(crate) overlaps: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
    /// What it cost the server: requests, and seconds of processor time.
    pub(crate) requests: Option<f64>,
    pub(crate) server: Option<f64>,
    /// Seconds of processor time of this process.
    pub(crate) client: f64,
}

impl Slice {
    pub(crate) fn all_turns(&self) -> u64 {
        self.turns.iter().sum()
    }

    #[expect(clippy::cast_precision_loss, reason = "counts of some thousands")]
    pub(crate) fn turns_per_second(&self) -> f64 {
        self.all_turns() as f64 / self.took.as_secs_f64()
    }

    #[expect(clippy::cast_precision_loss, reason = "counts of some thousands")]
    pub(crate) fn hand_overs_per_second(&self) -> f64 {
        self.hand_overs.len() as f64 / self.took.as_secs_f64()
    }
}

#[derive(Default)]
struct Shared {
    turns: Vec<AtomicU64>,
    /// Since when each task waits, in ns since the start, plus one; 0 while it does not.
    waiting: Vec<AtomicU64>,
    longest: AtomicU64,
    sums: Mutex<Sums>,
}

#[derive(Default)]
struct Sums {
    reads: u64,
    hand_overs: Vec<f64>,
    errors: u64,
    first_error: Option<String>,
}

impl Shared {
    fn add(&self, task: usize, mode: Mode, outcome: Outcome<Option<Duration>>, counts: bool) {
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Ok(handed_over) if counts => {
                self.turns[task].fetch_add(1, Ordering::Relaxed);
                sums.reads += u64::from(mode == Mode::Shared);
                sums.hand_overs.extend(handed_over.map(|time| time.as_secs_f64() * 1e6));
            }
            Ok(_) => {}
            Err(error) => {
                sums.errors += 1;
                sums.first_error.get_or_insert(error);
            }
        }
    }
}

/// What the tasks of a slice contend for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contend {
    /// All for one lock.
    One,
    /// Each has a lock of its own.
    Each,
}

/// How a slice is run.
#[derive(Clone, Copy)]
pub(crate) struct Plan<'a> {
    pub(crate) contend: Contend,
    /// How many of a hundred turns are readers'.
    pub(crate) readers: u8,
    /// How long it runs before it counts.
    pub(crate) warm: Duration,
    pub(crate) time: Duration,
    /// Whose load is read, and for whom.
    pub(crate) meter: Option<(Meter<'a>, &'a Make)>,
}

/// Runs a task for each lock: acquire, be inside for a moment, release, again.
pub(crate) async fn run(locks: Vec<Box<dyn Lock>>, plan: Plan<'_>) -> Slice {
    let count = locks.len();
    let start = Instant::now();
    let one = Arc::new(Referee::new(start));
    let shared = Arc::new(Shared {
        turns: (0..count).map(|_| AtomicU64::new(0)).collect(),
        waiting: (0..count).map(|_| AtomicU64::new(0)).collect(),
        ..Shared::default()
    });
    let mut referees = vec![one.clone()];
    let mut tasks = Vec::with_capacity(count);
    for (number, lock) in locks.into_iter().enumerate() {
        let referee = match plan.contend {
            Contend::One => one.clone(),
            Contend::Each => {
                referees.push(Arc::new(Referee::new(start)));
                referees[referees.len() - 1].clone()
            }
        };
        let task = take_turns(lock, number, plan.readers, start, referee, shared.clone());
        tasks.push(tokio::spawn(task));
    }
    tokio::time::sleep(plan.warm).await;
    let read = || plan.meter.map(|(meter, make)| meter.read(make));
    let before = read();
    let client = load::processor_time(std::process::id());
    let counted = Instant::now();
    begin(&referees, Phase::Counted);
    tokio::time::sleep(plan.time).await;
    begin(&referees, Phase::Over);
    let took = counted.elapsed();
    let client = load::processor_time(std::process::id()) - client;
    let now = nanos(start);
    let load = read().zip(before);
    let waiting = shared.waiting.iter().map(|since| since.load(Ordering::Relaxed));
    let in_vain = waiting.filter(|since| *since > 0).map(|since| now.saturating_sub(since));
    let longest = shared.longest.load(Ordering::Relaxed).max(in_vain.max().unwrap_or(0));
    // Many take longer, even if each is short.
    let grace = if count > 64 { plan.time * 2 } else { plan.time };
    end(tasks, grace.min(GRACE)).await;
    let sums = std::mem::take(&mut *shared.sums.lock().unwrap_or_else(PoisonError::into_inner));
    Slice {
        took,
        turns: shared.turns.iter().map(|turns| turns.load(Ordering::Relaxed)).collect(),
        reads: sums.reads,
        hand_overs: sums.hand_overs,
        longest: Duration::from_nanos(longest),
        overlaps: referees.iter().map(|referee| referee.overlaps()).sum(),
        errors: sums.errors,
        first_error: sums.first_error,
        requests: load.as_ref().map(|(now, before)| now.requests_since(before)),
        server: load.as_ref().map(|(now, before)| now.processor_since(before)),
        client,
    }
}

fn begin(referees: &[Arc<Referee>], phase: Phase) {
    for referee in referees {
        referee.begin(phase);
    }
}

/// Lets the tasks come to their end; drops those that do not in time.
async fn end(tasks: Vec<tokio::task::JoinHandle<()>>, grace: Duration) {
    let deadline = tokio::time::Instant::now() + grace;
    for mut task in tasks {
        if tokio::time::timeout_at(deadline, &mut task).await.is_err() {
            task.abort();
            let _ = task.await;
        }
    }
}

fn nanos(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

async fn take_turns(
    lock: Box<dyn Lock>,
    number: usize,
    readers: u8,
    start: Instant,
    referee: Arc<Referee>,
    shared: Arc<Shared>,
) {
    while referee.phase() != Phase::Over {
        let mode = if fastrand::u8(0..100) < readers { Mode::Shared } else { Mode::Exclusive };
        let asked = nanos(start);
        shared.waiting[number].store(asked + 1, Ordering::Relaxed);
        let turn = turn(&*lock, number, mode, &referee, || {
            shared.waiting[number].store(0, Ordering::Relaxed);
            if referee.phase() == Phase::Counted {
                shared.longest.fetch_max(nanos(start) - asked, Ordering::Relaxed);
            }
        });
        let outcome = turn.await;
        let counts = referee.phase() == Phase::Counted;
        let failed = outcome.is_err();
        shared.add(number, mode, outcome, counts);
        if failed {
            // One that fails at once must not keep the others from the processor.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

async fn turn(
    lock: &dyn Lock,
    number: usize,
    mode: Mode,
    referee: &Referee,
    granted: impl FnOnce(),
) -> Outcome<Option<Duration>> {
    let held = lock.acquire(mode).await?;
    let inside = referee.enter(number, mode);
    granted();
    // Long enough for another to be seen beside.
    tokio::task::yield_now().await;
    let handed_over = inside.handed_over;
    drop(inside);
    held.release().await?;
    Ok(handed_over)
}

/// What one after the other takes.
#[derive(Debug, Default, Clone)]
pub(crate) struct Alone {
    /// In µs each.
    pub(crate) times: Vec<f64>,
    pub(crate) first_error: Option<String>,
    pub(crate) errors: u64,
}

/// Locks and releases for so long, alone. At least once, if it takes longer.
pub(crate) async fn alone(lock: &dyn Lock, time: Duration, patience: Duration) -> Alone {
    let mut alone = Alone::default();
    let end = Instant::now() + time;
    loop {
        let start = Instant::now();
        let step = async { lock.acquire(Mode::Exclusive).await?.release().await };
        match tokio::time::timeout(patience, step).await {
            Ok(Ok(())) => alone.times.push(start.elapsed().as_secs_f64() * 1e6),
            Ok(Err(error)) => {
                alone.errors += 1;
                alone.first_error.get_or_insert(error);
                if alone.errors > 100 {
                    break;
                }
            }
            Err(_) => {
                alone.errors += 1;
                alone.first_error.get_or_insert(format!("no answer within {patience:?}"));
                break;
            }
        }
        if Instant::now() >= end {
            break;
        }
    }
    alone
}
