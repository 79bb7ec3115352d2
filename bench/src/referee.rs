//! Who is inside, and whether anybody may be who is not alone.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::make::Mode;

/// Sees one lock of one slice from the side of those who hold it.
#[derive(Debug)]
pub(crate) struct Referee {
    start: Instant,
    /// Readers inside, and writers times [`WRITER`].
    inside: AtomicU32,
    overlaps: AtomicU64,
    /// Who was the last to enter, plus one.
    last: AtomicU64,
    /// When the last one left, in ns since the start.
    left: AtomicU64,
    phase: AtomicU8,
}

/// A slice begins with a while in which everybody finds a place; only then it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Warm = 0,
    Counted = 1,
    Over = 2,
}

const WRITER: u32 = 1 << 16;

/// A task that has the lock. Dropped before it gives the lock back, also if the task is dropped as a whole.
#[derive(Debug)]
pub(crate) struct Inside<'a> {
    referee: &'a Referee,
    mode: Mode,
    /// Since the one before was about to give the lock back, if that was another.
    pub(crate) handed_over: Option<Duration>,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.referee.left.store(self.referee.now(), Ordering::SeqCst);
        self.referee.inside.fetch_sub(weight(self.mode), Ordering::SeqCst);
    }
}

impl Referee {
    pub(crate) fn new(start: Instant) -> Self {
        Self {
            start,
            inside: AtomicU32::new(0),
            overlaps: AtomicU64::new(0),
            last: AtomicU64::new(0),
            left: AtomicU64::new(0),
            phase: AtomicU8::new(0),
        }
    }

    /// Called by a task once it has the lock.
    pub(crate) fn enter(&self, task: usize, mode: Mode) -> Inside<'_> {
        let now = self.now();
        let others = self.inside.fetch_add(weight(mode), Ordering::SeqCst);
        if others >= WRITER || (others > 0 && mode == Mode::Exclusive) {
            self.overlaps.fetch_add(1, Ordering::Relaxed);
        }
        let before = self.last.swap(task as u64 + 1, Ordering::SeqCst);
        let another = before != 0 && before != task as u64 + 1;
        let left = self.left.load(Ordering::SeqCst);
        let handed_over = another.then(|| Duration::from_nanos(now.saturating_sub(left)));
        Inside { referee: self, mode, handed_over }
    }

    /// How often somebody entered beside another.
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
