//! The queue of one name within a process: which waiter may talk to the store, and which one is to be woken.
//!
//! Everything happens under the lock of the table of queues and without I/O. Wakers are called after the lock is released.
//!
//! # Invariants
//!
//! 1. A waiter is *active* (its [`Stage`] is not `Resting`) if it is at the front or next to it. It stays active until it
//!    leaves: others join only behind it.
//! 2. The *front* is the first waiter or, if that is a reader, all readers before the first writer. The *look-ahead* is
//!    the waiter behind the front. Waiters that were passed over count for neither. With [`Active::First`], the front is the
//!    first waiter alone, and there is no look-ahead.
//! 3. Whenever the front or the look-ahead may have something new to do, its waker is called. A waiter registers its
//!    waker under the lock under which it finds that it has nothing to do, so no wake-up is lost.
//! 4. A queue without waiters is not in the table.

use std::collections::BTreeMap;
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::time::Instant;

use crate::contract::{ClaimSpec, Mode, Participant, Retry};
use crate::error::Error;
use crate::name::Label;
use crate::owner::Owner;

/// A waiter that was woken and has not been polled for this long does not hold up others: they pass it over. It is
/// looked at only when another waiter refreshes its place, so it costs no timer.
const ABSENT_AFTER: Duration = Duration::from_millis(100);

/// How long the look-ahead leaves the lock to a waiter in front of it that was woken to ask the store and has not come: a
/// task that is ready is polled within that time. The engine measures it: it is told to ask again after it.
const TURN: Duration = Duration::from_millis(1);

/// Which side hands a released lock to the next waiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Handoff {
    /// The store, in the order in which claims asked it. A release sends no local notice.
    Store,
    /// The local queue: the store has no order of its own. A release in this process wakes the front.
    Local,
}

/// Which waiters of a queue talk to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Active {
    /// The front and the look-ahead.
    FrontAndNext,
    /// The first one, which is the front alone.
    First,
}

#[derive(Debug)]
pub(super) struct Queue {
    active: Active,
    pub(super) waiters: BTreeMap<u64, Waiter>,
    pub(super) next: u64,
    /// How often the front was told that the lock may be free.
    calls: u64,
    /// A claim that left this queue holds the lock exclusively. Notices of the store are about other things then, and the
    /// front is told when that claim releases.
    pub(super) is_held: bool,
    /// The error with which the store last answered a waiter, and when that was; `None` if it has given another answer since.
    pub(super) failed: Option<(Instant, Error)>,
}

#[derive(Debug)]
pub(super) struct Waiter {
    owner: Owner,
    label: Label,
    pub(super) mode: Mode,
    since: Instant,
    pub(super) stage: Stage,
    /// The number of calls when it last asked the store.
    answered: u64,
    /// When it was woken, if it has not been polled since.
    woken: Option<Instant>,
    /// It was woken and did not come: others no longer wait for it. Its place is kept.
    passed: bool,
    /// It was told that the lock is contended. Before that it is on its first attempt, and does not wait.
    pub(super) refused: bool,
    /// When it last made an attempt, for the store or not.
    attempted: Instant,
    ttl: Duration,
    waker: Option<Waker>,
}

/// How far a waiter has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Behind the look-ahead: it does not talk to the store.
    Resting,
    /// Active, and it has not asked the store yet.
    Called,
    /// Its attempt is in flight.
    Asking,
    /// The store has answered it.
    Asked,
}

/// What a waiter is to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Ask the store.
    Ask,
    /// Report to the engine that something may have changed: a waiter in front of it was woken, and may not come.
    Report,
    /// Wait for the store and for a wake-up.
    Listen,
    /// Wait for a wake-up.
    Rest,
}

/// What becomes of an attempt.
#[derive(Debug)]
pub(super) enum Entry {
    /// It goes to the store.
    Ask,
    /// The claim waits behind others of this process. When the engine is to ask again.
    Wait(Retry),
    /// The same, and the store has failed them. The engine decides for how long a waiter tolerates that.
    Fail(Error),
}

/// Why a waiter leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leave {
    Granted(Mode),
    GaveUp,
}

/// What to do with wakers once the table is unlocked. They run foreign code, also when they are dropped: the last waker
/// of a task may drop the task, and claims with it.
#[derive(Default)]
pub(super) struct Wakes {
    /// To be called.
    pub(super) called: Vec<Waker>,
    /// To be dropped. One change of a queue retires one waker at most.
    retired: Option<Waker>,
}

impl Wakes {
    fn add(&mut self, waiter: &mut Waiter, now: &mut Option<Instant>) {
        if waiter.woken.is_none() {
            waiter.woken = Some(*now.get_or_insert_with(Instant::now));
        }
        self.called.extend(waiter.waker.take());
    }
}

impl Waiter {
    pub(super) fn new(spec: &ClaimSpec) -> Self {
        let now = Instant::now();
        Self {
            owner: spec.owner,
            label: spec.label.clone(),
            mode: spec.mode,
            since: now,
            stage: Stage::Resting,
            answered: 0,
            woken: None,
            passed: false,
            refused: false,
            attempted: now,
            ttl: spec.ttl,
            waker: None,
        }
    }

    /// Whether it should ask the store and has not begun to.
    fn is_due(&self, calls: u64) -> bool {
        match self.stage {
            Stage::Called => true,
            Stage::Asked => calls > self.answered,
            Stage::Resting | Stage::Asking => false,
        }
    }

    fn is_absent(&self, now: Instant) -> bool {
        self.woken.is_some_and(|woken| now.saturating_duration_since(woken) >= ABSENT_AFTER)
    }

    /// It is polled: it is there, whatever was thought of it.
    fn is_here(&mut self) {
        (self.woken, self.passed) = (None, false);
    }

    pub(super) fn participant(&self) -> Participant {
        Participant {
            owner: Some(self.owner),
            label: Some(self.label.clone()),
            mode: self.mode,
            fence: None,
            age: Some(self.since.elapsed()),
            remaining: None,
        }
    }
}

impl Queue {
    pub(super) fn new(active: Active) -> Self {
        Self { active, waiters: BTreeMap::new(), next: 0, calls: 0, is_held: false, failed: None }
    }

    /// The waiters that one has to let go first.
    fn ahead(&self, place: u64) -> impl Iterator<Item = &Waiter> {
        self.waiters.range(..place).map(|(_, waiter)| waiter).filter(|waiter| !waiter.passed)
    }

    pub(super) fn is_front(&self, place: u64, mode: Mode) -> bool {
        let shared = mode == Mode::Shared && self.active == Active::FrontAndNext;
        self.ahead(place).all(|waiter| shared && waiter.mode == Mode::Shared)
    }

    /// Calls `each` with the front and the look-ahead, and whether it is at the front.
    fn for_active(&mut self, mut each: impl FnMut(&mut Waiter, bool)) {
        let mut ahead = None;
        for waiter in self.waiters.values_mut().filter(|waiter| !waiter.passed) {
            let is_front = match ahead {
                None => true,
                Some(Mode::Shared) => waiter.mode == Mode::Shared,
                Some(_) => false,
            };
            ahead = Some(waiter.mode);
            each(waiter, is_front);
            if !is_front || self.active == Active::First {
                break;
            }
        }
    }

    /// Makes those active that have moved up.
    pub(super) fn activate(&mut self, wakes: &mut Wakes) {
        let mut now = None;
        self.for_active(|waiter, _| {
            if waiter.stage == Stage::Resting {
                waiter.stage = Stage::Called;
                wakes.add(waiter, &mut now);
            }
        });
    }

    /// Wakes those active waiters that have not asked the store yet: what they wait for may be over.
    pub(super) fn wake_unasked(&mut self, wakes: &mut Wakes) {
        let mut now = None;
        self.for_active(|waiter, _| {
            if waiter.stage == Stage::Called {
                wakes.add(waiter, &mut now);
            }
        });
    }

    /// Tells the front that the lock may be free. A waiter that was passed over is told, too: it may come yet.
    pub(super) fn call(&mut self, wakes: &mut Wakes) {
        let mut now = None;
        self.calls += 1;
        for waiter in self.waiters.values_mut().take_while(|waiter| waiter.passed) {
            wakes.add(waiter, &mut now);
        }
        self.for_active(|waiter, is_front| {
            if is_front {
                wakes.add(waiter, &mut now);
            }
        });
    }

    /// Passes over those active waiters in front of a place that were woken some time ago and were not polled since.
    fn pass_absent(&mut self, place: u64, handoff: Handoff, wakes: &mut Wakes) {
        let (now, mut passed) = (Instant::now(), false);
        for (_, waiter) in self.waiters.range_mut(..place) {
            if waiter.stage == Stage::Resting {
                break;
            }
            if !waiter.passed && waiter.is_absent(now) {
                waiter.passed = true;
                passed = true;
            }
        }
        if passed && handoff == Handoff::Local {
            self.call(wakes);
        }
    }

    /// Returns whether an attempt of this waiter goes to the store, in which case it is asking from now on.
    pub(super) fn enter(&mut self, place: u64, handoff: Handoff, wakes: &mut Wakes) -> Entry {
        let now = Instant::now();
        let Some(waiter) = self.waiters.get_mut(&place) else { return Entry::Ask };
        let is_first = !waiter.refused;
        let pause = now.saturating_duration_since(std::mem::replace(&mut waiter.attempted, now));
        if !is_first {
            self.pass_absent(place, handoff, wakes);
        }
        self.activate(wakes);
        let Some(waiter) = self.waiters.get_mut(&place) else { return Entry::Ask };
        waiter.is_here();
        let (stage, mode) = (waiter.stage, waiter.mode);
        let asks = match (stage, handoff) {
            (Stage::Resting, _) => false,
            _ if self.is_front(place, mode) => true,
            (Stage::Asked | Stage::Asking, Handoff::Store) => true,
            // The store is to see claims in the order of the queue. An attempt in front that hangs is waited for only until
            // the next refresh.
            (Stage::Called, Handoff::Store) => {
                self.is_late_ahead(place, now)
                    || pause >= ABSENT_AFTER
                    || self.ahead(place).all(|waiter| waiter.stage == Stage::Asked)
            }
            (_, Handoff::Local) => self.is_late_ahead(place, now),
        };
        if asks {
            self.begin(place);
            return Entry::Ask;
        }
        let Some(waiter) = self.waiters.get_mut(&place) else { return Entry::Ask };
        waiter.refused = true;
        let ttl = waiter.ttl;
        if let Some(error) = self.failure(now, ttl).filter(|_| !is_first) {
            return Entry::Fail(error);
        }
        let Some(waiter) = self.waiters.get_mut(&place) else { return Entry::Ask };
        let is_active = waiter.stage != Stage::Resting;
        if is_active && handoff == Handoff::Local && pause >= ABSENT_AFTER && !self.is_held {
            // No notice has come for a while. If the front has missed one, it asks now, or is passed over later.
            self.call(wakes);
        }
        // The engine pauses between two attempts: a waiter that is woken within a turn of its first one does not report.
        let is_due_ahead = is_active && self.due_ahead(place).next().is_some();
        // Without a look-ahead, it is woken only when it is first.
        let may_be_next = is_first && self.active == Active::FrontAndNext;
        Entry::Wait(if may_be_next || is_due_ahead { Retry::After(TURN) } else { Retry::OnNotify })
    }

    /// Returns what a waiter that listens is to do now. It is asking from now on if that is to ask.
    pub(super) fn poll(
        &mut self,
        place: u64,
        handoff: Handoff,
        cx: &Context<'_>,
        wakes: &mut Wakes,
    ) -> Turn {
        let Some(waiter) = self.waiters.get_mut(&place) else { return Turn::Listen };
        waiter.is_here();
        if !waiter.waker.as_ref().is_some_and(|known| known.will_wake(cx.waker())) {
            wakes.retired = waiter.waker.replace(cx.waker().clone());
        }
        let (mode, stage, attempted) = (waiter.mode, waiter.stage, waiter.attempted);
        let is_due = waiter.is_due(self.calls);
        let turn = match (stage, handoff) {
            (Stage::Resting, _) => Turn::Rest,
            // The release of the holder wakes it.
            (_, Handoff::Local) if self.is_held && self.is_front(place, mode) => Turn::Rest,
            _ if self.is_front(place, mode) && is_due => Turn::Ask,
            _ if self.is_front(place, mode) => Turn::Listen,
            (Stage::Asked | Stage::Asking, Handoff::Store) => Turn::Listen,
            // A waiter in front of it should ask, and has not come. After a turn this one asks.
            _ if is_due && self.due_ahead(place).next().is_some() => {
                let now = Instant::now();
                match () {
                    () if self.is_late_ahead(place, now) => Turn::Ask,
                    () if now.saturating_duration_since(attempted) >= TURN => Turn::Report,
                    // The engine was told to ask again after a turn.
                    () if handoff == Handoff::Local => Turn::Listen,
                    () => Turn::Rest,
                }
            }
            (_, Handoff::Local) => Turn::Listen,
            (Stage::Called, Handoff::Store) => {
                let in_flight = self.ahead(place).any(|waiter| waiter.stage == Stage::Asking);
                if in_flight { Turn::Rest } else { Turn::Ask }
            }
        };
        if turn == Turn::Ask {
            self.begin(place);
        }
        turn
    }

    /// Returns the last answer of the store if that was an error. Only for half a TTL: the engine fails a waiter after a TTL
    /// without an answer, and a front that is not polled any more must not have that effect.
    fn failure(&self, now: Instant, ttl: Duration) -> Option<Error> {
        let (since, error) = self.failed.as_ref()?;
        (now.saturating_duration_since(*since) < ttl / 2).then(|| error.clone())
    }

    /// The waiters in front of a place that were woken to ask the store, and have not come yet. One that has come to the
    /// front behind a new holder was not woken, and need not ask.
    fn due_ahead(&self, place: u64) -> impl Iterator<Item = &Waiter> {
        self.ahead(place).filter(|waiter| waiter.woken.is_some() && waiter.is_due(self.calls))
    }

    /// Returns whether one of them has had its turn.
    fn is_late_ahead(&self, place: u64, now: Instant) -> bool {
        let is_late = |waiter: &Waiter| {
            waiter.woken.is_some_and(|woken| now.saturating_duration_since(woken) >= TURN)
        };
        self.due_ahead(place).any(is_late)
    }

    pub(super) fn begin(&mut self, place: u64) {
        if let Some(waiter) = self.waiters.get_mut(&place) {
            (waiter.stage, waiter.answered) = (Stage::Asking, self.calls);
        }
    }

    pub(super) fn leave(&mut self, place: u64, leave: Leave, handoff: Handoff, wakes: &mut Wakes) {
        let Some(waiter) = self.waiters.remove(&place) else { return };
        wakes.retired = waiter.waker;
        if let Leave::Granted(_) = leave {
            self.failed = None;
        }
        self.activate(wakes);
        match (handoff, leave) {
            // It may have been called, and go without having asked.
            (Handoff::Local, Leave::GaveUp) => self.call(wakes),
            // The next one is told by the release of this one: until then it need not ask.
            (Handoff::Local, Leave::Granted(Mode::Exclusive)) => self.is_held = true,
            (Handoff::Local | Handoff::Store, _) => self.wake_unasked(wakes),
        }
    }
}
