//! The queues of one process, by name and kind: which waiter may talk to the store, and which one is to be woken.
//!
//! Everything happens under one lock and without I/O. Wakers are called after the lock is released.
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

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::time::Instant;

use crate::contract::{ClaimSpec, Kind, Mode, Participant};
use crate::name::{Label, Name};
use crate::owner::Owner;

/// A waiter that was woken and has not been polled for this long does not hold up others: they pass it over. It is
/// looked at only when another waiter refreshes its place, so it costs no timer.
const ABSENT_AFTER: Duration = Duration::from_millis(100);

/// How long the look-ahead yields to a waiter in front of it that was told to ask. A task that is ready is polled
/// within microseconds, but not always by the next turn of the scheduler: another worker may steal the look-ahead.
const MAX_YIELD: Duration = Duration::from_millis(1);

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

/// The queues of a store.
#[derive(Debug)]
pub(super) struct Queues {
    pub(super) handoff: Handoff,
    active: Active,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    locks: HashMap<Name, Queue>,
    semaphores: HashMap<Name, Queue>,
}

#[derive(Debug)]
struct Queue {
    active: Active,
    waiters: BTreeMap<u64, Waiter>,
    next: u64,
    /// How often the front was told that the lock may be free.
    calls: u64,
    /// A claim that left this queue holds the lock exclusively. Notices of the store are about other things then, and the
    /// front is told when that claim releases.
    is_held: bool,
}

#[derive(Debug)]
struct Waiter {
    owner: Owner,
    label: Label,
    mode: Mode,
    since: Instant,
    stage: Stage,
    /// The number of calls when it last asked the store.
    answered: u64,
    /// When it was woken, if it has not been polled since.
    woken: Option<Instant>,
    /// It was woken and did not come: others no longer wait for it. Its place is kept.
    passed: bool,
    /// It was told that the lock is contended. Before that it is on its first attempt, and does not wait.
    refused: bool,
    /// While it lets other tasks run, because a waiter in front of it may be about to ask.
    yielding: Option<Yielding>,
    waker: Option<Waker>,
}

/// How far a waiter has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
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
    /// Let other tasks run, and look again: a waiter in front of it was woken and may be about to ask.
    Yield(Yielding),
    /// Wait for the store and for a wake-up.
    Listen,
    /// Wait for a wake-up.
    Rest,
}

/// Since when a waiter yields to one in front of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Yielding {
    /// The number of calls by then. If the waiter in front has answered these, a later one is a new turn.
    calls: u64,
    /// In real time: where tokio's clock is paused it does not advance while tasks run.
    at: std::time::Instant,
}

/// Why a waiter leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leave {
    Granted(Mode),
    GaveUp,
}

/// The wakers to call once the table is unlocked.
#[derive(Default)]
struct Wakes(Vec<Waker>);

impl Wakes {
    fn add(&mut self, waiter: &mut Waiter, now: &mut Option<Instant>) {
        if waiter.woken.is_none() {
            waiter.woken = Some(*now.get_or_insert_with(Instant::now));
        }
        self.0.extend(waiter.waker.take());
    }
}

impl Waiter {
    fn new(spec: &ClaimSpec) -> Self {
        Self {
            owner: spec.owner,
            label: spec.label.clone(),
            mode: spec.mode,
            since: Instant::now(),
            stage: Stage::Resting,
            answered: 0,
            woken: None,
            passed: false,
            refused: false,
            yielding: None,
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

    fn participant(&self) -> Participant {
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
    fn new(active: Active) -> Self {
        Self { active, waiters: BTreeMap::new(), next: 0, calls: 0, is_held: false }
    }

    /// The waiters that one has to let go first.
    fn ahead(&self, place: u64) -> impl Iterator<Item = &Waiter> {
        self.waiters.range(..place).map(|(_, waiter)| waiter).filter(|waiter| !waiter.passed)
    }

    fn is_front(&self, place: u64, mode: Mode) -> bool {
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
    fn activate(&mut self, wakes: &mut Wakes) {
        let mut now = None;
        self.for_active(|waiter, _| {
            if waiter.stage == Stage::Resting {
                waiter.stage = Stage::Called;
                wakes.add(waiter, &mut now);
            }
        });
    }

    /// Wakes those active waiters that have not asked the store yet: what they wait for may be over.
    fn wake_unasked(&mut self, wakes: &mut Wakes) {
        let mut now = None;
        self.for_active(|waiter, _| {
            if waiter.stage == Stage::Called {
                wakes.add(waiter, &mut now);
            }
        });
    }

    /// Tells the front that the lock may be free. A waiter that was passed over is told, too: it may come yet.
    fn call(&mut self, wakes: &mut Wakes) {
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

    /// Returns whether an attempt of this waiter goes to the store. Then it is asking from now on.
    fn enter(&mut self, place: u64, handoff: Handoff, wakes: &mut Wakes) -> bool {
        let Some(waiter) = self.waiters.get_mut(&place) else { return true };
        waiter.is_here();
        let is_first = !waiter.refused;
        if !is_first {
            self.pass_absent(place, handoff, wakes);
        }
        self.activate(wakes);
        let Some(waiter) = self.waiters.get(&place) else { return true };
        let asks = match (waiter.stage, handoff) {
            (Stage::Resting, _) => false,
            _ if self.is_front(place, waiter.mode) => true,
            (Stage::Asked | Stage::Asking, Handoff::Store) => true,
            // The store is to see claims in the order of the queue. An attempt in front that hangs is waited for only until
            // the next refresh.
            (Stage::Called, Handoff::Store) => {
                !is_first || self.ahead(place).all(|waiter| waiter.stage == Stage::Asked)
            }
            (_, Handoff::Local) => false,
        };
        if asks {
            self.begin(place);
        } else if let Some(waiter) = self.waiters.get_mut(&place) {
            waiter.refused = true;
            if handoff == Handoff::Local && !is_first && waiter.stage != Stage::Resting {
                // No notice has come for a while. If the front has missed one, it asks now, or is passed over later.
                self.call(wakes);
            }
        }
        asks
    }

    /// Returns what a waiter that listens is to do now. It is asking from now on if that is to ask.
    fn poll(&mut self, place: u64, handoff: Handoff, waker: &Waker) -> Turn {
        let Some(waiter) = self.waiters.get_mut(&place) else { return Turn::Listen };
        waiter.is_here();
        if !waiter.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            waiter.waker = Some(waker.clone());
        }
        let (mode, stage, is_due) = (waiter.mode, waiter.stage, waiter.is_due(self.calls));
        let yielding = waiter.yielding.take();
        let turn = match (stage, handoff) {
            (Stage::Resting, _) => Turn::Rest,
            // The release of the holder wakes it.
            (_, Handoff::Local) if self.is_held && self.is_front(place, mode) => Turn::Rest,
            _ if self.is_front(place, mode) && is_due => Turn::Ask,
            _ if self.is_front(place, mode) => Turn::Listen,
            (Stage::Asked | Stage::Asking, Handoff::Store) => Turn::Listen,
            // The look-ahead goes on if a waiter in front of it should have asked and has not come.
            _ if is_due && self.is_due_ahead(place, self.calls) => match yielding {
                Some(begin) if self.is_due_ahead(place, begin.calls) => {
                    if begin.at.elapsed() >= MAX_YIELD { Turn::Ask } else { Turn::Yield(begin) }
                }
                Some(_) | None => {
                    Turn::Yield(Yielding { calls: self.calls, at: std::time::Instant::now() })
                }
            },
            (_, Handoff::Local) => Turn::Listen,
            (Stage::Called, Handoff::Store) => {
                let in_flight = self.ahead(place).any(|waiter| waiter.stage == Stage::Asking);
                if in_flight { Turn::Rest } else { Turn::Ask }
            }
        };
        if turn == Turn::Ask {
            self.begin(place);
        }
        if let (Turn::Yield(begin), Some(waiter)) = (turn, self.waiters.get_mut(&place)) {
            waiter.yielding = Some(begin);
        }
        turn
    }

    /// Returns whether a waiter in front of a place was woken to ask the store, by the first so many calls, and has not
    /// come yet. One that has come to the front behind a new holder was not woken, and need not ask.
    fn is_due_ahead(&self, place: u64, calls: u64) -> bool {
        self.ahead(place).any(|waiter| waiter.woken.is_some() && waiter.is_due(calls))
    }

    fn begin(&mut self, place: u64) {
        if let Some(waiter) = self.waiters.get_mut(&place) {
            (waiter.stage, waiter.answered) = (Stage::Asking, self.calls);
        }
    }

    fn leave(&mut self, place: u64, leave: Leave, handoff: Handoff, wakes: &mut Wakes) {
        if self.waiters.remove(&place).is_none() {
            return;
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

impl Table {
    fn of(&mut self, kind: Kind) -> &mut HashMap<Name, Queue> {
        match kind {
            Kind::Lock => &mut self.locks,
            Kind::Semaphore => &mut self.semaphores,
        }
    }
}

impl Queues {
    pub(super) fn new(handoff: Handoff, active: Active) -> Self {
        Self { handoff, active, table: Mutex::default() }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Nothing panics while it holds this lock, so a poisoned one cannot be half written.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `change` on the queue of a name, if there is one. Forgets the queue if that leaves it empty.
    fn with<T>(
        &self,
        (name, kind): (&Name, Kind),
        change: impl FnOnce(&mut Queue, &mut Wakes) -> T,
    ) -> Option<T> {
        let mut wakes = Wakes::default();
        let mut table = self.table();
        let queues = table.of(kind);
        let queue = queues.get_mut(name)?;
        let result = change(queue, &mut wakes);
        if queue.waiters.is_empty() {
            queues.remove(name);
        }
        drop(table);
        // Wakers run foreign code: not under the lock.
        wakes.0.into_iter().for_each(Waker::wake);
        Some(result)
    }

    /// Returns the waiters of each name that `wanted` accepts, in order.
    pub(super) fn waiting(
        &self,
        wanted: impl Fn(&str) -> bool,
    ) -> Vec<(Name, Kind, Vec<Participant>)> {
        let mut table = self.table();
        let mut all = Vec::new();
        for kind in [Kind::Lock, Kind::Semaphore] {
            for (name, queue) in table.of(kind).iter().filter(|(name, _)| wanted(name)) {
                let waiting = queue.waiters.values().filter(|waiter| waiter.refused);
                all.push((name.clone(), kind, waiting.map(Waiter::participant).collect()));
            }
        }
        all.retain(|(.., waiting): &(_, _, Vec<Participant>)| !waiting.is_empty());
        all
    }
}

/// What a claim has in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hold {
    None,
    /// An attempt was sent and its answer is not known.
    Unknown,
    Held,
}

/// A claim's place in the queue of its name. Dropped, it leaves; what the claim held is free by then.
#[derive(Debug)]
pub(super) struct Place {
    queues: Arc<Queues>,
    name: Name,
    kind: Kind,
    /// `None` while it is not in the queue.
    number: Option<u64>,
    pub(super) hold: Hold,
}

impl Place {
    pub(super) fn new(queues: Arc<Queues>, spec: &ClaimSpec) -> Self {
        let (name, kind) = (spec.name.clone(), spec.mode.kind());
        Self { queues, name, kind, number: None, hold: Hold::None }
    }

    pub(super) fn handoff(&self) -> Handoff {
        self.queues.handoff
    }

    pub(super) fn is_queued(&self) -> bool {
        self.number.is_some()
    }

    fn with<T: Default>(&self, change: impl FnOnce(&mut Queue, u64, &mut Wakes) -> T) -> T {
        let Some(number) = self.number else { return T::default() };
        let changed =
            self.queues.with((&self.name, self.kind), |queue, wakes| change(queue, number, wakes));
        changed.unwrap_or_default()
    }

    /// Returns whether claims of this process wait. The claim itself is not in the queue.
    pub(super) fn others_wait(&self) -> bool {
        let mut table = self.queues.table();
        let queue = table.of(self.kind).get(&self.name);
        queue.is_some_and(|queue| queue.waiters.values().any(|waiter| waiter.refused))
    }

    fn join(&mut self, spec: &ClaimSpec) {
        if self.number.is_none() {
            let (mut table, active) = (self.queues.table(), self.queues.active);
            let queues = table.of(self.kind);
            let queue = queues.entry(self.name.clone()).or_insert_with(|| Queue::new(active));
            queue.next += 1;
            queue.waiters.insert(queue.next, Waiter::new(spec));
            self.number = Some(queue.next);
        }
    }

    /// Joins the queue, or refreshes the place there. Returns whether the attempt goes to the store: if not, the
    /// claim waits behind others of this process.
    pub(super) fn enter(&mut self, spec: &ClaimSpec) -> bool {
        self.join(spec);
        let handoff = self.queues.handoff;
        self.with(|queue, number, wakes| queue.enter(number, handoff, wakes))
    }

    /// Takes note that the claim asks the store, whatever its place.
    pub(super) fn asks(&self) {
        self.with(|queue, number, _| queue.begin(number));
    }

    /// Joins the queue with an attempt that the store has refused, if the claim is not there yet.
    pub(super) fn refused(&mut self, spec: &ClaimSpec) {
        self.join(spec);
        self.with(|queue, number, wakes| {
            if let Some(waiter) = queue.waiters.get_mut(&number) {
                waiter.refused = true;
                if waiter.stage == Stage::Resting {
                    waiter.stage = Stage::Asked;
                }
            }
            queue.activate(wakes);
        });
    }

    /// Takes note that an attempt has ended, with or without an answer.
    pub(super) fn answered(&self) {
        let handoff = self.queues.handoff;
        self.with(|queue, number, wakes| {
            let Some(waiter) = queue.waiters.get_mut(&number) else { return };
            if waiter.stage == Stage::Asking {
                waiter.stage = Stage::Asked;
            }
            if handoff == Handoff::Store {
                queue.wake_unasked(wakes);
            }
        });
    }

    /// Returns what the claim is to do now, and registers who is woken when that changes.
    pub(super) fn poll(&self, cx: &Context<'_>) -> Turn {
        let handoff = self.queues.handoff;
        let turn = |queue: &mut Queue, number, _: &mut Wakes| {
            Some(queue.poll(number, handoff, cx.waker()))
        };
        self.with(turn).unwrap_or(Turn::Listen)
    }

    /// Takes note that the store says that the lock may be free.
    pub(super) fn noticed(&self) {
        self.with(|queue, number, wakes| {
            if queue.is_held {
                return;
            }
            let Some(mode) = queue.waiters.get(&number).map(|waiter| waiter.mode) else { return };
            if !queue.is_front(number, mode) {
                queue.call(wakes);
            } else if let Some(waiter) = queue.waiters.get_mut(&number) {
                waiter.stage = Stage::Called;
            }
        });
    }

    /// Leaves the queue with the lock.
    pub(super) fn granted(&mut self, mode: Mode) {
        self.leave(Leave::Granted(mode));
    }

    /// Leaves the queue without the lock.
    pub(super) fn give_up(&mut self) {
        self.leave(Leave::GaveUp);
    }

    /// Leaves the queue if the claim was never told that the lock is contended.
    pub(super) fn give_up_unless_refused(&mut self) {
        let is_refused = |queue: &mut Queue, number, _: &mut Wakes| {
            queue.waiters.get(&number).is_some_and(|waiter| waiter.refused)
        };
        if !self.with(is_refused) {
            self.give_up();
        }
    }

    fn leave(&mut self, leave: Leave) {
        let handoff = self.queues.handoff;
        self.with(|queue, number, wakes| queue.leave(number, leave, handoff, wakes));
        self.number = None;
    }

    /// Tells the front that this claim no longer holds the lock, or holds less of it, if the store does not hand over by
    /// itself.
    pub(super) fn released(&self) {
        if self.queues.handoff == Handoff::Local {
            self.queues.with((&self.name, self.kind), |queue, wakes| {
                queue.is_held = false;
                queue.call(wakes);
            });
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.give_up();
        if self.hold != Hold::None {
            self.released();
        }
    }
}
