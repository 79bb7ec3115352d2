//! A checker for the history of a run: which owner held what, from when to when, with which fence.
//!
//! Workers record their holds in a [`History`], and [`History::check`] finds holds that violate mutual exclusion
//! or the order of fences. A hold starts when the acquire has returned, and ends when the release is called, the
//! loss is reported or the deadline passes, whichever is first. That interval is never longer than the grant of the
//! store, so two recorded holds that overlap are two concurrent holders, and not an artefact of clocks.
//!
//! Times are nanoseconds of the machine's monotonic clock, which all its processes share (on systems other than Unix, of
//! the wall clock). A worker process prints its [`Hold`]s as lines, and the test that started it parses them. Pausing
//! tokio's clock does not affect them.

use std::cmp::Reverse;
use std::collections::hash_map::{Entry, HashMap};
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use lockkeeper_core::{Fence, Kind, Mode};

mod line;

pub use line::ParseHoldError;

/// The recorded holds of a run. Clones are handles to the same history.
///
/// # Examples
///
/// ```
/// use lockkeeper_core::Mode;
/// use lockkeeper_testkit::history::History;
///
/// let history = History::new();
/// let first = history.begin("orders", 1, Mode::Exclusive, None);
/// let second = history.begin("orders", 2, Mode::Exclusive, None);
/// first.end();
/// second.end();
/// let violations = history.check().unwrap_err();
/// assert!(violations[0].to_string().starts_with("two holds overlap"));
/// ```
#[derive(Debug, Clone, Default)]
pub struct History(Arc<Mutex<Records>>);

#[derive(Debug, Default)]
struct Records {
    /// By number, so that discarding one keeps the numbers of the others.
    holds: BTreeMap<u64, Hold>,
    next: u64,
    /// The numbers of holds recorded by other processes, by name, owner and start.
    added: HashMap<(String, String, u64), u64>,
}

impl Records {
    fn push(&mut self, hold: Hold) -> u64 {
        let number = self.next;
        self.next += 1;
        self.holds.insert(number, hold);
        number
    }
}

impl History {
    /// Creates an empty history.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records a hold that starts now. Call it when the acquire has returned.
    pub fn begin(
        &self,
        name: &str,
        owner: impl fmt::Display,
        mode: Mode,
        fence: Option<Fence>,
    ) -> OpenHold {
        let (name, owner) = (name.to_owned(), owner.to_string());
        let mut records = self.records();
        // The time is read under the lock, so that records are in the order of their starts.
        let number = records.push(Hold { name, owner, mode, fence, start: now(), end: None });
        OpenHold { history: self.clone(), number, discarded: false }
    }

    /// Adds a hold that another process recorded. It replaces a hold with the same name, owner and start. So a worker can
    /// print a hold when it begins, and again with its end, if the worker survives until then.
    pub fn add(&self, hold: Hold) {
        let records = &mut *self.records();
        match records.added.entry((hold.name.clone(), hold.owner.clone(), hold.start)) {
            Entry::Occupied(known) => {
                records.holds.insert(*known.get(), hold);
            }
            Entry::Vacant(new) => {
                new.insert(records.next);
                records.push(hold);
            }
        }
    }

    /// Ends every hold by `end`, the time at which their process was killed. The history must contain the holds of that
    /// process only.
    pub fn end_all(&self, end: u64) {
        for hold in self.records().holds.values_mut() {
            hold.end = Some(hold.end.map_or(end, |known| known.min(end)));
        }
    }

    /// Returns all holds, in the order in which they were recorded.
    pub fn holds(&self) -> Vec<Hold> {
        self.records().holds.values().cloned().collect()
    }

    /// Checks the history for violations.
    ///
    /// Locks and semaphores of one name are checked separately, since they are independent. A hold without a
    /// fence is not checked for the order of fences. A hold without an end never ends.
    ///
    /// # Errors
    ///
    /// All violations found. Of a hold that overlaps several others, only one overlap is reported.
    pub fn check(&self) -> Result<Summary, Vec<Violation>> {
        let records = self.records();
        let (mut holds, reversed): (Vec<&Hold>, Vec<&Hold>) =
            records.holds.values().partition(|hold| hold.start <= hold.last());
        let mut violations: Vec<Violation> =
            reversed.into_iter().cloned().map(Violation::EndsBeforeStart).collect();

        // Of two holds that start in the same nanosecond, the one that also ends in it was first. The fence
        // decides between two that both end in it: their true order is unknown.
        holds.sort_by_key(|h| (&h.name, h.mode.kind(), h.start, h.last(), h.fence));
        let mut summary = Summary::default();
        for group in holds.chunk_by(|a, b| a.name == b.name && a.mode.kind() == b.mode.kind()) {
            match group[0].mode.kind() {
                Kind::Lock => {
                    find_overlaps(group, &mut violations);
                    find_low_fences(group, &mut violations);
                }
                Kind::Semaphore => find_excess_permits(group, &mut violations),
            }
            summary.add(group);
        }
        if violations.is_empty() { Ok(summary) } else { Err(violations) }
    }

    /// Checks the history, and fails the test with one line for each violation.
    ///
    /// # Panics
    ///
    /// If [`check`](Self::check) finds a violation.
    #[track_caller]
    pub fn assert_clean(&self) -> Summary {
        match self.check() {
            Ok(summary) => summary,
            Err(violations) => {
                let lines: Vec<String> = violations.iter().map(Violation::to_string).collect();
                panic!("the history has {} violations:\n{}", lines.len(), lines.join("\n"));
            }
        }
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        // A worker that panics leaves complete records: each is written in one step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Finds exclusive holds that start before all earlier holds have ended, and shared holds that start before all earlier
/// exclusive ones have.
fn find_overlaps(group: &[&Hold], violations: &mut Vec<Violation>) {
    // If the hold that ends last has ended, all have.
    let mut longest: Option<&Hold> = None;
    let mut longest_exclusive: Option<&Hold> = None;
    for &hold in group {
        let exclusive = hold.mode == Mode::Exclusive;
        let other = if exclusive { longest } else { longest_exclusive };
        if let Some(other) = other.filter(|other| other.last() > hold.start) {
            violations.push(Violation::Overlap { first: other.clone(), second: hold.clone() });
        }
        if longest.is_none_or(|other| hold.last() > other.last()) {
            longest = Some(hold);
        }
        if exclusive && longest_exclusive.is_none_or(|other| hold.last() > other.last()) {
            longest_exclusive = Some(hold);
        }
    }
}

/// Finds exclusive holds whose fence is not above those of all earlier exclusive holds, and shared holds whose fence is
/// below one of them.
fn find_low_fences(group: &[&Hold], violations: &mut Vec<Violation>) {
    let mut highest: Option<&Hold> = None;
    for &hold in group.iter().filter(|hold| hold.fence.is_some()) {
        let exclusive = hold.mode == Mode::Exclusive;
        let too_low = |other: &Hold| {
            if exclusive { hold.fence <= other.fence } else { hold.fence < other.fence }
        };
        match highest {
            Some(other) if too_low(other) => {
                violations.push(Violation::Fence { before: other.clone(), after: hold.clone() });
            }
            _ if exclusive => highest = Some(hold),
            _ => {}
        }
    }
}

/// Finds holds with which the permits in use exceed the smallest `of` of their holders.
fn find_excess_permits(group: &[&Hold], violations: &mut Vec<Violation>) {
    let mut ends = BinaryHeap::new();
    let mut in_use = 0;
    let mut limits: BTreeMap<u32, usize> = BTreeMap::new();
    for &hold in group {
        while let Some(&Reverse((end, take, of))) = ends.peek()
            && end <= hold.start
        {
            ends.pop();
            in_use -= u64::from(take);
            if let Some(count) = limits.get_mut(&of) {
                *count -= 1;
                if *count == 0 {
                    limits.remove(&of);
                }
            }
        }
        let Mode::Permits { take, of } = hold.mode else { continue };
        ends.push(Reverse((hold.last(), take, of)));
        in_use += u64::from(take);
        *limits.entry(of).or_default() += 1;
        let of = limits.keys().next().copied().unwrap_or(of);
        if in_use > u64::from(of) {
            violations.push(Violation::ExcessPermits { last: hold.clone(), in_use, of });
        }
    }
}

/// A recorded hold that has not ended. Dropping it ends it, as dropping a guard releases.
///
/// Declare it after its guard: then it is dropped, and the hold recorded as ended, before
/// the guard releases.
#[derive(Debug)]
#[must_use = "dropping it ends the hold"]
pub struct OpenHold {
    history: History,
    number: u64,
    discarded: bool,
}

impl OpenHold {
    /// Returns the hold as recorded so far.
    pub fn hold(&self) -> Hold {
        self.history.records().holds[&self.number].clone()
    }

    /// Records the deadline of the hold if it is not renewed: the guard's `expires_at`. A later call
    /// replaces the deadline.
    pub fn until(&self, deadline: Instant) {
        let (nanos, instant) = (now(), Instant::now());
        let end = match deadline.checked_duration_since(instant) {
            Some(left) => nanos.saturating_add(left.as_nanos().try_into().unwrap_or(u64::MAX)),
            None => nanos.saturating_sub(
                instant.duration_since(deadline).as_nanos().try_into().unwrap_or(u64::MAX),
            ),
        };
        self.change(|hold| hold.end = Some(end));
    }

    /// Ends the hold now, or at its deadline if that has passed. Call it before the release.
    pub fn end(self) -> Hold {
        self.finish();
        self.hold()
    }

    /// Removes the hold, as if it had not been recorded.
    ///
    /// For a worker that was paused between acquire and [`begin`](History::begin) for longer than
    /// the lease: if the guard is no longer held *after* `begin`, this hold never was one.
    pub fn discard(mut self) {
        self.discarded = true;
    }

    fn finish(&self) {
        self.change(|hold| {
            let now = now();
            hold.end = Some(hold.end.map_or(now, |deadline| deadline.min(now)));
        });
    }

    fn change(&self, change: impl FnOnce(&mut Hold)) {
        if let Some(hold) = self.history.records().holds.get_mut(&self.number) {
            change(hold);
        }
    }
}

impl Drop for OpenHold {
    fn drop(&mut self) {
        if self.discarded {
            self.history.records().holds.remove(&self.number);
        } else {
            self.finish();
        }
    }
}

/// One hold, from its acquire to its release, loss or expiry.
///
/// Its text form is one line of six fields without blanks: name, owner, mode, fence, start, end.
/// A missing value is `-`.
///
/// ```text
/// orders 4f1c exclusive 17 1000 2000
/// workers 90ab permits:2/5 - 1500 -
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    /// The name of the lock.
    pub name: String,
    /// The owner.
    pub owner: String,
    /// The mode.
    pub mode: Mode,
    /// The fencing token, if the store issued one.
    pub fence: Option<Fence>,
    /// When the acquire returned, on the clock of [`now`].
    pub start: u64,
    /// When it was released, lost or expired; `None` if it is still held.
    pub end: Option<u64>,
}

impl Hold {
    /// Returns the end; for a hold that has not ended, the maximum time.
    fn last(&self) -> u64 {
        self.end.unwrap_or(u64::MAX)
    }
}

/// The size of a clean history, so that a test can assert that it tested something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Summary {
    /// The number of holds.
    pub holds: usize,
    /// The number of locks and semaphores.
    pub names: usize,
    /// The number of holds that have not ended.
    pub open: usize,
    /// The maximum number of concurrent holds of one name.
    pub max_concurrent: usize,
}

impl Summary {
    /// Adds the holds of one name, sorted by their starts.
    fn add(&mut self, group: &[&Hold]) {
        self.holds += group.len();
        self.names += 1;
        self.open += group.iter().filter(|hold| hold.end.is_none()).count();
        let mut ends: Vec<u64> = group.iter().map(|hold| hold.last()).collect();
        ends.sort_unstable();
        let mut ended = 0;
        for (earlier, hold) in group.iter().enumerate() {
            // A hold that ends in its first nanosecond counts: it is not among the ended ones yet.
            while ended < earlier && ends[ended] <= hold.start {
                ended += 1;
            }
            self.max_concurrent = self.max_concurrent.max(earlier + 1 - ended);
        }
    }
}

/// A violation of mutual exclusion or of the order of fences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Violation {
    /// Two holds overlapped, of which one was exclusive.
    Overlap {
        /// The earlier hold.
        first: Hold,
        /// The hold that started while the earlier one was held.
        second: Hold,
    },
    /// More permits were in use than the smallest `of` of their holders.
    ExcessPermits {
        /// The hold that exceeded the limit.
        last: Hold,
        /// The number of permits in use with it.
        in_use: u64,
        /// The limit.
        of: u32,
    },
    /// A fence was not above that of an earlier exclusive hold; or, of a shared hold, below it.
    Fence {
        /// The earlier exclusive hold.
        before: Hold,
        /// The hold with the low fence.
        after: Hold,
    },
    /// A hold ended before it started: the recorder is wrong.
    EndsBeforeStart(Hold),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overlap { first, second } => {
                write!(f, "two holds overlap: [{first}] and [{second}]")
            }
            Self::ExcessPermits { last, in_use, of } => {
                write!(f, "{in_use} of {of} permits are in use, with [{last}]")
            }
            Self::Fence { before, after } => {
                write!(f, "a fence does not rise: [{before}], then [{after}]")
            }
            Self::EndsBeforeStart(hold) => write!(f, "a hold ends before it starts: [{hold}]"),
        }
    }
}

/// Returns the time on the clock of histories: nanoseconds that all processes of this machine share.
pub fn now() -> u64 {
    monotonic::nanos()
}

#[cfg(unix)]
mod monotonic {
    use rustix::time::{ClockId, clock_gettime};

    pub(super) fn nanos() -> u64 {
        let time = clock_gettime(ClockId::Monotonic);
        let nanos = i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec);
        u64::try_from(nanos).unwrap_or(0)
    }
}

/// On other systems std has no monotonic clock that processes share.
#[cfg(not(unix))]
mod monotonic {
    use std::time::{SystemTime, UNIX_EPOCH};

    pub(super) fn nanos() -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        since.as_nanos().try_into().unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests;
