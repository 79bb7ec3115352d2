//! The highest fences that a keeper was granted, by name: the floors of its next attempts.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::clock::Moment;
use crate::error::Result;
use crate::fence::Fence;
use crate::name::Name;

/// The number of names in a generation. A keeper keeps the floors of at least this many names, and of at most twice as
/// many.
const GENERATION: usize = 1024;

/// The floors of a keeper, shared by its two contexts, async and blocking.
///
/// A floor keeps the fences of a name rising if the store has lost them, for example in a failover, or if its clock was set
/// back. It comes only from grants of the store, never from a ticket. It expires [`Fence::MAX_AHEAD`] after the grant: by
/// then the clock of a healthy store has passed it. Clocks that are set back by more than that are out of scope. The names
/// that were granted longest ago are evicted first. After that, the fences of the name depend on the store alone.
#[derive(Default)]
pub(crate) struct Floors(Mutex<Generations>);

/// An approximate LRU cache: two generations of names instead of a list in the order of use. It needs at most two lookups,
/// and no allocation for a name that is used again.
#[derive(Default)]
struct Generations {
    young: HashMap<Name, LastGrant>,
    old: HashMap<Name, LastGrant>,
}

#[derive(Clone, Copy)]
struct LastGrant {
    fence: Fence,
    at: Moment,
}

impl LastGrant {
    fn has_expired(self, now: Moment) -> bool {
        now.since(self.at) > Fence::MAX_AHEAD
    }
}

impl Floors {
    fn generations(&self) -> MutexGuard<'_, Generations> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the lowest fence that the next exclusive grant of a name may have.
    ///
    /// # Errors
    ///
    /// If there is no fence above the last one: the attempt fails rather than repeat a fence.
    pub(crate) fn next(&self, name: &Name, now: Moment) -> Result<Option<Fence>> {
        let generations = self.generations();
        let granted = generations.young.get(name).or_else(|| generations.old.get(name)).copied();
        drop(generations);
        let Some(last) = granted.filter(|granted| !granted.has_expired(now)) else {
            return Ok(None);
        };
        let next = Fence::new(last.fence.get() + 1);
        next.map(Some).ok_or_else(|| last.fence.exhausted())
    }

    /// Records a grant.
    pub(crate) fn granted(&self, name: &Name, fence: Fence, at: Moment) {
        let generations = &mut *self.generations();
        let new = LastGrant { fence, at };
        if let Some(last) = generations.young.get_mut(name) {
            // A lower fence, for example of a reader, must neither replace a higher one nor delay its expiry.
            if fence >= last.fence || last.has_expired(at) {
                *last = new;
            }
            return;
        }
        let last = generations.old.remove(name);
        let last = last.filter(|last| last.fence > fence && !last.has_expired(at));
        if generations.young.len() >= GENERATION {
            std::mem::swap(&mut generations.young, &mut generations.old);
            generations.young.clear();
        }
        generations.young.insert(name.clone(), last.unwrap_or(new));
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Display;
    use std::time::Duration;

    use super::*;
    use crate::error::ErrorKind;

    fn name(name: impl Display) -> Name {
        Name::new(format!("{name}")).unwrap()
    }

    fn fence(number: u64) -> Fence {
        Fence::new(number).unwrap()
    }

    #[test]
    fn a_floor_is_one_above_the_highest_grant_of_its_own_name() {
        let (floors, now) = (Floors::default(), Moment::now());
        assert_eq!(floors.next(&name("a"), now).unwrap(), None);
        for number in [5, 7, 6] {
            floors.granted(&name("a"), fence(number), now);
        }
        assert_eq!(floors.next(&name("a"), now).unwrap(), Some(fence(8)));
        assert_eq!(floors.next(&name("b"), now).unwrap(), None);
    }

    #[test]
    fn a_floor_expires_an_hour_after_its_grant_even_if_lower_fences_follow() {
        let (floors, start) = (Floors::default(), Moment::now());
        floors.granted(&name("a"), fence(1000), start);
        let half = start.add(Fence::MAX_AHEAD / 2);
        floors.granted(&name("a"), fence(5), half);
        assert_eq!(floors.next(&name("a"), half).unwrap(), Some(fence(1001)));
        let late = start.add(Fence::MAX_AHEAD + Duration::from_millis(1));
        assert_eq!(floors.next(&name("a"), late).unwrap(), None);
        floors.granted(&name("a"), fence(6), late);
        assert_eq!(floors.next(&name("a"), late).unwrap(), Some(fence(7)));
    }

    #[test]
    fn the_number_of_names_is_bounded_and_names_in_use_stay() {
        let (floors, now) = (Floors::default(), Moment::now());
        for number in 0..10 * GENERATION {
            floors.granted(&name(number), fence(1), now);
            floors.granted(&name("in use"), fence(9), now);
        }
        let generations = floors.generations();
        assert!(generations.young.len() + generations.old.len() <= 2 * GENERATION);
        drop(generations);
        assert_eq!(floors.next(&name("in use"), now).unwrap(), Some(fence(10)));
        assert_eq!(floors.next(&name(10 * GENERATION - 500), now).unwrap(), Some(fence(2)));
        assert_eq!(floors.next(&name(0), now).unwrap(), None);
    }

    #[test]
    fn a_floor_above_the_highest_fence_is_an_error() {
        let (floors, now) = (Floors::default(), Moment::now());
        floors.granted(&name("a"), Fence::MAX, now);
        assert_eq!(floors.next(&name("a"), now).unwrap_err().kind(), ErrorKind::Config);
    }
}
