//! From times on the wall of some place to moments.
//!
//! The parser finds times in a calendar without time zones, and what a zone makes of them is decided
//! here. (Its own search in time zones, as of croner 4.0.2, takes a gap at midnight for the job's: of
//! `30 2 * * *` in Santiago on 6 September 2026 two who ask at different times hear of 01:00 and of 02:30. And it
//! finds nothing beyond a gap of more than two hours. `tests/schedule.rs` has both.)

use croner::Cron;
use croner::errors::CronError;
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::{AmbiguousOffset, TimeZone};
use lockkeeper_core::Result;

use crate::schedule::invalid;

/// A cron pattern in a time zone.
#[derive(Debug, Clone)]
pub(crate) struct WallTimes {
    cron: Cron,
    zone: TimeZone,
    /// Whether the pattern means times by name, each of which comes once a day, or a rhythm.
    fixed: bool,
}

impl WallTimes {
    pub(crate) fn new(pattern: &str, zone: &str) -> Result<Self> {
        let cron: Cron = pattern.parse().map_err(|error| {
            invalid(format!("cron pattern {pattern:?}: {error}")).with_source(error)
        })?;
        let zone = TimeZone::get(zone).map_err(|_| {
            let known = "take a name such as \"UTC\" or \"Europe/Berlin\"";
            invalid(format!("no time zone {zone:?}: {known}"))
        })?;
        Ok(Self { cron, zone, fixed: is_fixed(pattern) })
    }

    /// The first moment after another that is on the pattern.
    pub(crate) fn next(&self, after: Timestamp) -> Result<Option<Timestamp>> {
        if self.fixed { self.next_fixed(after) } else { self.next_beat(after) }
    }

    /// Each time on the wall is one moment, and a later one is not an earlier moment: what is not on the
    /// wall before `after` is not before it in truth either.
    fn next_fixed(&self, after: Timestamp) -> Result<Option<Timestamp>> {
        let mut wall = after.to_zoned(self.zone.clone()).datetime();
        while let Some(next) = self.next_on_wall(wall, false)? {
            let Some(moment) = self.moment(next) else { return Ok(None) };
            // In the second of two hours with the same name, the moment was in the first.
            if moment > after {
                return Ok(Some(moment));
            }
            wall = next;
        }
        Ok(None)
    }

    /// When a time on the wall is: the first of two, or the end of the gap that it is in.
    fn moment(&self, wall: DateTime) -> Option<Timestamp> {
        let ambiguous = self.zone.to_ambiguous_timestamp(wall);
        let AmbiguousOffset::Gap { after, .. } = ambiguous.offset() else {
            return ambiguous.earlier().ok();
        };
        // Read with the offset of after the gap, it is a moment before it.
        let before = after.to_timestamp(wall).ok()?;
        self.zone.following(before).next().map(|change| change.timestamp())
    }

    /// Every moment at which the wall shows a time of the pattern, from one change of the clock to the
    /// next.
    fn next_beat(&self, after: Timestamp) -> Result<Option<Timestamp>> {
        let (mut from, mut inclusive) = (after, false);
        loop {
            let change = self.zone.following(from).next().map(|change| change.timestamp());
            let offset = self.zone.to_offset(from);
            let Some(wall) = self.next_on_wall(offset.to_datetime(from), inclusive)? else {
                return Ok(None);
            };
            let Ok(moment) = offset.to_timestamp(wall) else { return Ok(None) };
            match change {
                Some(change) if moment >= change => (from, inclusive) = (change, true),
                _ => return Ok(Some(moment)),
            }
        }
    }

    fn next_on_wall(&self, wall: DateTime, inclusive: bool) -> Result<Option<DateTime>> {
        match self.cron.find_next_occurrence(&wall, inclusive) {
            Ok(next) => Ok(Some(next)),
            Err(CronError::TimeSearchLimitExceeded) => Ok(None),
            Err(error) => Err(invalid(format!("cron pattern: {error}")).with_source(error)),
        }
    }
}

/// Whether there is neither `*` nor a step among seconds, minutes and hours.
fn is_fixed(pattern: &str) -> bool {
    let fields: Vec<&str> = pattern.split_whitespace().collect();
    if let [nickname] = fields[..] {
        return !nickname.eq_ignore_ascii_case("@hourly");
    }
    // Three fields are days: of the month, the month, of the week; a fourth is the year.
    let times = if fields.len() == 5 { 2 } else { 3 };
    fields.iter().take(times).all(|field| !field.contains(['*', '/', '?']))
}
