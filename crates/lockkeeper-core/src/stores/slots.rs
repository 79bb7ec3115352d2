//! Semaphores made of exclusive locks.

mod claim;
mod inspect;
mod known;

use std::sync::Arc;

use self::claim::SlotsClaim;
use self::known::Semaphores;
use crate::contract::{Backend, Capabilities, Claim, ClaimSpec, Inspector, Mode};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::options::invalid;

/// The maximum number of permits: each is a lock, and a claim may need all of them.
const MAX_SLOTS: u32 = 1024;

/// A store whose semaphores are made of its exclusive locks: one lock for each permit, a *slot*, and one for the queue, the
/// *gate*.
///
/// It is for stores that cannot count permits. A waiter first acquires the gate, in the order of the store's queue, and
/// holds it until it has its slots. So only one waiter searches for free slots, and the others wait as for any lock.
/// Mutexes and readers-writer locks pass through unchanged.
///
/// A claim sends requests only for the slots that it needs. It skips the slots that its own process holds, and tries
/// those that were released in its process first and those that the store has refused last. So the number of requests per
/// permit does not grow with the permits that the process holds. Without such records the order is random: if other
/// processes hold all but one of 1024 slots, a claim tries half of them on average. A try fails only after the store has
/// refused every slot that the process does not hold.
///
/// # Where it differs from a store that counts
///
/// - A try does not use the gate, so it may overtake the waiter at the gate. With the gate, two concurrent tries could
///   refuse each other although there are permits for both.
/// - Two concurrent tries for several permits can each get some of them and neither all. Such a try releases its slots
///   and tries once more under another lock, the *turn*, which serializes these tries. While another try holds the
///   turn, the engine retries, for at most two seconds, and then returns
///   [`ErrorKind::Undecided`](crate::ErrorKind::Undecided). If a process dies while it holds the turn, the turn stays held
///   for its TTL.
/// - Clients that disagree about the number of permits use different numbers of slots: all permits in use stay within the
///   largest number, not the smallest.
/// - At most 1024 permits; more are an [`InvalidOption`](crate::ErrorKind::InvalidOption).
#[derive(Debug, Clone)]
pub struct Slots {
    inner: Arc<dyn Backend>,
    semaphores: Arc<Semaphores>,
}

impl Slots {
    /// Adds semaphores to a store.
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self { inner, semaphores: Arc::default() }
    }

    /// Returns the names of all locks that a semaphore may consist of, for a store that can look up names but not list
    /// them.
    pub fn parts(semaphore: &str) -> impl Iterator<Item = Name> + '_ {
        let slots = (0..MAX_SLOTS).map(move |slot| slot_name(semaphore, slot));
        std::iter::once(gate_name(semaphore)).chain(slots)
    }

    fn inner_inspector(&self) -> Result<&dyn Inspector> {
        self.inner.inspector().ok_or_else(|| Error::unsupported("inspection"))
    }
}

/// The NUL keeps these names apart from those of users.
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
        if of > MAX_SLOTS {
            let message =
                format!("a semaphore of this store has at most {MAX_SLOTS} permits, not {of}");
            return Err(invalid(message));
        }
        let known = self.semaphores.get(&spec.name);
        Ok(Box::new(SlotsClaim::new(self.inner.clone(), spec, known, take as usize, of)?))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.inner.inspector().map(|_| self as _)
    }
}
