//! Detection of overlapping holders.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::implementation::Mode;

/// Counts violations of mutual exclusion of one lock during one slice, as seen by its holders.
#[derive(Debug)]
pub(crate) struct OverlapDetector {
    start: Instant,
    /// The number of readers that hold the lock, plus [`WRITER`] for each writer.
    inside: AtomicU32,
    overlaps: AtomicU64,
    /// The last task that entered, plus one.
    last_task: AtomicU64,
    /// When the last holder left, in ns since the start.
    released_at: AtomicU64,
    phase: AtomicU8,
}

/// The phases of a slice. Only acquisitions of the second are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Warm = 0,
    Counted = 1,
    Over = 2,
}

const WRITER: u32 = 1 << 16;

/// A task that holds the lock. It is dropped before the release, also when the task is cancelled.
#[derive(Debug)]
pub(crate) struct CriticalSection<'a> {
    detector: &'a OverlapDetector,
    mode: Mode,
    /// The time since the previous holder was about to release, if that was another task.
    pub(crate) since_release: Option<Duration>,
}

impl Drop for CriticalSection<'_> {
    fn drop(&mut self) {
        self.detector.released_at.store(self.detector.now(), Ordering::SeqCst);
        self.detector.inside.fetch_sub(weight(self.mode), Ordering::SeqCst);
    }
}

impl OverlapDetector {
    pub(crate) fn new(start: Instant) -> Self {
        Self {
            start,
            inside: AtomicU32::new(0),
            overlaps: AtomicU64::new(0),
            last_task: AtomicU64::new(0),
            released_at: AtomicU64::new(0),
            phase: AtomicU8::new(0),
        }
    }

    /// Marks a task as holder, after its acquire.
    pub(crate) fn enter(&self, task: usize, mode: Mode) -> CriticalSection<'_> {
        let now = self.now();
        let inside = self.inside.fetch_add(weight(mode), Ordering::SeqCst);
        if inside >= WRITER || (inside > 0 && mode == Mode::Exclusive) {
            self.overlaps.fetch_add(1, Ordering::Relaxed);
        }
        let before = self.last_task.swap(task as u64 + 1, Ordering::SeqCst);
        let another = before != 0 && before != task as u64 + 1;
        let released_at = self.released_at.load(Ordering::SeqCst);
        let since_release = another.then(|| Duration::from_nanos(now.saturating_sub(released_at)));
        CriticalSection { detector: self, mode, since_release }
    }

    /// Returns how many holders entered while another held the lock.
    pub(crate) fn overlaps(&self) -> u64 {
        self.overlaps.load(Ordering::Relaxed)
    }

    pub(crate) fn begin(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::SeqCst);
    }

    pub(crate) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Warm,
            1 => Phase::Counted,
            _ => Phase::Over,
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

fn weight(mode: Mode) -> u32 {
    if mode == Mode::Exclusive { WRITER } else { 1 }
}
