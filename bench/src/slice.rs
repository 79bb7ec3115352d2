//! A slice: one implementation in one scenario, for a short time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::implementation::{Implementation, Lock, Mode, Outcome};
use crate::load::{self, Meter};
use crate::overlap_detector::{OverlapDetector, Phase};

/// How long the tasks of a slice may take to finish before they are aborted.
const MAX_GRACE: Duration = Duration::from_millis(200);

/// The results of a slice.
#[derive(Debug, Default, Clone)]
pub(crate) struct Slice {
    pub(crate) took: Duration,
    /// Confirmed releases, by task.
    pub(crate) acquisitions: Vec<u64>,
    /// How many of them were readers.
    pub(crate) reads: u64,
    /// Times of hand-offs between tasks in µs, from before the call of release to the guard of the next task.
    pub(crate) hand_offs: Vec<f64>,
    /// The longest wait of a task, also if it was not served.
    pub(crate) longest: Duration,
    /// How many holders entered while another held the lock.
    pub(crate) overlaps: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
    /// The cost for the server: requests, and CPU seconds.
    pub(crate) requests: Option<f64>,
    pub(crate) server: Option<f64>,
    /// CPU seconds of this process.
    pub(crate) client: f64,
}

impl Slice {
    pub(crate) fn total_acquisitions(&self) -> u64 {
        self.acquisitions.iter().sum()
    }

    #[expect(clippy::cast_precision_loss, reason = "counts of some thousands")]
    pub(crate) fn acquisitions_per_second(&self) -> f64 {
        self.total_acquisitions() as f64 / self.took.as_secs_f64()
    }

    #[expect(clippy::cast_precision_loss, reason = "counts of some thousands")]
    pub(crate) fn hand_offs_per_second(&self) -> f64 {
        self.hand_offs.len() as f64 / self.took.as_secs_f64()
    }
}

#[derive(Default)]
struct Shared {
    acquisitions: Vec<AtomicU64>,
    /// Since when each task waits, in ns since the start, plus one; 0 while it does not wait.
    waiting: Vec<AtomicU64>,
    longest: AtomicU64,
    sums: Mutex<Sums>,
}

#[derive(Default)]
struct Sums {
    reads: u64,
    hand_offs: Vec<f64>,
    errors: u64,
    first_error: Option<String>,
}

impl Shared {
    fn add(&self, task: usize, mode: Mode, outcome: Outcome<Option<Duration>>, is_counted: bool) {
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Ok(since_release) if is_counted => {
                self.acquisitions[task].fetch_add(1, Ordering::Relaxed);
                sums.reads += u64::from(mode == Mode::Shared);
                sums.hand_offs.extend(since_release.map(|time| time.as_secs_f64() * 1e6));
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
pub(crate) enum Contention {
    /// All tasks contend for one lock.
    SharedLock,
    /// Each task has its own lock.
    OwnLock,
}

/// The options of a slice.
#[derive(Clone, Copy)]
pub(crate) struct SliceOptions<'a> {
    pub(crate) contention: Contention,
    /// The percentage of acquisitions that are readers'.
    pub(crate) readers: u8,
    /// The warm-up before acquisitions are counted.
    pub(crate) warm: Duration,
    pub(crate) time: Duration,
    /// The server whose load is sampled, and the implementation that causes it.
    pub(crate) meter: Option<(Meter<'a>, &'a Implementation)>,
}

/// Runs a task per lock that acquires, yields and releases in a loop.
pub(crate) async fn run(locks: Vec<Box<dyn Lock>>, options: SliceOptions<'_>) -> Slice {
    let count = locks.len();
    let start = Instant::now();
    let one = Arc::new(OverlapDetector::new(start));
    let shared = Arc::new(Shared {
        acquisitions: (0..count).map(|_| AtomicU64::new(0)).collect(),
        waiting: (0..count).map(|_| AtomicU64::new(0)).collect(),
        ..Shared::default()
    });
    let mut detectors = vec![one.clone()];
    let mut tasks = Vec::with_capacity(count);
    for (number, lock) in locks.into_iter().enumerate() {
        let detector = match options.contention {
            Contention::SharedLock => one.clone(),
            Contention::OwnLock => {
                detectors.push(Arc::new(OverlapDetector::new(start)));
                detectors[detectors.len() - 1].clone()
            }
        };
        let task = run_task(lock, number, options.readers, start, detector, shared.clone());
        tasks.push(tokio::spawn(task));
    }
    tokio::time::sleep(options.warm).await;
    let read = || options.meter.map(|(meter, implementation)| meter.read(implementation));
    let before = read();
    let client = load::processor_time(std::process::id());
    let counted = Instant::now();
    begin(&detectors, Phase::Counted);
    tokio::time::sleep(options.time).await;
    begin(&detectors, Phase::Over);
    let took = counted.elapsed();
    let client = load::processor_time(std::process::id()) - client;
    let now = nanos(start);
    let load = read().zip(before);
    let waiting = shared.waiting.iter().map(|since| since.load(Ordering::Relaxed));
    let unserved = waiting.filter(|since| *since > 0).map(|since| now.saturating_sub(since));
    let longest = shared.longest.load(Ordering::Relaxed).max(unserved.max().unwrap_or(0));
    // Many tasks take longer to finish.
    let grace = if count > 64 { options.time * 2 } else { options.time };
    end(tasks, grace.min(MAX_GRACE)).await;
    let sums = std::mem::take(&mut *shared.sums.lock().unwrap_or_else(PoisonError::into_inner));
    Slice {
        took,
        acquisitions: shared
            .acquisitions
            .iter()
            .map(|acquisitions| acquisitions.load(Ordering::Relaxed))
            .collect(),
        reads: sums.reads,
        hand_offs: sums.hand_offs,
        longest: Duration::from_nanos(longest),
        overlaps: detectors.iter().map(|detector| detector.overlaps()).sum(),
        errors: sums.errors,
        first_error: sums.first_error,
        requests: load.as_ref().map(|(now, before)| now.requests_since(before)),
        server: load.as_ref().map(|(now, before)| now.processor_since(before)),
        client,
    }
}

fn begin(detectors: &[Arc<OverlapDetector>], phase: Phase) {
    for detector in detectors {
        detector.begin(phase);
    }
}

/// Waits for the tasks to finish, and aborts those that do not finish in time.
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

async fn run_task(
    lock: Box<dyn Lock>,
    number: usize,
    readers: u8,
    start: Instant,
    detector: Arc<OverlapDetector>,
    shared: Arc<Shared>,
) {
    while detector.phase() != Phase::Over {
        let mode = if fastrand::u8(0..100) < readers { Mode::Shared } else { Mode::Exclusive };
        let waits_since = nanos(start);
        shared.waiting[number].store(waits_since + 1, Ordering::Relaxed);
        let cycle = acquire_and_release(&*lock, number, mode, &detector, || {
            shared.waiting[number].store(0, Ordering::Relaxed);
            if detector.phase() == Phase::Counted {
                shared.longest.fetch_max(nanos(start) - waits_since, Ordering::Relaxed);
            }
        });
        let outcome = cycle.await;
        let is_counted = detector.phase() == Phase::Counted;
        let failed = outcome.is_err();
        shared.add(number, mode, outcome, is_counted);
        if failed {
            // Keeps an implementation that fails immediately from occupying the CPU.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

async fn acquire_and_release(
    lock: &dyn Lock,
    number: usize,
    mode: Mode,
    detector: &OverlapDetector,
    granted: impl FnOnce(),
) -> Outcome<Option<Duration>> {
    let held = lock.acquire(mode).await?;
    let inside = detector.enter(number, mode);
    granted();
    // Gives another task the chance to overlap.
    tokio::task::yield_now().await;
    let since_release = inside.since_release;
    drop(inside);
    held.release().await?;
    Ok(since_release)
}

/// The results of an uncontended slice.
#[derive(Debug, Default, Clone)]
pub(crate) struct UncontendedSlice {
    /// Each lock and release, in µs.
    pub(crate) times: Vec<f64>,
    pub(crate) first_error: Option<String>,
    pub(crate) errors: u64,
}

/// Locks and releases for the given time, at least once.
pub(crate) async fn run_uncontended(
    lock: &dyn Lock,
    time: Duration,
    timeout: Duration,
) -> UncontendedSlice {
    let mut slice = UncontendedSlice::default();
    let end = Instant::now() + time;
    loop {
        let start = Instant::now();
        let step = async { lock.acquire(Mode::Exclusive).await?.release().await };
        match tokio::time::timeout(timeout, step).await {
            Ok(Ok(())) => slice.times.push(start.elapsed().as_secs_f64() * 1e6),
            Ok(Err(error)) => {
                slice.errors += 1;
                slice.first_error.get_or_insert(error);
                if slice.errors > 100 {
                    break;
                }
            }
            Err(_) => {
                slice.errors += 1;
                slice.first_error.get_or_insert(format!("no answer within {timeout:?}"));
                break;
            }
        }
        if Instant::now() >= end {
            break;
        }
    }
    slice
}
