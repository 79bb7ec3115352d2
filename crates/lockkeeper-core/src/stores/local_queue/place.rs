//! A claim's place in the queue of its name, and the table of all queues of a store.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Context;

use tokio::time::Instant;

use super::queue::{Active, Entry, Handoff, Leave, Queue, Turn, Waiter, WaiterSpec, Wakes};
use crate::contract::{ClaimSpec, Kind, Participant, Retry};
use crate::error::Error;
use crate::name::Name;

/// The queues of a store.
///
/// With [`Handoff::Local`], a first attempt bypasses the queue if the name has none. The claim joins late, if the
/// attempt is refused or still in flight after one poll. A release may fall between the attempt and the join. So a release
/// increments `releases` before it checks `occupied`, and a late join increments `occupied` before it checks `releases`: at
/// least one of the two sees the other. Covered by `tests/local_queue/first_attempt.rs`.
#[derive(Debug)]
pub(super) struct Queues {
    handoff: Handoff,
    active: Active,
    table: Mutex<Table>,
    /// The number of queues in the table.
    occupied: AtomicUsize,
    /// The number of releases so far, if `handoff` is `Local`.
    releases: AtomicUsize,
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
        let (occupied, releases) = Default::default();
        Self { handoff, active, table: Mutex::default(), occupied, releases }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // No code panics while it holds this lock, so a poisoned table is consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `change` on the queue of a claim's name, if there is one, and removes the queue if it is then empty.
    fn with<T>(
        &self,
        spec: &WaiterSpec,
        change: impl FnOnce(&mut Queue, &mut Wakes) -> T,
    ) -> Option<T> {
        let mut wakes = Wakes::default();
        let mut table = self.table();
        let queues = table.of(spec.mode.kind());
        let queue = queues.get_mut(&spec.name)?;
        let result = change(queue, &mut wakes);
        if queue.waiters.is_empty() {
            queues.remove(&spec.name);
            self.occupied.fetch_sub(1, Ordering::SeqCst);
        }
        drop(table);
        wakes.wake();
        Some(result)
    }

    /// Returns whether the name of a claim has a queue that meets a condition.
    fn any(&self, spec: &WaiterSpec, condition: impl FnOnce(&Queue) -> bool) -> bool {
        self.occupied.load(Ordering::SeqCst) > 0
            && self.table().of(spec.mode.kind()).get(&spec.name).is_some_and(condition)
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

/// A claim's place in the queue of its name. Dropping it leaves the queue and reports a hold as released.
#[derive(Debug)]
pub(super) struct Place {
    queues: Arc<Queues>,
    pub(super) spec: WaiterSpec,
    /// `None` while the claim is not in the queue.
    number: Option<u64>,
    /// Whether the claim holds the lock or the answer to an attempt is not known.
    pub(super) may_hold: bool,
}

impl Place {
    pub(super) fn new(queues: Arc<Queues>, spec: &ClaimSpec) -> Self {
        Self { queues, spec: spec.into(), number: None, may_hold: false }
    }

    pub(super) fn handoff(&self) -> Handoff {
        self.queues.handoff
    }

    pub(super) fn is_queued(&self) -> bool {
        self.number.is_some()
    }

    /// Returns the number of releases so far, for [`join_in_flight`](Self::join_in_flight) and
    /// [`refused`](Self::refused).
    pub(super) fn releases(&self) -> usize {
        self.queues.releases.load(Ordering::SeqCst)
    }

    /// Runs `change` on the queue of the name, if the claim is in it.
    pub(super) fn with<T: Default>(
        &self,
        change: impl FnOnce(&mut Queue, u64, &mut Wakes) -> T,
    ) -> T {
        let Some(number) = self.number else { return T::default() };
        let changed = self.queues.with(&self.spec, |queue, wakes| change(queue, number, wakes));
        changed.unwrap_or_default()
    }

    /// Runs `change` on the queue of the name, which the claim joins at the back if it is not in it.
    fn join<T>(&mut self, change: impl FnOnce(&mut Queue, u64, &mut Wakes) -> T) -> T {
        let Queues { handoff, active, occupied, .. } = &*self.queues;
        let mut wakes = Wakes::default();
        let mut table = self.queues.table();
        let queues = table.of(self.spec.mode.kind());
        let queue = queues.entry(self.spec.name.clone()).or_insert_with(|| {
            occupied.fetch_add(1, Ordering::SeqCst);
            Queue::new(*handoff, *active)
        });
        let number = *self.number.get_or_insert_with(|| queue.push(Waiter::new(&self.spec)));
        let result = change(queue, number, &mut wakes);
        drop(table);
        wakes.wake();
        result
    }

    /// Joins the queue after the attempt was sent. `releases` is the number of releases before that.
    fn join_late(&mut self, releases: usize) {
        let queues = self.queues.clone();
        self.join(|queue, number, wakes| {
            queue.begin_attempt(number);
            if queues.releases.load(Ordering::SeqCst) != releases {
                // The release did not see this waiter.
                queue.notify_front(wakes);
            }
        });
    }

    /// Decides whether the next attempt goes to the store. If not, the claim joins the queue or refreshes its place.
    pub(super) fn enter(&mut self) -> Entry {
        if self.may_hold {
            // The store may have granted an earlier attempt.
            self.begin_attempt();
            return Entry::Attempt;
        }
        let queues = &*self.queues;
        if !self.spec.queue {
            let is_waiting = |queue: &Queue| queue.waiters.values().any(|waiter| waiter.refused);
            let is_refused = queues.handoff == Handoff::Store && queues.any(&self.spec, is_waiting);
            return if is_refused { Entry::Wait(Retry::OnNotify) } else { Entry::Attempt };
        }
        let bypasses_queue = queues.handoff == Handoff::Local
            && self.number.is_none()
            && !queues.any(&self.spec, |_| true);
        if bypasses_queue { Entry::Attempt } else { self.join(Queue::enter) }
    }

    /// Records that the claim sends an attempt.
    pub(super) fn begin_attempt(&self) {
        self.with(|queue, number, _| queue.begin_attempt(number));
    }

    /// Joins the queue with an attempt in flight, if the claim is a waiter and is not in the queue.
    pub(super) fn join_in_flight(&mut self, releases: usize) {
        if self.spec.queue && self.number.is_none() {
            self.join_late(releases);
        }
    }

    /// Records that the store refused an attempt. A waiter joins the queue if it is not in it.
    pub(super) fn refused(&mut self, releases: usize) {
        if self.spec.queue {
            self.join_in_flight(releases);
            self.with(Queue::refused);
        }
    }

    /// Returns what the waiter must do now, and registers its waker for a change.
    pub(super) fn poll(&self, cx: &Context<'_>) -> Turn {
        let turn =
            |queue: &mut Queue, number, wakes: &mut Wakes| Some(queue.poll(number, cx, wakes));
        self.with(turn).unwrap_or(Turn::Listen)
    }

    /// Records that the store failed an attempt. Leaves the queue if this was the first attempt of the claim.
    pub(super) fn failed(&mut self, error: &Error) {
        let is_refused = |queue: &mut Queue, number, _: &mut Wakes| {
            // Other errors may concern this claim alone, such as a refused floor.
            if error.is_retryable() {
                queue.failed = Some((Instant::now(), error.clone()));
            }
            queue.waiters.get(&number).is_some_and(|waiter| waiter.refused)
        };
        if !self.with(is_refused) {
            self.leave(Leave::GaveUp);
        }
    }

    /// Leaves the queue, if the claim is in it.
    pub(super) fn leave(&mut self, leave: Leave) {
        self.with(|queue, number, wakes| queue.leave(number, leave, wakes));
        self.number = None;
    }

    /// Notifies the front that this claim released the lock or downgraded it, unless the store does that.
    pub(super) fn released(&self) {
        let queues = &*self.queues;
        if queues.handoff == Handoff::Local {
            queues.releases.fetch_add(1, Ordering::SeqCst);
            if queues.occupied.load(Ordering::SeqCst) > 0 {
                queues.with(&self.spec, Queue::released);
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave(Leave::GaveUp);
        if self.may_hold {
            self.released();
        }
    }
}
