//! The queue of one name within a process: which waiters may talk to the store, and which must be woken.
//!
//! All methods run under the lock of the table of queues, without I/O. Wakers are called after the lock is released.
//!
//! # Invariants
//!
//! 1. A waiter is *active* (its [`Stage`] is not `Resting`) if it is at the front or the look-ahead. It stays active until it
//!    leaves, because others join only behind it. A waiter may join with an attempt in flight: it is active
//!    until that is answered.
//! 2. The *front* is the first waiter or, if that is a reader, all readers before the first writer. The *look-ahead* is
//!    the waiter behind the front. Waiters that were passed count for neither. With [`Active::First`], the front is the
//!    first waiter alone, and there is no look-ahead.
//! 3. Whenever the front or the look-ahead may have something to do, its waker is called. A waiter registers its
//!    waker under the same lock under which it finds nothing to do, so no wake-up is lost.
//! 4. A queue without waiters is not in the table.

use std::collections::BTreeMap;
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::time::Instant;

use crate::contract::{ClaimSpec, Mode, Participant, Retry};
use crate::error::Error;
use crate::name::{Label, Name};
use crate::owner::Owner;

/// A waiter that was woken and not polled for this long is passed by the others. Only a refresh of another waiter checks
/// this, so no timer is needed.
const UNPOLLED_AFTER: Duration = Duration::from_millis(100);

/// How long the look-ahead waits for a woken front to send its attempt. The runtime polls a ready task within that
/// time. The engine measures it: the look-ahead's attempt returns [`Retry::After`] this time.
const FRONT_GRACE: Duration = Duration::from_millis(1);

/// Which side hands off a released lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Handoff {
    /// The store, in the order of the attempts that it received. A release sends no local notification.
    Store,
    /// The local queue, because the store is not fair. A release in this process wakes the front.
    Local,
}

/// Which waiters of a queue talk to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Active {
    FrontAndLookAhead,
    /// The first waiter, which is then the front alone.
    First,
}

#[derive(Debug)]
pub(super) struct Queue {
    handoff: Handoff,
    active: Active,
    pub(super) waiters: BTreeMap<u64, Waiter>,
    last_number: u64,
    /// How often the front was notified that the lock may be free.
    notifications: u64,
    /// Whether a claim that left this queue holds the lock exclusively. The front then waits for the release of that claim. It
    /// ignores notifications of the store, because they cannot announce that release.
    is_held: bool,
    /// The error with which the store last answered a waiter, and its time; `None` after any other answer.
    pub(super) failed: Option<(Instant, Error)>,
}

/// The fields of a [`ClaimSpec`] that a queue needs. Cloning all of them would cost more.
#[derive(Debug)]
pub(super) struct WaiterSpec {
    pub(super) name: Name,
    owner: Owner,
    label: Label,
    pub(super) mode: Mode,
    pub(super) ttl: Duration,
    pub(super) queue: bool,
}

impl From<&ClaimSpec> for WaiterSpec {
    fn from(spec: &ClaimSpec) -> Self {
        let (name, label) = (spec.name.clone(), spec.label.clone());
        Self { name, owner: spec.owner, label, mode: spec.mode, ttl: spec.ttl, queue: spec.queue }
    }
}

#[derive(Debug)]
pub(super) struct Waiter {
    owner: Owner,
    label: Label,
    mode: Mode,
    since: Instant,
    stage: Stage,
    /// [`Queue::notifications`] when it last sent an attempt to the store.
    seen: u64,
    /// When it was woken, if it has not been polled since.
    woken: Option<Instant>,
    /// Whether the others no longer wait for it, because it was woken and not polled. It keeps its place.
    passed: bool,
    /// Whether an attempt was answered "contended". Until then, the claim does not count as a waiter.
    pub(super) refused: bool,
    /// When the engine last made an attempt, whether or not it went to the store.
    attempted: Instant,
    ttl: Duration,
    waker: Option<Waker>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Behind the look-ahead. It does not talk to the store.
    Resting,
    /// Active, with an attempt to send.
    Ready,
    /// Its attempt is in flight.
    InFlight,
    /// The store has answered its attempt.
    Answered,
}

/// What a waiter must do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Send an attempt to the store.
    Attempt,
    /// Report a possible change to the engine: a waiter ahead was woken and may not be polled.
    Report,
    /// Wait for the store and for a wake-up.
    Listen,
    /// Wait for a wake-up.
    Sleep,
}

/// The decision on an attempt.
#[derive(Debug)]
pub(super) enum Entry {
    /// It goes to the store.
    Attempt,
    /// It is contended: the claim waits behind others of this process.
    Wait(Retry),
    /// It fails: the store has failed the waiters ahead. The engine decides how long a waiter tolerates that.
    Fail(Error),
}

/// Why a waiter leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leave {
    Granted,
    GaveUp,
}

/// Wakers to call or drop once the table is unlocked. Both run foreign code: the last waker of a task may drop the task,
/// and claims with it.
#[derive(Default)]
pub(super) struct Wakes {
    called: Vec<Waker>,
    /// One change of a queue retires at most one waker.
    retired: Option<Waker>,
}

impl Wakes {
    fn add(&mut self, waiter: &mut Waiter, now: &mut Option<Instant>) {
        if waiter.woken.is_none() {
            waiter.woken = Some(*now.get_or_insert_with(Instant::now));
        }
        self.called.extend(waiter.waker.take());
    }

    pub(super) fn wake(self) {
        self.called.into_iter().for_each(Waker::wake);
    }
}

impl Waiter {
    pub(super) fn new(spec: &WaiterSpec) -> Self {
        let now = Instant::now();
        Self {
            owner: spec.owner,
            label: spec.label.clone(),
            mode: spec.mode,
            since: now,
            stage: Stage::Resting,
            seen: 0,
            woken: None,
            passed: false,
            refused: false,
            attempted: now,
            ttl: spec.ttl,
            waker: None,
        }
    }

    /// Returns whether it should send an attempt and has not done so.
    fn is_due(&self, notifications: u64) -> bool {
        match self.stage {
            Stage::Ready => true,
            Stage::Answered => notifications > self.seen,
            Stage::Resting | Stage::InFlight => false,
        }
    }

    fn is_unpolled_for(&self, limit: Duration, now: Instant) -> bool {
        self.woken.is_some_and(|woken| now.saturating_duration_since(woken) >= limit)
    }

    fn mark_polled(&mut self) {
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
    pub(super) fn new(handoff: Handoff, active: Active) -> Self {
        let (waiters, last_number, notifications) = (BTreeMap::new(), 0, 0);
        Self { handoff, active, waiters, last_number, notifications, is_held: false, failed: None }
    }

    /// Adds a waiter at the back and returns its number.
    pub(super) fn push(&mut self, waiter: Waiter) -> u64 {
        self.last_number += 1;
        self.waiters.insert(self.last_number, waiter);
        self.last_number
    }

    /// Returns the waiters ahead, except those that were passed.
    fn ahead(&self, number: u64) -> impl Iterator<Item = &Waiter> {
        self.waiters.range(..number).map(|(_, waiter)| waiter).filter(|waiter| !waiter.passed)
    }

    fn is_front(&self, number: u64, mode: Mode) -> bool {
        let shared = mode == Mode::Shared && self.active == Active::FrontAndLookAhead;
        self.ahead(number).all(|waiter| shared && waiter.mode == Mode::Shared)
    }

    /// Calls `each` with the number of each active waiter, the waiter, and whether it is at the front.
    fn for_active(&mut self, mut each: impl FnMut(u64, &mut Waiter, bool)) {
        let mut ahead = None;
        for (number, waiter) in self.waiters.iter_mut().filter(|(_, waiter)| !waiter.passed) {
            let is_front = match ahead {
                None => true,
                Some(Mode::Shared) => waiter.mode == Mode::Shared,
                Some(_) => false,
            };
            ahead = Some(waiter.mode);
            each(*number, waiter, is_front);
            if !is_front || self.active == Active::First {
                break;
            }
        }
    }

    /// Activates the waiters that have moved up.
    fn activate(&mut self, wakes: &mut Wakes) {
        let mut now = None;
        self.for_active(|_, waiter, _| {
            if waiter.stage == Stage::Resting {
                waiter.stage = Stage::Ready;
                wakes.add(waiter, &mut now);
            }
        });
    }

    /// Wakes the active waiters that have an attempt to send: the reason to hold it back may be gone.
    fn wake_ready(&mut self, wakes: &mut Wakes) {
        let mut now = None;
        self.for_active(|_, waiter, _| {
            if waiter.stage == Stage::Ready {
                wakes.add(waiter, &mut now);
            }
        });
    }

    /// Notifies the front that the lock may be free, and the waiters before it that were passed: they may be polled again.
    pub(super) fn notify_front(&mut self, wakes: &mut Wakes) {
        let mut now = None;
        self.notifications += 1;
        for waiter in self.waiters.values_mut().take_while(|waiter| waiter.passed) {
            wakes.add(waiter, &mut now);
        }
        self.for_active(|_, waiter, is_front| {
            if is_front {
                wakes.add(waiter, &mut now);
            }
        });
    }

    pub(super) fn released(&mut self, wakes: &mut Wakes) {
        self.is_held = false;
        self.notify_front(wakes);
    }

    /// Passes the active waiters ahead that were woken and not polled since.
    fn pass_unpolled(&mut self, number: u64, wakes: &mut Wakes) {
        let (now, mut passed) = (Instant::now(), false);
        for (_, waiter) in self.waiters.range_mut(..number) {
            if waiter.stage == Stage::Resting {
                break;
            }
            if !waiter.passed && waiter.is_unpolled_for(UNPOLLED_AFTER, now) {
                waiter.passed = true;
                passed = true;
            }
        }
        if passed && self.handoff == Handoff::Local {
            self.notify_front(wakes);
        }
    }

    /// Decides on an attempt of a waiter. If it goes to the store, it is in flight from now on.
    pub(super) fn enter(&mut self, number: u64, wakes: &mut Wakes) -> Entry {
        let now = Instant::now();
        let Some(waiter) = self.waiters.get_mut(&number) else { return Entry::Attempt };
        let is_first = !waiter.refused;
        let pause = now.saturating_duration_since(std::mem::replace(&mut waiter.attempted, now));
        if !is_first {
            self.pass_unpolled(number, wakes);
        }
        self.activate(wakes);
        let Some(waiter) = self.waiters.get_mut(&number) else { return Entry::Attempt };
        waiter.mark_polled();
        let (stage, mode, ttl) = (waiter.stage, waiter.mode, waiter.ttl);
        let sends = match (stage, self.handoff) {
            (Stage::Resting, _) => false,
            _ if self.is_front(number, mode) => true,
            (Stage::Answered | Stage::InFlight, Handoff::Store) => true,
            // Attempts reach the store in the order of the queue. If one ahead hangs, this one waits only until its next
            // refresh.
            (Stage::Ready, Handoff::Store) => {
                self.is_front_late(number, now)
                    || pause >= UNPOLLED_AFTER
                    || self.ahead(number).all(|waiter| waiter.stage == Stage::Answered)
            }
            (_, Handoff::Local) => self.is_front_late(number, now),
        };
        if sends {
            self.begin_attempt(number);
            return Entry::Attempt;
        }
        if let Some(waiter) = self.waiters.get_mut(&number) {
            waiter.refused = true;
        }
        if let Some(error) = self.failure(now, ttl).filter(|_| !is_first) {
            return Entry::Fail(error);
        }
        let is_active = stage != Stage::Resting;
        if is_active && self.handoff == Handoff::Local && pause >= UNPOLLED_AFTER && !self.is_held {
            // No notification has arrived for a while. If the front missed one, it sends an attempt now or is passed later.
            self.notify_front(wakes);
        }
        let is_behind_due = is_active && self.due_ahead(number).next().is_some();
        // Within the grace time of its first attempt, the look-ahead reports nothing. So the engine must repeat that attempt.
        let may_be_next = is_first && self.active == Active::FrontAndLookAhead;
        Entry::Wait(if may_be_next || is_behind_due {
            Retry::After(FRONT_GRACE)
        } else {
            Retry::OnNotify
        })
    }

    /// Returns what a polled waiter must do now. If that is an attempt, it is in flight from now on.
    pub(super) fn poll(&mut self, number: u64, cx: &Context<'_>, wakes: &mut Wakes) -> Turn {
        let Some(waiter) = self.waiters.get_mut(&number) else { return Turn::Listen };
        waiter.mark_polled();
        if !waiter.waker.as_ref().is_some_and(|known| known.will_wake(cx.waker())) {
            wakes.retired = waiter.waker.replace(cx.waker().clone());
        }
        let (mode, stage, attempted) = (waiter.mode, waiter.stage, waiter.attempted);
        let is_due = waiter.is_due(self.notifications);
        let turn = match (stage, self.handoff) {
            (Stage::Resting, _) => Turn::Sleep,
            // The release of the holder wakes it.
            (_, Handoff::Local) if self.is_held && self.is_front(number, mode) => Turn::Sleep,
            _ if self.is_front(number, mode) && is_due => Turn::Attempt,
            _ if self.is_front(number, mode) => Turn::Listen,
            (Stage::Answered | Stage::InFlight, Handoff::Store) => Turn::Listen,
            // A waiter ahead should send an attempt and was not polled. After the grace time, this one does.
            _ if is_due && self.due_ahead(number).next().is_some() => {
                let now = Instant::now();
                match () {
                    () if self.is_front_late(number, now) => Turn::Attempt,
                    () if now.saturating_duration_since(attempted) >= FRONT_GRACE => Turn::Report,
                    // The engine repeats the attempt after the grace time.
                    () if self.handoff == Handoff::Local => Turn::Listen,
                    () => Turn::Sleep,
                }
            }
            (_, Handoff::Local) => Turn::Listen,
            (Stage::Ready, Handoff::Store) => {
                let in_flight = self.ahead(number).any(|waiter| waiter.stage == Stage::InFlight);
                if in_flight { Turn::Sleep } else { Turn::Attempt }
            }
        };
        if turn == Turn::Attempt {
            self.begin_attempt(number);
        }
        turn
    }

    /// Returns the last answer of the store if it was an error less than half a TTL ago. The engine fails a waiter after a
    /// TTL of errors, and a front that is no longer polled must not cause that.
    fn failure(&self, now: Instant, ttl: Duration) -> Option<Error> {
        let (since, error) = self.failed.as_ref()?;
        (now.saturating_duration_since(*since) < ttl / 2).then(|| error.clone())
    }

    /// Returns the waiters ahead that were woken to send an attempt and have not been polled yet. A waiter that moved up
    /// behind a new holder was not woken, and need not send one.
    fn due_ahead(&self, number: u64) -> impl Iterator<Item = &Waiter> {
        self.ahead(number)
            .filter(|waiter| waiter.woken.is_some() && waiter.is_due(self.notifications))
    }

    fn is_front_late(&self, number: u64, now: Instant) -> bool {
        self.due_ahead(number).any(|waiter| waiter.is_unpolled_for(FRONT_GRACE, now))
    }

    pub(super) fn begin_attempt(&mut self, number: u64) {
        if let Some(waiter) = self.waiters.get_mut(&number) {
            (waiter.stage, waiter.seen) = (Stage::InFlight, self.notifications);
        }
    }

    /// Records that an attempt ended, with or without an answer.
    pub(super) fn attempt_ended(&mut self, number: u64, wakes: &mut Wakes) {
        let waiter = self.waiters.get_mut(&number);
        let Some(waiter) = waiter.filter(|waiter| waiter.stage == Stage::InFlight) else { return };
        waiter.stage = Stage::Answered;
        if self.handoff == Handoff::Store {
            self.wake_ready(wakes);
        }
    }

    pub(super) fn refused(&mut self, number: u64, wakes: &mut Wakes) {
        let Some(waiter) = self.waiters.get_mut(&number) else { return };
        (waiter.stage, waiter.refused, waiter.passed) = (Stage::Answered, true, false);
        // Others may have joined before a waiter whose first attempt was sent without a queue.
        let mut is_active = self.handoff == Handoff::Store;
        self.for_active(|active, _, _| is_active |= active == number);
        if let Some(waiter) = self.waiters.get_mut(&number).filter(|_| !is_active) {
            waiter.stage = Stage::Resting;
        }
        self.failed = None;
        self.activate(wakes);
    }

    /// Records a notification of the store that the lock may be free.
    pub(super) fn store_notified(&mut self, number: u64, wakes: &mut Wakes) {
        if self.is_held {
            return;
        }
        let Some(mode) = self.waiters.get(&number).map(|waiter| waiter.mode) else { return };
        if !self.is_front(number, mode) {
            self.notify_front(wakes);
        } else if let Some(waiter) = self.waiters.get_mut(&number) {
            waiter.stage = Stage::Ready;
        }
    }

    pub(super) fn leave(&mut self, number: u64, leave: Leave, wakes: &mut Wakes) {
        let Some(waiter) = self.waiters.remove(&number) else { return };
        wakes.retired = waiter.waker;
        if leave == Leave::Granted {
            self.failed = None;
        }
        self.activate(wakes);
        match (self.handoff, leave) {
            // The waiter may leave after a notification, without having sent an attempt.
            (Handoff::Local, Leave::GaveUp) => self.notify_front(wakes),
            // The release of this waiter notifies the next one.
            (Handoff::Local, Leave::Granted) if waiter.mode == Mode::Exclusive => {
                self.is_held = true;
            }
            (Handoff::Local | Handoff::Store, _) => self.wake_ready(wakes),
        }
    }
}
