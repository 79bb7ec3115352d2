//! The states of the slots of a process's semaphores, as far as they are known.
//!
//! It lets an acquire skip slots that are known to be held. Only [`SlotState::Reserved`] is certain: a claim of this process
//! holds the slot, or has a request for it in flight. All other slots are attempted before an acquire is refused.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::name::Name;

/// How many semaphores that no claim uses are kept, in addition to as many as were in use at the last sweep.
const MAX_IDLE: usize = 256;
/// How many slots are drawn at random before all slots are sorted.
const DRAWS: usize = 4;

/// The semaphores of a store, by name.
#[derive(Debug, Default)]
pub(super) struct Semaphores(Mutex<ByName>);

#[derive(Debug, Default)]
struct ByName {
    known: HashMap<Name, Arc<KnownSlots>>,
    /// How many were in use at the last sweep.
    in_use: usize,
}

impl Semaphores {
    /// Returns the slots of a semaphore.
    pub(super) fn get(&self, name: &Name) -> Arc<KnownSlots> {
        let ByName { known, in_use } = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = known.get(name) {
            return known.clone();
        }
        // The limit grows with the number in use, so that the cost of a sweep is spread over as many new names.
        if known.len() >= *in_use * 2 + MAX_IDLE {
            known.retain(|_, known| Arc::strong_count(known) > 1);
            *in_use = known.len();
        }
        known.entry(name.clone()).or_default().clone()
    }
}

/// The slots of one semaphore.
#[derive(Debug, Default)]
pub(super) struct KnownSlots {
    table: Mutex<Table>,
    /// Notified when a claim of this process has released a slot.
    released: Notify,
}

#[derive(Debug, Default)]
struct Table {
    /// Slots past the end are `Unknown`.
    slots: Vec<SlotState>,
    /// The slot that was released last.
    last_free: Option<u32>,
    /// Counts refusals, so that the slot with the oldest refusal is tried first.
    refusals: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum SlotState {
    #[default]
    Unknown,
    /// A claim of this process holds it, or may hold it.
    Reserved,
    /// A claim of this process released it.
    Free,
    /// The store refused it.
    Refused { refusal: u64 },
}

impl Table {
    fn at(&self, slot: u32) -> SlotState {
        self.slots.get(slot as usize).copied().unwrap_or_default()
    }

    fn set(&mut self, slot: u32, state: SlotState) {
        let slot = slot as usize;
        if self.slots.len() <= slot {
            self.slots.resize(slot + 1, SlotState::Unknown);
        }
        self.slots[slot] = state;
    }

    /// Returns all slots that this process has not reserved, the most promising last.
    fn sorted(&self, of: u32) -> Vec<u32> {
        let mut slots: Vec<_> = (0..of)
            .filter_map(|slot| match self.at(slot) {
                SlotState::Reserved => None,
                SlotState::Free => Some((0, fastrand::u64(..), slot)),
                SlotState::Unknown => Some((1, fastrand::u64(..), slot)),
                SlotState::Refused { refusal } => Some((2, refusal, slot)),
            })
            .collect();
        slots.sort_unstable_by(|a, b| b.cmp(a));
        slots.into_iter().map(|(_, _, slot)| slot).collect()
    }
}

impl KnownSlots {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a claim of this process releases a slot.
    pub(super) async fn released(&self) {
        self.released.notified().await;
    }

    /// Reserves one slot.
    pub(super) fn reserve_slot(self: &Arc<Self>, slot: u32) -> Reservation {
        self.table().set(slot, SlotState::Reserved);
        Reservation { known: self.clone(), slot, refused: false }
    }

    /// Reserves the `count` most promising of `of` slots that are neither reserved nor tried: first slots that were
    /// released here, then unknown ones, then refused ones, the oldest refusal first.
    pub(super) fn reserve(
        self: &Arc<Self>,
        count: usize,
        of: u32,
        candidates: &mut Candidates,
    ) -> Vec<Reservation> {
        let mut table = self.table();
        let mut reserved = Vec::new();
        let mut reserve = |table: &mut Table, candidates: &mut Candidates, slot: u32| {
            if slot < of && table.at(slot) != SlotState::Reserved && candidates.tried.insert(slot) {
                table.set(slot, SlotState::Reserved);
                reserved.push(Reservation { known: self.clone(), slot, refused: false });
            }
            reserved.len() == count
        };
        if candidates.rest.is_none() {
            // One of these is nearly always free, so that sorting is not necessary.
            let last = table.last_free.take();
            let drawn = (0..DRAWS).map(|_| fastrand::u32(..of.max(1)));
            for slot in last.into_iter().chain(drawn) {
                let promising = matches!(table.at(slot), SlotState::Unknown | SlotState::Free);
                if promising && reserve(&mut table, candidates, slot) {
                    return reserved;
                }
            }
        }
        let mut rest = candidates.rest.take().unwrap_or_else(|| table.sorted(of));
        while let Some(slot) = rest.pop() {
            if reserve(&mut table, candidates, slot) {
                break;
            }
        }
        candidates.rest = Some(rest);
        reserved
    }
}

/// The slots that one attempt has tried, and those that it has yet to try.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    pub(super) tried: BTreeSet<u32>,
    /// The most promising last. Sorted once per attempt, and only if the slots drawn at random failed.
    rest: Option<Vec<u32>>,
}

/// A slot that this process holds or may hold, until this is dropped.
#[derive(Debug)]
pub(super) struct Reservation {
    known: Arc<KnownSlots>,
    pub(super) slot: u32,
    refused: bool,
}

impl Reservation {
    /// Ends the reservation because the store reported another holder.
    pub(super) fn refused(mut self) {
        self.refused = true;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut table = self.known.table();
        if self.refused {
            table.refusals += 1;
            let refusal = table.refusals;
            table.set(self.slot, SlotState::Refused { refusal });
            return;
        }
        table.set(self.slot, SlotState::Free);
        table.last_free = Some(self.slot);
        drop(table);
        self.known.released.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: usize) -> Name {
        Name::new(format!("{number}")).expect("the name is valid")
    }

    fn len(semaphores: &Semaphores) -> usize {
        semaphores.0.lock().unwrap_or_else(PoisonError::into_inner).known.len()
    }

    #[test]
    fn idle_semaphores_are_removed_and_those_in_use_are_kept() {
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
    fn sweeps_are_rare_while_many_semaphores_are_in_use() {
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
