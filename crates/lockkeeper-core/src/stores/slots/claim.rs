//! A claim for permits, made of claims for slots.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use super::known::{Candidates, KnownSlots, Reservation};
use super::{gate_name, slot_name, turn_name};
use crate::backoff::Backoff;
use crate::contract::{
    Attempt, Backend, BoxFuture, Change, Claim, ClaimSpec, Grant, Holder, Mode, Release, Renewal,
    Retry,
};
use crate::error::{Error, Result};
use crate::fence::Fence;
use crate::futures::{at_once, boxed, first, join_all};
use crate::loss::LossReason;
use crate::name::Name;

/// The longest pause between polls of the waiter at the gate, on a store that does not notify.
const MAX_POLL: Duration = Duration::from_millis(250);

/// The maximum number of slots in one batch, beyond those that the claim needs.
const MAX_BATCH: usize = 64;

pub(super) struct SlotsClaim {
    parts: Parts,
    known: Arc<KnownSlots>,
    /// `None` for a try.
    gate: Option<Box<dyn Claim>>,
    at_gate: bool,
    /// Created for a try that got some of its slots and not all, perhaps because of another such try. It tries again
    /// while it holds this lock.
    turn: Option<Box<dyn Claim>>,
    /// The slots that the claim holds or may hold and, while it waits at the gate, those whose changes it awaits.
    slots: BTreeMap<u32, Slot>,
    take: usize,
    of: u32,
    /// The maximum size of a batch. 0 while the store answers without waiting for I/O, so that batches save no time.
    max_batch: usize,
    /// No request was sent yet: only the store knows which slots the owner holds.
    fresh: bool,
    granted: bool,
    polls: Backoff,
}

/// Creates the claims that a claim for permits consists of.
struct Parts {
    inner: Arc<dyn Backend>,
    spec: ClaimSpec,
}

impl Parts {
    fn claim(&self, name: Name, queue: bool) -> Result<Box<dyn Claim>> {
        // No fence of a ticket: a ticket has the highest fence of all slots, and each slot has its own.
        let spec =
            ClaimSpec { ticket: None, name, mode: Mode::Exclusive, queue, ..self.spec.clone() };
        self.inner.claim(spec)
    }
}

struct Slot {
    claim: Box<dyn Claim>,
    /// Set if the store granted the slot, or may have granted it.
    reserved: Option<Reservation>,
    /// The grant, if the store answered with one.
    grant: Option<Grant>,
}

/// The combined answers to attempts for slots.
#[derive(Default)]
struct Answers {
    granted: usize,
    refused: usize,
    /// When to repeat the attempt.
    retry: Retry,
    /// Whether the store could not decide on a slot.
    undecided: bool,
}

impl SlotsClaim {
    pub(super) fn new(
        inner: Arc<dyn Backend>,
        spec: ClaimSpec,
        known: Arc<KnownSlots>,
        take: usize,
        of: u32,
    ) -> Result<Self> {
        let parts = Parts { inner, spec };
        let (name, queue) = (&parts.spec.name, parts.spec.queue);
        let gate = queue.then(|| parts.claim(gate_name(name), true)).transpose()?;
        Ok(Self {
            parts,
            known,
            gate,
            at_gate: false,
            turn: None,
            slots: BTreeMap::new(),
            take,
            of,
            max_batch: 0,
            fresh: true,
            granted: false,
            polls: Backoff::new(Duration::from_millis(5), MAX_POLL),
        })
    }

    fn held(&self) -> usize {
        self.slots.values().filter(|slot| slot.grant.is_some()).count()
    }

    /// Returns a slot, and creates its claim if necessary.
    fn slot(&mut self, number: u32) -> Result<&mut Slot> {
        match self.slots.entry(number) {
            Entry::Occupied(slot) => Ok(slot.into_mut()),
            Entry::Vacant(vacant) => {
                let name = slot_name(&self.parts.spec.name, number);
                let claim = self.parts.claim(name, false)?;
                Ok(vacant.insert(Slot { claim, reserved: None, grant: None }))
            }
        }
    }

    /// Creates the claims of all slots: only the store knows which of them the owner holds.
    fn create_all_slots(&mut self) -> Result<()> {
        (0..self.of).try_for_each(|number| self.slot(number).map(drop))
    }

    async fn acquire(&mut self, floor: Option<Fence>) -> Result<Attempt> {
        self.fresh = false;
        if let Some(gate) = &mut self.gate
            && !self.granted
        {
            match gate.attempt(None).await? {
                Attempt::Granted(_) => self.at_gate = true,
                refused @ (Attempt::Contended { .. } | Attempt::Undecided) => {
                    self.at_gate = false;
                    // A claim that kept slots without the gate would deadlock with the one that holds the gate.
                    self.release_slots(|slot| slot.reserved.is_some()).await?;
                    return Ok(refused);
                }
            }
        }
        if let Some(turn) = &mut self.turn
            && !self.granted
            && !matches!(turn.attempt(None).await?, Attempt::Granted(_))
        {
            return Ok(Attempt::Undecided);
        }
        let answers = self.acquire_slots(floor).await?;
        if self.held() < self.take {
            return self.refused(&answers).await;
        }
        // Releases surplus slots: those whose answer was lost, and those of a batch that was larger than necessary.
        let (mut kept, take) = (0, self.take);
        let surplus = |slot: &Slot| {
            kept += usize::from(slot.grant.is_some());
            slot.reserved.is_some() && (slot.grant.is_none() || kept > take)
        };
        self.release_slots(surplus).await?;
        self.granted = true;
        if let Some(gate) = &mut self.gate
            && self.at_gate
        {
            gate.release().await?;
            self.at_gate = false;
        }
        self.end_turn().await?;
        let grants = || self.slots.values().filter_map(|slot| slot.grant);
        let fence = grants().filter_map(|grant| grant.fence).max();
        let valid_for = grants().filter_map(|grant| grant.valid_for).min();
        Ok(Attempt::Granted(Grant { fence, fence_is_past: false, valid_for }))
    }

    /// Returns the answer to an attempt that did not get enough slots.
    async fn refused(&mut self, answers: &Answers) -> Result<Attempt> {
        self.granted = false;
        let mut undecided = answers.undecided;
        if self.gate.is_none() {
            let some = self.held() > 0;
            self.release_slots(|slot| slot.reserved.is_some()).await?;
            if self.turn.is_some() {
                self.end_turn().await?;
            } else if some {
                self.turn = Some(self.parts.claim(turn_name(&self.parts.spec.name), false)?);
                undecided = true;
            }
        }
        if undecided {
            return Ok(Attempt::Undecided);
        }
        let retry = answers.retry.sooner(Retry::After(self.polls.next()));
        Ok(Attempt::Contended { retry, holder: Holder::Unknown })
    }

    /// Attempts slots until enough are granted, starting with those that the claim may hold already.
    async fn acquire_slots(&mut self, floor: Option<Fence>) -> Result<Answers> {
        let reserved = self.slots.iter().filter(|(_, slot)| slot.reserved.is_some());
        let mut own: Vec<u32> = reserved.map(|(number, _)| *number).collect();
        let mut candidates = Candidates::default();
        candidates.tried.extend(&own);
        let mut answers = Answers::default();
        while answers.granted < self.take {
            let missing = self.take - answers.granted;
            if !own.is_empty() {
                let rest = own.split_off(missing.min(own.len()));
                self.attempt_slots(&own, floor, &mut answers).await?;
                own = rest;
                continue;
            }
            let mut batch = missing;
            if self.at_gate {
                // The more slots were refused, the fewer are free, so a larger batch rarely gets more than are missing.
                // Not for tries: two tries that each got one slot too many could refuse each other.
                batch = batch.max((answers.refused / 2).min(self.max_batch));
            }
            let reservations = self.known.reserve(batch, self.of, &mut candidates);
            if reservations.is_empty() {
                break;
            }
            let numbers: Vec<u32> = reservations.iter().map(|reserved| reserved.slot).collect();
            for reserved in reservations {
                let slot = self.slot(reserved.slot)?;
                slot.reserved = Some(reserved);
            }
            self.attempt_slots(&numbers, floor, &mut answers).await?;
        }
        Ok(answers)
    }

    /// Attempts some slots concurrently.
    async fn attempt_slots(
        &mut self,
        numbers: &[u32],
        floor: Option<Fence>,
        answers: &mut Answers,
    ) -> Result<()> {
        let mut slots: Vec<&mut Slot> = if let [one] = numbers {
            self.slots.get_mut(one).into_iter().collect()
        } else {
            let named = self.slots.iter_mut().filter(|(number, _)| numbers.contains(number));
            named.map(|(_, slot)| slot).collect()
        };
        let all = {
            let attempts = slots.iter_mut().map(|slot| slot.claim.attempt(floor)).collect();
            let mut attempts = boxed(join_all(attempts));
            if let Some(all) = at_once(&mut attempts).await {
                all
            } else {
                self.max_batch = MAX_BATCH;
                attempts.await
            }
        };
        let mut failed = None;
        for (slot, answer) in slots.into_iter().zip(all) {
            match answer {
                Ok(Attempt::Granted(grant)) => {
                    slot.grant = Some(grant);
                    answers.granted += 1;
                }
                Ok(Attempt::Contended { retry, .. }) => {
                    slot.grant = None;
                    if let Some(reserved) = slot.reserved.take() {
                        reserved.refused();
                    }
                    answers.refused += 1;
                    answers.retry = answers.retry.sooner(retry);
                }
                Ok(Attempt::Undecided) => {
                    (slot.reserved, slot.grant) = (None, None);
                    answers.undecided = true;
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if !self.at_gate {
            // Only a waiting claim listens to refused slots.
            for number in numbers {
                if self.slots.get(number).is_some_and(|slot| slot.reserved.is_none()) {
                    self.slots.remove(number);
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Releases the turn. Called when this try has all of its slots, or none.
    async fn end_turn(&mut self) -> Result<()> {
        if let Some(turn) = &mut self.turn {
            turn.release().await?;
            self.turn = None;
        }
        Ok(())
    }

    /// Drops the claims of slots that are not reserved: each may keep a file or a connection.
    fn drop_unreserved(&mut self) {
        self.slots.retain(|_, slot| slot.reserved.is_some());
    }

    /// Releases some slots, and returns how many of them were held. Drops the claims of all that are not reserved.
    async fn release_slots(&mut self, mut which: impl FnMut(&Slot) -> bool) -> Result<usize> {
        let slots = self.slots.values_mut().filter(|slot| which(slot));
        let releases = slots.map(|slot| {
            boxed(async {
                let release = slot.claim.release().await?;
                (slot.reserved, slot.grant) = (None, None);
                Ok(release == Release::Released)
            })
        });
        let mut freed = 0;
        for release in join_all(releases.collect()).await {
            freed += usize::from(release?);
        }
        self.drop_unreserved();
        Ok(freed)
    }

    /// Finds the slots that the owner holds in the store, and renews them.
    async fn renew_adopted(&mut self, ttl: Duration) -> Result<Renewal> {
        self.create_all_slots()?;
        let all = self.slots.values_mut().map(|slot| slot.claim.renew(ttl)).collect();
        let renewals = join_all(all).await.into_iter().collect::<Result<Vec<_>>>()?;
        for ((number, slot), renewal) in self.slots.iter_mut().zip(renewals) {
            let valid_for = match renewal {
                Renewal::Renewed { valid_for } => Some(valid_for),
                Renewal::Held => None,
                Renewal::Lost(_) => continue,
            };
            slot.reserved = Some(self.known.reserve_slot(*number));
            slot.grant = Some(Grant { fence: None, fence_is_past: false, valid_for });
        }
        self.drop_unreserved();
        self.granted = self.held() >= self.take;
        let valid = self.slots.values().filter_map(|slot| slot.grant?.valid_for).min();
        Ok(match valid {
            _ if !self.granted => Renewal::Lost(LossReason::Broken),
            Some(valid_for) => Renewal::Renewed { valid_for },
            None => Renewal::Held,
        })
    }
}

impl Claim for SlotsClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        Box::pin(self.acquire(floor))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(async move {
            let granted = self.granted;
            let changes: Vec<BoxFuture<'_, Change>> = match &mut self.gate {
                // Behind the gate, changes of slots do not matter.
                Some(gate) if !self.at_gate && !granted => vec![gate.changed()],
                _ => {
                    let slots = self.slots.values_mut();
                    let slots = slots.filter(|slot| slot.grant.is_some() == granted);
                    let mut changes: Vec<_> = slots.map(|slot| slot.claim.changed()).collect();
                    if self.at_gate && !granted {
                        // Slots of this process were not attempted, so the store does not notify of them. Each release
                        // here wakes one claim: the one at the gate, and not a try, which retries anyway.
                        changes.push(Box::pin(async {
                            self.known.released().await;
                            Change::LookAgain
                        }));
                    }
                    changes
                }
            };
            match first(changes).await {
                Change::Lost(reason) if granted => Change::Lost(reason),
                Change::Lost(_) | Change::LookAgain | Change::Granted(_) => Change::LookAgain,
            }
        })
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(async move {
            if self.held() == 0 {
                return self.renew_adopted(ttl).await;
            }
            let held = self.slots.values_mut().filter(|slot| slot.grant.is_some());
            let renewals = join_all(held.map(|slot| slot.claim.renew(ttl)).collect()).await;
            let mut result = Renewal::Held;
            for renewal in renewals {
                result = match (result, renewal?) {
                    (lost @ Renewal::Lost(_), _) | (_, lost @ Renewal::Lost(_)) => lost,
                    (Renewal::Renewed { valid_for: a }, Renewal::Renewed { valid_for: b }) => {
                        Renewal::Renewed { valid_for: a.min(b) }
                    }
                    (renewed @ Renewal::Renewed { .. }, _) | (_, renewed) => renewed,
                };
            }
            Ok(result)
        })
    }

    fn downgrade(&mut self, _ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(async { Err(Error::unsupported("downgrades of permits")) })
    }

    // Each slot has a fence of its own.
    fn set_fence(&mut self, _fence: Fence) {}

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        Box::pin(async move {
            let fresh = self.fresh;
            if fresh {
                self.create_all_slots()?;
            }
            let freed = self.release_slots(|slot| fresh || slot.reserved.is_some()).await?;
            if let Some(gate) = &mut self.gate {
                gate.release().await?;
                self.at_gate = false;
            }
            self.end_turn().await?;
            let held = (self.granted || fresh) && freed >= self.take;
            self.granted = false;
            Ok(if held { Release::Released } else { Release::WasNotHeld })
        })
    }
}
