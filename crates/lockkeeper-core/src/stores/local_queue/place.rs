//! A claim's place in the queue of its name, and the table of all queues of a store.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};

use tokio::time::Instant;

use super::queue::{Active, Entry, Handoff, Leave, Queue, Stage, Turn, Waiter, Wakes};
use crate::contract::{ClaimSpec, Kind, Mode, Participant};
use crate::error::Error;
use crate::name::Name;

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
        wakes.called.into_iter().for_each(Waker::wake);
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
            let mut table = self.queues.table();
            let active = self.queues.active;
            let queues = table.of(self.kind);
            let queue = queues.entry(self.name.clone()).or_insert_with(|| Queue::new(active));
            queue.next += 1;
            queue.waiters.insert(queue.next, Waiter::new(spec));
            self.number = Some(queue.next);
        }
    }

    /// Joins the queue, or refreshes the place there. Returns whether the attempt goes to the store.
    pub(super) fn enter(&mut self, spec: &ClaimSpec) -> Entry {
        self.join(spec);
        let handoff = self.queues.handoff;
        let enter = |queue: &mut Queue, number, wakes: &mut Wakes| {
            Some(queue.enter(number, handoff, wakes))
        };
        self.with(enter).unwrap_or(Entry::Ask)
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
            queue.failed = None;
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
        let turn = |queue: &mut Queue, number, wakes: &mut Wakes| {
            Some(queue.poll(number, handoff, cx, wakes))
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

    /// Takes note that the store has failed an attempt. Leaves the queue if the claim was never told that the lock is
    /// contended.
    pub(super) fn failed(&mut self, error: &Error) {
        let is_refused = |queue: &mut Queue, number, _: &mut Wakes| {
            // Other errors may concern this claim alone, such as a refused floor.
            if error.is_retryable() {
                queue.failed = Some((Instant::now(), error.clone()));
            }
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
