//! Which times of the wall clock have been seen to.

use jiff::Timestamp;

/// More than a clock is ever set, and little to search.
const MOST: usize = 64;

/// The times whose ticks this node has decided on, so that a clock that is set back does not bring them
/// again.
///
/// Not just the latest of them: a clock that was a year ahead for a minute would then stop the job for
/// a year.
#[derive(Debug, Default)]
pub(crate) struct Lived {
    /// From (exclusive) and to (inclusive); sorted, and none touches another.
    ranges: Vec<(Timestamp, Timestamp)>,
}

impl Lived {
    /// The end of the range that a time is in.
    pub(crate) fn end_of(&self, time: Timestamp) -> Option<Timestamp> {
        let range = self.ranges.iter().find(|(from, to)| *from < time && time <= *to);
        range.map(|(_, to)| *to)
    }

    /// Adds the times after `from`, up to and with `to`.
    pub(crate) fn add(&mut self, mut from: Timestamp, mut to: Timestamp) {
        self.ranges.retain(|(start, end)| {
            let touches = *start <= to && from <= *end;
            if touches {
                (from, to) = (from.min(*start), to.max(*end));
            }
            !touches
        });
        let at = self.ranges.partition_point(|(start, _)| *start < from);
        self.ranges.insert(at, (from, to));
        if self.ranges.len() > MOST {
            // The oldest two, and the ticks between them, which were missed long ago.
            let (from, _) = self.ranges.remove(0);
            self.ranges[0].0 = from;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn ranges_that_touch_become_one_and_holes_stay() {
        let mut lived = Lived::default();
        lived.add(at(10), at(20));
        lived.add(at(20), at(30));
        lived.add(at(50), at(60));
        assert_eq!(lived.ranges, [(at(10), at(30)), (at(50), at(60))]);
        assert_eq!(lived.end_of(at(10)), None);
        assert_eq!(lived.end_of(at(11)), Some(at(30)));
        assert_eq!(lived.end_of(at(30)), Some(at(30)));
        assert_eq!(lived.end_of(at(40)), None);
        lived.add(at(5), at(55));
        assert_eq!(lived.ranges, [(at(5), at(60))]);
    }

    #[test]
    fn it_does_not_grow_for_ever() {
        let mut lived = Lived::default();
        for i in 0..10_000 {
            lived.add(at(i * 10), at(i * 10 + 1));
        }
        assert_eq!(lived.ranges.len(), MOST);
        // What was decided on stays so.
        assert!((0..10_000).all(|i| lived.end_of(at(i * 10 + 1)).is_some()));
        assert!(lived.end_of(at(99_999)).is_none());
    }
}
