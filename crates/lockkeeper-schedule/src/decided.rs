//! The wall-clock times whose ticks this node has decided.

use jiff::Timestamp;

/// Bounds the memory and the search. A clock that is set often adds ranges.
const MAX_RANGES: usize = 64;

/// The times whose ticks this node has decided: run or skipped. A clock that is set back does not repeat them.
///
/// The latest time alone is not enough: a clock that was a year ahead for a minute would then stop the job
/// for a year.
#[derive(Debug, Default)]
pub(crate) struct DecidedRanges {
    /// From (exclusive) and to (inclusive); sorted and disjoint.
    ranges: Vec<(Timestamp, Timestamp)>,
}

impl DecidedRanges {
    /// Returns the end of the range that contains `time`.
    pub(crate) fn end_of(&self, time: Timestamp) -> Option<Timestamp> {
        let range = self.ranges.iter().find(|(from, to)| *from < time && time <= *to);
        range.map(|(_, to)| *to)
    }

    /// Adds the times after `from`, up to and including `to`.
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
        if self.ranges.len() > MAX_RANGES {
            // Merges the two oldest. The ticks between them were missed long ago.
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
    fn adjacent_ranges_are_merged_and_gaps_are_kept() {
        let mut decided = DecidedRanges::default();
        decided.add(at(10), at(20));
        decided.add(at(20), at(30));
        decided.add(at(50), at(60));
        assert_eq!(decided.ranges, [(at(10), at(30)), (at(50), at(60))]);
        assert_eq!(decided.end_of(at(10)), None);
        assert_eq!(decided.end_of(at(11)), Some(at(30)));
        assert_eq!(decided.end_of(at(30)), Some(at(30)));
        assert_eq!(decided.end_of(at(40)), None);
        decided.add(at(5), at(55));
        assert_eq!(decided.ranges, [(at(5), at(60))]);
    }

    #[test]
    fn the_number_of_ranges_is_bounded() {
        let mut decided = DecidedRanges::default();
        for i in 0..10_000 {
            decided.add(at(i * 10), at(i * 10 + 1));
        }
        assert_eq!(decided.ranges.len(), MAX_RANGES);
        // Merging forgets no decided time.
        assert!((0..10_000).all(|i| decided.end_of(at(i * 10 + 1)).is_some()));
        assert!(decided.end_of(at(99_999)).is_none());
    }
}
