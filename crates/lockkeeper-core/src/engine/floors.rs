//! The highest fences that a keeper was granted, by name: the floors of its next attempts.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::clock::Moment;
use crate::error::Result;
use crate::fence::Fence;
use crate::name::Name;

/// How many names a generation has. A keeper remembers the floors of at least so many names, and of at most twice
/// as many.
const GENERATION: usize = 1024;

/// The floors of a keeper, shared by its two contexts, async and blocking.
///
/// A floor carries the fences of a name over a failover or a clock that was set back, where the store has forgotten
/// them. It comes from grants of the store only, never from a ticket, and ends [`Fence::MAX_AHEAD`] after the
/// grant: by then the clock of a healthy store has passed it, and a clock that is corrected by more than that
/// cannot be bridged. Names that were not used for longest are forgotten first; the fences of such a name are as
/// good as the store's own.
#[derive(Default)]
pub(crate) struct Floors(Mutex<Generations>);

/// Two generations of names instead of a list in the order of use: one lookup, or two, and no allocation for a
/// name that is used again.
#[derive(Default)]
struct Generations {
    young: HashMap<Name, Granted>,
    old: HashMap<Name, Granted>,
}

#[derive(Clone, Copy)]
struct Granted {
    fence: Fence,
    at: Moment,
}

impl Granted {
    fn has_ended(self, now: Moment) -> bool {
        now.since(self.at) > Fence::MAX_AHEAD
    }
}

impl Floors {
    fn generations(&self) -> MutexGuard<'_, Generations> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lowest fence that the next exclusive grant of a name may have.
    ///
    /// # Errors
    ///
    /// If there is none above the last one: an attempt fails rather than repeat a fence.
    pub(crate) fn next(&self, name: &Name, now: Moment) -> Result<Option<Fence>> {
        let generations = self.generations();
        let granted = generations.young.get(name).or_else(|| generations.old.get(name)).copied();
        drop(generations);
        let Some(last) = granted.filter(|granted| !granted.has_ended(now)) else { return Ok(None) };
        let next = Fence::new(last.fence.get() + 1);
        next.map(Some).ok_or_else(|| last.fence.exhausted())
    }

    /// Takes note of a grant.
    pub(crate) fn granted(&self, name: &Name, fence: Fence, at: Moment) {
        let generations = &mut *self.generations();
        let new = Granted { fence, at };
        if let Some(last) = generations.young.get_mut(name) {
            // A lower fence, as of a reader, must not prolong the life of a higher one.
            if fence >= last.fence || last.has_ended(at) {
                *last = new;
            }
            return;
        }
        let last = generations.old.remove(name);
        let last = last.filter(|last| last.fence > fence && !last.has_ended(at));
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
    fn a_floor_ends_an_hour_after_its_grant_even_if_lower_fences_follow() {
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
    fn the_number_of_names_is_bounded_and_those_in_use_stay() {
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
    fn above_the_highest_fence_there_is_no_floor_but_an_error() {
        let (floors, now) = (Floors::default(), Moment::now());
        floors.granted(&name("a"), Fence::MAX, now);
        assert_eq!(floors.next(&name("a"), now).unwrap_err().kind(), ErrorKind::Config);
    }
}
