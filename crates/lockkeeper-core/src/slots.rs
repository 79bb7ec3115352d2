//! Semaphores made of exclusive locks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Grant, Holder, Inspector,
    Kind, LockInfo, Mode, Party, Release, Renewal,
};
use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::fence::Fence;
use crate::join::{first, join_all};
use crate::name::Name;
use crate::options::invalid;

/// The most permits of a semaphore made of slots: each is a lock, and a claim knows them all.
const MOST_SLOTS: u32 = 1024;

/// How often whoever is next looks whether a permit has become free, on a store that does not tell.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// A store whose semaphores are made of its exclusive locks: one lock for each permit, a *slot*, and
/// one for the queue, the *gate*.
///
/// For stores that have no counting of their own. Whoever waits for a permit first takes the gate, in
/// the order of the store's queue, and keeps it until he has his slots: so only one looks for free
/// slots, and the rest wait as they wait for any lock.
///
/// Mutexes and readers-writer locks pass through unchanged.
///
/// # Where it differs from a store that counts
///
/// - A try does not touch the gate: it may take a slot that somebody at the gate was about to find. (If
///   it did, two tries at the same moment would refuse each other though there is room for both.)
/// - Clients that disagree about the number of permits use different numbers of slots: all in use
///   together stay within the largest number, not the smallest.
/// - At most 1024 permits; more are an [`InvalidOption`](crate::ErrorKind::InvalidOption).
#[derive(Debug, Clone)]
pub struct Slots {
    inner: Arc<dyn Backend>,
}

impl Slots {
    /// The store, with semaphores.
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self { inner }
    }

    /// The names of all locks that a semaphore may be made of: for a store that can look a name up and
    /// cannot list them.
    pub fn parts(semaphore: &str) -> impl Iterator<Item = Name> + '_ {
        let slots = (0..MOST_SLOTS).map(move |slot| slot_name(semaphore, slot));
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
        let part = |name, queue| {
            let mut part = spec.clone();
            // Each slot has a fence of its own, and a ticket the highest of them.
            part.ticket = None;
            (part.name, part.mode, part.queue) = (name, Mode::Exclusive, queue);
            self.inner.claim(part)
        };
        let gate = spec.queue.then(|| part(gate_name(&spec.name), true)).transpose()?;
        if of > MOST_SLOTS {
            let message = format!("a semaphore of this store has at most {MOST_SLOTS} permits");
            return Err(invalid(message));
        }
        let slot = |slot| {
            let claim = part(slot_name(&spec.name, slot), false)?;
            Ok(Slot { claim, asked: false, grant: None })
        };
        let slots = (0..of).map(slot).collect::<Result<Vec<_>>>()?;
        let pauses = Backoff::new(Duration::from_millis(5), LOOK_EVERY);
        let take = take as usize;
        Ok(Box::new(SlotsClaim {
            gate,
            at_gate: false,
            slots,
            take,
            fresh: true,
            granted: false,
            pauses,
        }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.inner.inspector().map(|_| self as _)
    }
}

struct SlotsClaim {
    /// `None` if this claim does not wait.
    gate: Option<Box<dyn Claim>>,
    at_gate: bool,
    slots: Vec<Slot>,
    take: usize,
    /// Nothing has been asked yet: which slots its owner has is known to the store only.
    fresh: bool,
    granted: bool,
    pauses: Backoff,
}

struct Slot {
    claim: Box<dyn Claim>,
    /// The store may have given this one: it did, or its answer is not known.
    asked: bool,
    /// What the store gave for this one, if it did.
    grant: Option<Grant>,
}

/// What asking for slots came to, beside the slots.
struct Looked {
    /// When it may be worth asking again.
    retry_after: Option<Duration>,
    /// Whether the store could not decide on a slot.
    undecided: bool,
}

impl SlotsClaim {
    fn held(&self) -> usize {
        self.slots.iter().filter(|slot| slot.grant.is_some()).count()
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
                    self.give_back(|slot| slot.asked).await?;
                    return Ok(refused);
                }
            }
        }
        let Looked { retry_after, undecided } = self.take_slots(floor).await?;
        if self.held() < self.take {
            self.granted = false;
            if self.gate.is_none() {
                self.give_back(|slot| slot.asked).await?;
            }
            if undecided {
                return Ok(Attempt::Undecided);
            }
            let look = self.pauses.next();
            let retry_after = Some(retry_after.map_or(look, |retry_after| retry_after.min(look)));
            return Ok(Attempt::Contended { retry_after, holder: Holder::Unknown });
        }
        // A slot whose answer was lost may be one too many.
        let unneeded = |slot: &Slot| slot.asked && slot.grant.is_none();
        self.give_back(unneeded).await?;
        self.granted = true;
        self.leave_gate().await?;
        let grants = || self.slots.iter().filter_map(|slot| slot.grant);
        let fence = grants().filter_map(|grant| grant.fence).max();
        let valid_for = grants().filter_map(|grant| grant.valid_for).min();
        Ok(Attempt::Granted(Grant { fence, valid_for }))
    }

    /// Asks for slots until there are enough: first for those that were held, to keep them.
    async fn take_slots(&mut self, floor: Option<Fence>) -> Result<Looked> {
        // Everybody starts somewhere else, so that they do not all ask for the same slot.
        let count = self.slots.len();
        let start = fastrand::usize(..count.max(1));
        let mut order: Vec<usize> = (0..count).map(|i| (start + i) % count).collect();
        order.sort_by_key(|&i| !self.slots[i].asked);
        let (mut held, mut retry_after, mut undecided) = (0, None::<Duration>, false);
        for i in order {
            let slot = &mut self.slots[i];
            if held == self.take {
                break;
            }
            slot.asked = true;
            match slot.claim.attempt(floor).await? {
                Attempt::Granted(grant) => {
                    slot.grant = Some(grant);
                    held += 1;
                }
                Attempt::Contended { retry_after: after, .. } => {
                    (slot.asked, slot.grant) = (false, None);
                    retry_after = after.into_iter().chain(retry_after).min();
                }
                Attempt::Undecided => {
                    (slot.asked, slot.grant) = (false, None);
                    undecided = true;
                }
            }
        }
        Ok(Looked { retry_after, undecided })
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

    /// Gives some slots back.
    async fn give_back(&mut self, which: impl Fn(&Slot) -> bool) -> Result<usize> {
        let slots = self.slots.iter_mut().filter(|slot| which(slot));
        let releases = slots.map(|slot| {
            let release: BoxFuture<'_, Result<bool>> = Box::pin(async {
                let release = slot.claim.release().await?;
                (slot.asked, slot.grant) = (false, None);
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
                    let slots = self.slots.iter_mut();
                    let slots = slots.filter(|slot| slot.grant.is_some() == granted);
                    slots.map(|slot| slot.claim.changed()).collect()
                }
            };
            match first(interesting).await {
                Change::Lost if granted => Change::Lost,
                Change::Lost | Change::LookAgain | Change::Granted(_) => Change::LookAgain,
            }
        })
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(async move {
            if self.held() == 0 {
                // Adopted: which slots they are is known to the store only.
                let all = self.slots.iter_mut().map(|slot| slot.claim.renew(ttl)).collect();
                let renewals = join_all(all).await.into_iter().collect::<Result<Vec<_>>>()?;
                for (slot, renewal) in self.slots.iter_mut().zip(renewals) {
                    let valid_for = match renewal {
                        Renewal::Renewed { valid_for } => Some(valid_for),
                        Renewal::Held => None,
                        Renewal::Lost => continue,
                    };
                    (slot.asked, slot.grant) = (true, Some(Grant { fence: None, valid_for }));
                }
                self.granted = self.held() >= self.take;
                let valid = self.slots.iter().filter_map(|slot| slot.grant?.valid_for).min();
                return Ok(match valid {
                    _ if !self.granted => Renewal::Lost,
                    Some(valid_for) => Renewal::Renewed { valid_for },
                    None => Renewal::Held,
                });
            }
            let held = self.slots.iter_mut().filter(|slot| slot.grant.is_some());
            let renewals = join_all(held.map(|slot| slot.claim.renew(ttl)).collect()).await;
            let mut result = Renewal::Held;
            for renewal in renewals {
                result = match (result, renewal?) {
                    (Renewal::Lost, _) | (_, Renewal::Lost) => Renewal::Lost,
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
            let freed = self.give_back(|slot| fresh || slot.asked).await?;
            if let Some(gate) = &mut self.gate {
                gate.release().await?;
                self.at_gate = false;
            }
            let held = (self.granted || fresh) && freed >= self.take;
            self.granted = false;
            Ok(if held { Release::Released } else { Release::WasNotHeld })
        })
    }
}

/// Shows slots and gates as the semaphores that they are.
fn as_semaphores(infos: Vec<LockInfo>) -> Vec<LockInfo> {
    let mut shown = Vec::new();
    let mut semaphores: BTreeMap<String, LockInfo> = BTreeMap::new();
    for info in infos {
        let Some((name, part)) = info.name.split_once('\0') else {
            shown.push(info);
            continue;
        };
        let semaphore = semaphores.entry(name.to_owned()).or_insert_with(|| LockInfo {
            name: Name::derived(name.to_owned()),
            kind: Kind::Semaphore,
            holders: Vec::new(),
            waiters: Vec::new(),
        });
        if part == "gate" {
            let at_gate = info.holders.into_iter().chain(info.waiters);
            semaphore.waiters.extend(at_gate.map(|party| permits(party, 1)));
        } else {
            for holder in info.holders {
                let known = semaphore.holders.iter_mut().find(|known| known.owner == holder.owner);
                match known.map(|known| &mut known.mode) {
                    Some(Mode::Permits { take, .. }) => *take += 1,
                    _ => semaphore.holders.push(permits(holder, 1)),
                }
            }
        }
    }
    for semaphore in semaphores.values_mut() {
        // Whoever is at the gate waits, even if it has some slots already.
        let LockInfo { holders, waiters, .. } = semaphore;
        holders.retain(|holder| {
            holder.owner.is_none() || waiters.iter().all(|waiter| waiter.owner != holder.owner)
        });
    }
    shown.extend(semaphores.into_values());
    shown.sort_by(|a, b| (&a.name, a.kind).cmp(&(&b.name, b.kind)));
    shown
}

/// How many permits its holder believes in is not written anywhere: 0.
fn permits(party: Party, take: u32) -> Party {
    Party { mode: Mode::Permits { take, of: 0 }, ..party }
}

impl Inspector for Slots {
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let prefix = prefix.to_owned();
        Box::pin(async move { Ok(as_semaphores(self.look()?.list(&prefix).await?)) })
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let name = name.clone();
        Box::pin(async move {
            let look = self.look()?;
            let mut infos = look.show(&name).await?;
            infos.extend(look.list(&format!("{name}\0")).await?);
            Ok(as_semaphores(infos))
        })
    }

    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let name = name.clone();
        Box::pin(async move {
            let look = self.look()?;
            let mut broken = look.break_lock(&name).await?;
            let parts = look.list(&format!("{name}\0")).await?;
            // Owners and not slots are counted, as everywhere.
            let holders =
                as_semaphores(parts.clone()).iter().map(|info| info.holders.len()).sum::<usize>();
            let waiting: Vec<_> =
                parts.iter().filter(|part| part.name.ends_with("\0gate")).collect();
            let waits =
                |owner| waiting.iter().flat_map(|gate| &gate.holders).any(|p| p.owner == owner);
            for part in &parts {
                let holder = part.holders.first().map(|holder| holder.owner);
                if part.name.contains("\0slot\0") && !holder.is_some_and(&waits) {
                    look.break_lock(&part.name).await?;
                }
            }
            broken += holders;
            Ok(broken)
        })
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        match self.inner.inspector() {
            Some(inspector) => inspector.changed(),
            None => Box::pin(std::future::pending()),
        }
    }
}
