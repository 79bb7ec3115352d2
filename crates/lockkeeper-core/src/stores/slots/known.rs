//! What one process knows of the slots of its semaphores.
//!
//! A hint, so that an acquire need not ask for slots that are known to be taken. Only [`Seen::Ours`] is certain: a
//! claim of this process has the slot, or has asked for it and not been answered. Everything else is asked of the
//! store before an acquire is refused.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::name::Name;

/// How many semaphores are remembered that no claim of this process uses any more, beside as many as were in use.
const MAX_IDLE: usize = 256;
/// How many slots are drawn at random before all of them are sorted.
const DRAWS: usize = 4;

/// The semaphores of a store, by name.
#[derive(Debug, Default)]
pub(super) struct Semaphores(Mutex<ByName>);

#[derive(Debug, Default)]
struct ByName {
    known: HashMap<Name, Arc<Known>>,
    /// How many were in use when the idle ones were last forgotten.
    in_use: usize,
}

impl Semaphores {
    /// Returns what is known of a semaphore.
    pub(super) fn get(&self, name: &Name) -> Arc<Known> {
        let ByName { known, in_use } = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = known.get(name) {
            return known.clone();
        }
        // Not at every new name if many are in use: each sweep then pays for as many new names as it looks at.
        if known.len() >= *in_use * 2 + MAX_IDLE {
            known.retain(|_, known| Arc::strong_count(known) > 1);
            *in_use = known.len();
        }
        known.entry(name.clone()).or_default().clone()
    }
}

/// The slots of one semaphore.
#[derive(Debug, Default)]
pub(super) struct Known {
    table: Mutex<Table>,
    /// Notified when a claim of this process has given a slot back.
    released: Notify,
}

#[derive(Debug, Default)]
struct Table {
    /// Slots behind the end have not been seen.
    slots: Vec<Seen>,
    /// The slot that was given back last.
    last_free: Option<u32>,
    /// Counts refusals, to ask first for the slot whose refusal is oldest.
    refusals: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Seen {
    #[default]
    Unseen,
    /// A claim of this process has it, or may have it.
    Ours,
    /// A claim of this process gave it back.
    Free,
    /// The store refused it.
    Taken { refusal: u64 },
}

impl Table {
    fn at(&self, slot: u32) -> Seen {
        self.slots.get(slot as usize).copied().unwrap_or_default()
    }

    fn set(&mut self, slot: u32, seen: Seen) {
        let slot = slot as usize;
        if self.slots.len() <= slot {
            self.slots.resize(slot + 1, Seen::Unseen);
        }
        self.slots[slot] = seen;
    }

    /// All slots that this process does not have, the most promising last.
    fn sorted(&self, of: u32) -> Vec<u32> {
        let mut slots: Vec<_> = (0..of)
            .filter_map(|slot| match self.at(slot) {
                Seen::Ours => None,
                Seen::Free => Some((0, fastrand::u64(..), slot)),
                Seen::Unseen => Some((1, fastrand::u64(..), slot)),
                Seen::Taken { refusal } => Some((2, refusal, slot)),
            })
            .collect();
        slots.sort_unstable_by(|a, b| b.cmp(a));
        slots.into_iter().map(|(_, _, slot)| slot).collect()
    }
}

impl Known {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a claim of this process gives a slot back.
    pub(super) async fn released(&self) {
        self.released.notified().await;
    }

    /// Marks a slot as used by this process.
    pub(super) fn mark(self: &Arc<Self>, slot: u32) -> Mark {
        self.table().set(slot, Seen::Ours);
        Mark { known: self.clone(), slot, refused: false }
    }

    /// Marks the most promising `count` of `of` slots, without those that this process has. Slots that were given
    /// back here come first, then those never seen, then those refused, the oldest refusal first.
    pub(super) fn choose(self: &Arc<Self>, count: usize, of: u32, order: &mut Order) -> Vec<Mark> {
        let mut table = self.table();
        let mut chosen = Vec::new();
        let mut choose = |table: &mut Table, order: &mut Order, slot: u32| {
            if slot < of && table.at(slot) != Seen::Ours && order.seen.insert(slot) {
                table.set(slot, Seen::Ours);
                chosen.push(Mark { known: self.clone(), slot, refused: false });
            }
            chosen.len() == count
        };
        if order.rest.is_none() {
            // Nearly always one of these is free, and the rest need not be sorted.
            let last = table.last_free.take();
            let drawn = (0..DRAWS).map(|_| fastrand::u32(..of.max(1)));
            for slot in last.into_iter().chain(drawn) {
                let promising = matches!(table.at(slot), Seen::Unseen | Seen::Free);
                if promising && choose(&mut table, order, slot) {
                    return chosen;
                }
            }
        }
        let mut rest = order.rest.take().unwrap_or_else(|| table.sorted(of));
        while let Some(slot) = rest.pop() {
            if choose(&mut table, order, slot) {
                break;
            }
        }
        order.rest = Some(rest);
        chosen
    }
}

/// The slots that one attempt has asked for, and those that it has yet to ask for.
#[derive(Debug, Default)]
pub(super) struct Order {
    pub(super) seen: BTreeSet<u32>,
    /// The most promising last. Sorted once per attempt, and only if the first guesses failed.
    rest: Option<Vec<u32>>,
}

/// A slot that this process has or may have, until this is dropped.
#[derive(Debug)]
pub(super) struct Mark {
    known: Arc<Known>,
    pub(super) slot: u32,
    refused: bool,
}

impl Mark {
    /// The store has answered that others hold the slot.
    pub(super) fn refused(mut self) {
        self.refused = true;
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let mut table = self.known.table();
        if self.refused {
            table.refusals += 1;
            let refusal = table.refusals;
            table.set(self.slot, Seen::Taken { refusal });
            return;
        }
        table.set(self.slot, Seen::Free);
        table.last_free = Some(self.slot);
        drop(table);
        self.known.released.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: usize) -> Name {
        Name::new(format!("{number}")).expect("is a name")
    }

    fn len(semaphores: &Semaphores) -> usize {
        semaphores.0.lock().unwrap_or_else(PoisonError::into_inner).known.len()
    }

    #[test]
    fn idle_semaphores_are_forgotten_and_those_in_use_are_not() {
        let semaphores = Semaphores::default();
        for number in 0..10 * MAX_IDLE {
            semaphores.get(&name(number));
            assert!(len(&semaphores) <= MAX_IDLE);
        }
        let used: Vec<_> = (0..1000).map(|number| semaphores.get(&name(number))).collect();
        for number in 1000..10_000 {
            semaphores.get(&name(number));
            assert!(len(&semaphores) <= 3 * used.len() + MAX_IDLE);
        }
        for (number, known) in used.iter().enumerate() {
            assert!(Arc::ptr_eq(known, &semaphores.get(&name(number))));
        }
        drop(used);
        for number in 10_000..20_000 {
            semaphores.get(&name(number));
        }
        assert!(len(&semaphores) <= MAX_IDLE);
    }

    #[test]
    fn the_table_of_semaphores_in_use_is_seldom_swept() {
        let semaphores = Semaphores::default();
        let mut sweeps = Vec::new();
        let used: Vec<_> = (0..20_000)
            .map(|number| {
                let known = semaphores.get(&name(number));
                sweeps.push(semaphores.0.lock().unwrap_or_else(PoisonError::into_inner).in_use);
                known
            })
            .collect();
        sweeps.dedup();
        assert!(sweeps.len() < 10, "{} sweeps for {} names", sweeps.len(), used.len());
    }
}
