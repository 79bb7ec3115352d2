//! Semaphores made of exclusive locks.

mod inspect;
mod known;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use self::known::{Known, Mark, Order, Semaphores};

use crate::backoff::Backoff;
use crate::contract::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Grant, Holder, Inspector,
    Mode, Release, Renewal, Retry,
};
use crate::error::{Error, Result};
use crate::fence::Fence;
use crate::futures::{first, join_all};
use crate::loss::LossReason;
use crate::name::Name;
use crate::options::invalid;

/// The most permits of a semaphore made of slots: each is a lock, and a claim knows them all.
const MAX_SLOTS: u32 = 1024;

/// How often whoever is next looks whether a permit has become free, on a store that does not tell.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The most slots that a claim asks for at the same time beyond those that it needs.
const MAX_BATCH: usize = 64;

/// A store whose semaphores are made of its exclusive locks: one lock for each permit, a *slot*, and
/// one for the queue, the *gate*.
///
/// For stores that have no counting of their own. Whoever waits for a permit first takes the gate, in
/// the order of the store's queue, and keeps it until he has his slots: so only one looks for free
/// slots, and the rest wait as they wait for any lock.
///
/// Mutexes and readers-writer locks pass through unchanged.
///
/// A claim makes the locks of its own slots only. Which slots to ask for it takes from what this process knows: it does
/// not ask for those that the process has itself, and asks last for those that the store refused before. So the number of
/// questions per permit does not grow with the permits that the process holds. A process that knows nothing yet draws
/// slots at random: where others hold all but one of 1,024, it asks for half of them until it finds that one. A try
/// is refused only after the store has refused every slot that the process does not have.
///
/// # Where it differs from a store that counts
///
/// - A try does not touch the gate: it may take a slot that somebody at the gate was about to find. (If
///   it did, two tries at the same moment would refuse each other though there is room for both.)
/// - Two tries for several permits at the same moment can each get some of them and neither all. Such a try gives its slots
///   back and asks once more, under a lock of its own, the *turn*, so that these tries come one after the other. While
///   another try has the turn, the engine asks again, for at most two seconds, and then answers
///   [`ErrorKind::Undecided`](crate::ErrorKind::Undecided): a process that died with the turn keeps it for its ttl.
/// - Clients that disagree about the number of permits use different numbers of slots: all in use
///   together stay within the largest number, not the smallest.
/// - At most 1024 permits; more are an [`InvalidOption`](crate::ErrorKind::InvalidOption).
#[derive(Debug, Clone)]
pub struct Slots {
    inner: Arc<dyn Backend>,
    semaphores: Arc<Semaphores>,
}

impl Slots {
    /// The store, with semaphores.
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self { inner, semaphores: Arc::default() }
    }

    /// The names of all locks that a semaphore may be made of: for a store that can look a name up and
    /// cannot list them.
    pub fn parts(semaphore: &str) -> impl Iterator<Item = Name> + '_ {
        let slots = (0..MAX_SLOTS).map(move |slot| slot_name(semaphore, slot));
        std::iter::once(gate_name(semaphore)).chain(slots)
    }

    fn look(&self) -> Result<&dyn Inspector> {
        self.inner.inspector().ok_or_else(|| Error::unsupported("way to be looked into"))
    }
}

/// NUL keeps these names apart from every user's.
fn gate_name(name: &str) -> Name {
    Name::derived(format!("{name}\0gate"))
}

fn turn_name(name: &str) -> Name {
    Name::derived(format!("{name}\0turn"))
}

fn slot_name(name: &str, slot: u32) -> Name {
    Name::derived(format!("{name}\0slot\0{slot}"))
}

impl Backend for Slots {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { permits: true, ..self.inner.capabilities() }
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        let Mode::Permits { take, of } = spec.mode else { return self.inner.claim(spec) };
        let parts = Parts { inner: self.inner.clone(), spec };
        let name = &parts.spec.name;
        let gate = parts.spec.queue.then(|| parts.claim(gate_name(name), true)).transpose()?;
        if of > MAX_SLOTS {
            let message = format!("a semaphore of this store has at most {MAX_SLOTS} permits");
            return Err(invalid(message));
        }
        let known = self.semaphores.get(name);
        let pauses = Backoff::new(Duration::from_millis(5), LOOK_EVERY);
        let take = take as usize;
        Ok(Box::new(SlotsClaim {
            parts,
            known,
            gate,
            at_gate: false,
            turn: None,
            slots: BTreeMap::new(),
            take,
            of,
            latency: Latency::None,
            fresh: true,
            granted: false,
            pauses,
        }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.inner.inspector().map(|_| self as _)
    }
}

/// Makes the claims that a claim for permits consists of.
struct Parts {
    inner: Arc<dyn Backend>,
    spec: ClaimSpec,
}

impl Parts {
    fn claim(&self, name: Name, queue: bool) -> Result<Box<dyn Claim>> {
        let mut part = self.spec.clone();
        // Each slot has a fence of its own, and a ticket the highest of them.
        part.ticket = None;
        (part.name, part.mode, part.queue) = (name, Mode::Exclusive, queue);
        self.inner.claim(part)
    }

    fn slot(&self, slot: u32) -> Result<Slot> {
        let claim = self.claim(slot_name(&self.spec.name, slot), false)?;
        Ok(Slot { claim, asked: None, grant: None })
    }
}

struct SlotsClaim {
    parts: Parts,
    known: Arc<Known>,
    /// `None` if this claim does not wait.
    gate: Option<Box<dyn Claim>>,
    at_gate: bool,
    /// Made for a try that got some of its slots and not all: what refused it may be another try that did not get all
    /// of its slots either. It asks again while it holds this lock.
    turn: Option<Box<dyn Claim>>,
    /// The slots in use: those that the claim holds or may hold and, while it waits at the gate, those that it
    /// listens to.
    slots: BTreeMap<u32, Slot>,
    take: usize,
    of: u32,
    latency: Latency,
    /// Nothing has been asked yet: which slots its owner has is known to the store only.
    fresh: bool,
    granted: bool,
    pauses: Backoff,
}

/// Whether the store answers at once. If not, questions are worth sending together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Latency {
    None,
    Some,
}

struct Slot {
    claim: Box<dyn Claim>,
    /// The store may have given this one: it did, or its answer is not known.
    asked: Option<Mark>,
    /// What the store gave for this one, if it did.
    grant: Option<Grant>,
}

/// The answers to one or several rounds of questions.
#[derive(Default)]
struct Answers {
    granted: usize,
    refused: usize,
    /// When it may be worth asking again.
    retry: Retry,
    /// Whether the store could not decide on a slot.
    undecided: bool,
}

impl SlotsClaim {
    fn held(&self) -> usize {
        self.slots.values().filter(|slot| slot.grant.is_some()).count()
    }

    async fn ask(&mut self, floor: Option<Fence>) -> Result<Attempt> {
        self.fresh = false;
        if let Some(gate) = &mut self.gate
            && !self.granted
        {
            match gate.attempt(None).await? {
                Attempt::Granted(_) => self.at_gate = true,
                refused @ (Attempt::Contended { .. } | Attempt::Undecided) => {
                    self.at_gate = false;
                    // Slots without the gate would deadlock with whoever has the gate.
                    self.give_back(|slot| slot.asked.is_some()).await?;
                    self.forget_others();
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
        let answers = self.take_slots(floor).await?;
        if self.held() < self.take {
            return self.refused(&answers).await;
        }
        // A slot whose answer was lost may be one too many, as may be one that was asked for together with others.
        let (mut kept, take) = (0, self.take);
        let unneeded = |slot: &Slot| {
            kept += usize::from(slot.grant.is_some());
            slot.asked.is_some() && (slot.grant.is_none() || kept > take)
        };
        self.give_back(unneeded).await?;
        self.forget_others();
        self.granted = true;
        self.leave_gate().await?;
        self.end_turn().await?;
        let grants = || self.slots.values().filter_map(|slot| slot.grant);
        let fence = grants().filter_map(|grant| grant.fence).max();
        let valid_for = grants().filter_map(|grant| grant.valid_for).min();
        Ok(Attempt::Granted(Grant { fence, valid_for }))
    }

    /// Answers an attempt that did not get enough slots.
    async fn refused(&mut self, answers: &Answers) -> Result<Attempt> {
        self.granted = false;
        let mut undecided = answers.undecided;
        if self.gate.is_none() {
            let some = self.held() > 0;
            self.give_back(|slot| slot.asked.is_some()).await?;
            self.forget_others();
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
        let look = self.pauses.next();
        let retry = answers.retry.sooner(Retry::After(look));
        Ok(Attempt::Contended { retry, holder: Holder::Unknown })
    }

    /// Asks for slots until there are enough: first for those that were held, to keep them.
    async fn take_slots(&mut self, floor: Option<Fence>) -> Result<Answers> {
        let asked = self.slots.iter().filter(|(_, slot)| slot.asked.is_some());
        let mut own: Vec<u32> = asked.map(|(number, _)| *number).collect();
        let mut order = Order::default();
        order.seen.extend(&own);
        let mut answers = Answers::default();
        while answers.granted < self.take {
            let missing = self.take - answers.granted;
            if !own.is_empty() {
                let rest = own.split_off(missing.min(own.len()));
                self.ask_slots(&own, floor, &mut answers).await?;
                own = rest;
                continue;
            }
            let mut batch = missing;
            if self.latency == Latency::Some && self.at_gate {
                // The more were refused, the fewer are free: asked for together, hardly more are granted than are
                // missing. Only at the gate, though. Two tries that each took one too many could refuse each other.
                batch = batch.max((answers.refused / 2).min(MAX_BATCH));
            }
            let marks = self.known.choose(batch, self.of, &mut order);
            if marks.is_empty() {
                break;
            }
            let numbers: Vec<u32> = marks.iter().map(|mark| mark.slot).collect();
            for mark in marks {
                let slot = match self.slots.entry(mark.slot) {
                    Entry::Occupied(slot) => slot.into_mut(),
                    Entry::Vacant(none) => none.insert(self.parts.slot(mark.slot)?),
                };
                slot.asked = Some(mark);
            }
            self.ask_slots(&numbers, floor, &mut answers).await?;
        }
        Ok(answers)
    }

    /// Asks for some slots at the same time.
    async fn ask_slots(
        &mut self,
        numbers: &[u32],
        floor: Option<Fence>,
        answers: &mut Answers,
    ) -> Result<()> {
        let mut slots: Vec<&mut Slot> = if let [one] = numbers {
            self.slots.get_mut(one).into_iter().collect()
        } else {
            let asked = self.slots.iter_mut().filter(|(number, _)| numbers.contains(number));
            asked.map(|(_, slot)| slot).collect()
        };
        let mut polls = 0;
        let all = {
            let questions = slots.iter_mut().map(|slot| slot.claim.attempt(floor)).collect();
            let mut answered = pin!(join_all(questions));
            poll_fn(|cx| {
                polls += 1;
                answered.as_mut().poll(cx)
            })
            .await
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
                    if let Some(mark) = slot.asked.take() {
                        mark.refused();
                    }
                    answers.refused += 1;
                    answers.retry = answers.retry.sooner(retry);
                }
                Ok(Attempt::Undecided) => {
                    (slot.asked, slot.grant) = (None, None);
                    answers.undecided = true;
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if polls > 1 {
            self.latency = Latency::Some;
        }
        if !self.at_gate {
            // It does not wait, and has no use for the others any more.
            for number in numbers {
                if self.slots.get(number).is_some_and(|slot| slot.asked.is_none()) {
                    self.slots.remove(number);
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }

    async fn leave_gate(&mut self) -> Result<()> {
        if let Some(gate) = &mut self.gate
            && self.at_gate
        {
            gate.release().await?;
            self.at_gate = false;
        }
        Ok(())
    }

    /// Lets the next try have its turn. To be called when this one has all of its slots, or none.
    async fn end_turn(&mut self) -> Result<()> {
        if let Some(turn) = &mut self.turn {
            turn.release().await?;
            self.turn = None;
        }
        Ok(())
    }

    /// Drops the claims of slots that were refused: each may keep a file or a connection.
    fn forget_others(&mut self) {
        self.slots.retain(|_, slot| slot.asked.is_some());
    }

    /// Makes claims for all slots: which of them this owner has is known to the store only.
    fn all_slots(&mut self) -> Result<()> {
        for number in 0..self.of {
            if let Entry::Vacant(none) = self.slots.entry(number) {
                none.insert(self.parts.slot(number)?);
            }
        }
        Ok(())
    }

    /// Gives some slots back.
    async fn give_back(&mut self, mut which: impl FnMut(&Slot) -> bool) -> Result<usize> {
        let slots = self.slots.values_mut().filter(|slot| which(slot));
        let releases = slots.map(|slot| {
            let release: BoxFuture<'_, Result<bool>> = Box::pin(async {
                let release = slot.claim.release().await?;
                (slot.asked, slot.grant) = (None, None);
                Ok(release == Release::Released)
            });
            release
        });
        let mut freed = 0;
        for release in join_all(releases.collect()).await {
            freed += usize::from(release?);
        }
        Ok(freed)
    }

    /// Finds the slots that this owner has already, and makes their leases last `ttl`.
    async fn renew_adopted(&mut self, ttl: Duration) -> Result<Renewal> {
        self.all_slots()?;
        let all = self.slots.values_mut().map(|slot| slot.claim.renew(ttl)).collect();
        let renewals = join_all(all).await.into_iter().collect::<Result<Vec<_>>>()?;
        for ((number, slot), renewal) in self.slots.iter_mut().zip(renewals) {
            let valid_for = match renewal {
                Renewal::Renewed { valid_for } => Some(valid_for),
                Renewal::Held => None,
                Renewal::Lost(_) => continue,
            };
            slot.asked = Some(self.known.mark(*number));
            slot.grant = Some(Grant { fence: None, valid_for });
        }
        self.forget_others();
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
        Box::pin(self.ask(floor))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(async move {
            let granted = self.granted;
            let interesting: Vec<BoxFuture<'_, Change>> = match &mut self.gate {
                // At the end of the queue, or holding: nothing to hear from slots of others.
                Some(gate) if !self.at_gate && !granted => vec![gate.changed()],
                _ => {
                    let slots = self.slots.values_mut();
                    let slots = slots.filter(|slot| slot.grant.is_some() == granted);
                    let mut changes: Vec<_> = slots.map(|slot| slot.claim.changed()).collect();
                    if self.at_gate && !granted {
                        // This process knows of its own slots, so they were not asked for. Each notice wakes one
                        // claim: the one at the gate, and not a try that is about to ask again anyway.
                        changes.push(Box::pin(async {
                            self.known.released().await;
                            Change::LookAgain
                        }));
                    }
                    changes
                }
            };
            match first(interesting).await {
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
        Box::pin(async { Err(Error::unsupported("downgrade for permits")) })
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        Box::pin(async move {
            let fresh = self.fresh;
            if fresh {
                self.all_slots()?;
            }
            let freed = self.give_back(|slot| fresh || slot.asked.is_some()).await?;
            self.forget_others();
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
