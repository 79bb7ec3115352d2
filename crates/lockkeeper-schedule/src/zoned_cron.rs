//! Cron patterns in a time zone.
//!
//! croner searches a calendar without time zones; this module maps local times to timestamps. croner's
//! zone-aware search (4.0.2) has two defects. It mistakes a gap at midnight for a gap at the job's time: the tick of
//! `30 2 * * *` in Santiago on 6 September 2026 is 01:00 or 02:30, depending on where the search starts. It also
//! finds nothing after a gap of more than two hours. Covered by `nodes_agree_on_the_ticks_regardless_of_when_they_search`
//! and `a_day_that_a_time_zone_skips_does_not_end_the_schedule` in `tests/schedule.rs`.

use croner::Cron;
use croner::errors::CronError;
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::{AmbiguousOffset, TimeZone};
use lockkeeper_core::Result;

use crate::schedule::invalid;

/// A cron pattern in a time zone.
#[derive(Debug, Clone)]
pub(crate) struct ZonedCron {
    cron: Cron,
    zone: TimeZone,
    /// True if the pattern names fixed times of the day, false if it recurs within the day.
    fixed: bool,
}

impl ZonedCron {
    pub(crate) fn new(pattern: &str, zone: &str) -> Result<Self> {
        let cron: Cron = pattern.parse().map_err(|error| {
            invalid(format!("cron pattern {pattern:?}: {error}")).with_source(error)
        })?;
        let zone = TimeZone::get(zone).map_err(|_| {
            let advice = "use an IANA name such as \"UTC\" or \"Europe/Berlin\"";
            invalid(format!("unknown time zone {zone:?}: {advice}"))
        })?;
        Ok(Self { cron, zone, fixed: is_fixed(pattern) })
    }

    /// Returns the first tick after a time.
    pub(crate) fn next(&self, after: Timestamp) -> Result<Option<Timestamp>> {
        if self.fixed { self.next_fixed(after) } else { self.next_recurring(after) }
    }

    /// Returns the next tick of a pattern with fixed times. Each local time maps to one timestamp, and the
    /// mapping is monotonic, so the search can start at the local time of `after`.
    fn next_fixed(&self, after: Timestamp) -> Result<Option<Timestamp>> {
        let mut local = after.to_zoned(self.zone.clone()).datetime();
        while let Some(next) = self.next_local(local, false)? {
            let Some(timestamp) = self.timestamp(next) else { return Ok(None) };
            // In the second pass through a repeated hour, the tick was in the first pass.
            if timestamp > after {
                return Ok(Some(timestamp));
            }
            local = next;
        }
        Ok(None)
    }

    /// Maps a local time to the earlier of two timestamps, or to the end of the gap that contains it.
    fn timestamp(&self, local: DateTime) -> Option<Timestamp> {
        let ambiguous = self.zone.to_ambiguous_timestamp(local);
        let AmbiguousOffset::Gap { after, .. } = ambiguous.offset() else {
            return ambiguous.earlier().ok();
        };
        // With the offset that applies after the gap, the local time maps to a timestamp before the gap.
        let before = after.to_timestamp(local).ok()?;
        self.zone.following(before).next().map(|change| change.timestamp())
    }

    /// Returns the next timestamp whose local time matches the pattern. Searches one period of constant
    /// offset after another.
    fn next_recurring(&self, after: Timestamp) -> Result<Option<Timestamp>> {
        let (mut from, mut inclusive) = (after, false);
        loop {
            let change = self.zone.following(from).next().map(|change| change.timestamp());
            let offset = self.zone.to_offset(from);
            let Some(local) = self.next_local(offset.to_datetime(from), inclusive)? else {
                return Ok(None);
            };
            let Ok(timestamp) = offset.to_timestamp(local) else { return Ok(None) };
            match change {
                Some(change) if timestamp >= change => (from, inclusive) = (change, true),
                _ => return Ok(Some(timestamp)),
            }
        }
    }

    fn next_local(&self, local: DateTime, inclusive: bool) -> Result<Option<DateTime>> {
        match self.cron.find_next_occurrence(&local, inclusive) {
            Ok(next) => Ok(Some(next)),
            Err(CronError::TimeSearchLimitExceeded) => Ok(None),
            Err(error) => Err(invalid(format!("cron pattern: {error}")).with_source(error)),
        }
    }
}

/// Returns whether seconds, minutes and hours contain no wildcard and no step.
fn is_fixed(pattern: &str) -> bool {
    let fields: Vec<&str> = pattern.split_whitespace().collect();
    if let [nickname] = fields[..] {
        return !nickname.eq_ignore_ascii_case("@hourly");
    }
    // Five fields start with minute and hour; six or seven start with second, minute and hour.
    let times = if fields.len() == 5 { 2 } else { 3 };
    fields.iter().take(times).all(|field| !field.contains(['*', '/', '?']))
}
