//! Finds the next tick on a wall clock that may be set back or forward. No I/O.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use lockkeeper_core::Result;

use crate::decided::DecidedRanges;
use crate::job::{Job, Misfire};
use crate::schedule::Schedule;

/// The longest time between two reads of the wall clock. Timers do not notice a clock that is set or a machine
/// that is suspended.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The ticks of a job, as this node processes them.
#[derive(Debug)]
pub(crate) struct Ticks {
    schedule: Schedule,
    jitter: Duration,
    latest: Duration,
    /// Ticks up to here are decided, or came before this node started.
    position: Timestamp,
    /// The last time read from the clock.
    last_read: Timestamp,
    decided: DecidedRanges,
    /// The next tick after the position, and the jitter to add.
    awaited: Option<(Timestamp, Duration)>,
}

/// What a job has to do next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NextTick {
    /// No tick is due for this long, or the clock has to be read again then.
    Wait(Duration),
    /// At least one tick is due.
    Due {
        /// The last tick that is due.
        tick: Timestamp,
        /// Whether that tick may still be attempted.
        in_time: bool,
        /// The first tick that was due before it, if any.
        overtook: Option<Timestamp>,
    },
    /// The schedule has no further tick.
    Over,
}

impl Ticks {
    pub(crate) fn new(job: &Job, now: Timestamp) -> Result<Self> {
        let mut ticks = Self {
            schedule: job.schedule.clone(),
            jitter: job.jitter,
            latest: job.latest(),
            position: now,
            last_read: now,
            decided: DecidedRanges::default(),
            awaited: None,
        };
        if let Misfire::RunOnce { within } = job.misfire {
            // Of the ticks before the start, only the last may run. The others are not reported as missed.
            let first = ticks.next(earlier(now, within))?.filter(|first| *first <= now);
            if let Some(first) = first {
                ticks.position = just_before(ticks.last(first, now)?);
            }
        }
        Ok(ticks)
    }

    /// Returns what to do at `now`. Each tick is returned as due once.
    pub(crate) fn poll(&mut self, now: Timestamp) -> Result<NextTick> {
        if now < self.last_read {
            // The clock was set back. `decided` excludes the ticks that were processed; ticks that the clock
            // had skipped may come again.
            self.position = self.position.min(now);
            self.awaited = None;
        }
        self.last_read = now;
        let Some((first, delay)) = self.await_next()? else { return Ok(NextTick::Over) };
        let late = since(now, first);
        if now < first || late < delay {
            let left = since(first, now) + delay.saturating_sub(late);
            return Ok(NextTick::Wait(left.min(CLOCK_CHECK_INTERVAL)));
        }
        let tick = self.last(first, now)?;
        let (overtook, from) = if tick == first {
            (None, self.position)
        } else {
            // The overtaken ticks stay undecided: they may run if the clock is set back.
            (Some(first), just_before(tick))
        };
        self.decided.add(from, tick);
        self.position = tick;
        self.awaited = None;
        Ok(NextTick::Due { tick, in_time: since(now, tick) <= self.latest, overtook })
    }

    fn await_next(&mut self) -> Result<Option<(Timestamp, Duration)>> {
        if self.awaited.is_none() {
            let next = self.next(self.position)?;
            self.awaited = next.map(|tick| (tick, self.jitter.mul_f64(fastrand::f64())));
        }
        Ok(self.awaited)
    }

    /// Returns the next tick that is not decided.
    fn next(&self, after: Timestamp) -> Result<Option<Timestamp>> {
        let mut tick = self.schedule.next(after)?;
        while let Some(end) = tick.and_then(|tick| self.decided.end_of(tick)) {
            tick = self.schedule.next(end)?;
        }
        Ok(tick)
    }

    /// Returns the last due tick from `first` on. There may be millions, so the search starts at the end.
    fn last(&self, first: Timestamp, now: Timestamp) -> Result<Timestamp> {
        let mut back = Duration::from_secs(1);
        let mut last = loop {
            let from = earlier(now, back);
            if from <= first {
                break first;
            }
            match self.next(from)? {
                Some(tick) if tick <= now => break tick,
                _ => back = back.saturating_mul(2),
            }
        };
        while let Some(tick) = self.next(last)?.filter(|tick| *tick <= now) {
            last = tick;
        }
        Ok(last)
    }
}

/// Returns the time from `earlier` to `later`, or zero if the order is reversed.
pub(crate) fn since(later: Timestamp, earlier: Timestamp) -> Duration {
    Duration::try_from(later.duration_since(earlier)).unwrap_or_default()
}

fn just_before(time: Timestamp) -> Timestamp {
    earlier(time, Duration::from_nanos(1))
}

fn earlier(time: Timestamp, by: Duration) -> Timestamp {
    let by = SignedDuration::try_from(by).unwrap_or(SignedDuration::MAX);
    time.checked_sub(by).unwrap_or(Timestamp::MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn a_clock_that_jumps_years_ahead_makes_only_the_last_tick_due() {
        let job = Schedule::every(Duration::from_secs(1)).job("x", |_| async {});
        let mut ticks = Ticks::new(&job, at("2026-01-01T00:00:00Z")).unwrap();
        // About 220 billion ticks are overtaken.
        let due = ticks.poll(at("9000-01-01T00:00:00.5Z")).unwrap();
        let (tick, first) = (at("9000-01-01T00:00:00Z"), at("2026-01-01T00:00:01Z"));
        assert_eq!(due, NextTick::Due { tick, in_time: true, overtook: Some(first) });
        let wait = Duration::from_millis(500);
        assert_eq!(ticks.poll(at("9000-01-01T00:00:00.5Z")).unwrap(), NextTick::Wait(wait));
    }

    #[test]
    fn the_last_due_tick_is_found_for_any_distribution_of_ticks() {
        let start = at("2026-01-01T00:00:00Z");
        for pattern in ["* 2 * * *", "0 0 1 * *", "*/7 9-17 * * MON-FRI", "59 23 31 12 *"] {
            let job = Schedule::cron(pattern, "UTC").job("x", |_| async {});
            for hours in [1, 5, 24, 31, 24 * 40, 24 * 400] {
                let now = start + SignedDuration::from_hours(hours);
                let mut expected = None;
                let mut tick = job.schedule.next(start).unwrap().unwrap();
                while tick <= now {
                    expected = Some(tick);
                    tick = job.schedule.next(tick).unwrap().unwrap();
                }
                let mut ticks = Ticks::new(&job, start).unwrap();
                let found = match ticks.poll(now).unwrap() {
                    NextTick::Due { tick, .. } => Some(tick),
                    _ => None,
                };
                assert_eq!(found, expected, "{pattern} after {hours} hours");
            }
        }
    }

    #[test]
    fn a_tick_is_in_time_for_one_minute() {
        let job = Schedule::cron("0 * * * *", "UTC").job("x", |_| async {});
        for (now, in_time) in [("2026-01-01T01:01:00Z", true), ("2026-01-01T01:01:01Z", false)] {
            let mut ticks = Ticks::new(&job, at("2026-01-01T00:00:00Z")).unwrap();
            let due = NextTick::Due { tick: at("2026-01-01T01:00:00Z"), in_time, overtook: None };
            assert_eq!(ticks.poll(at(now)).unwrap(), due);
        }
    }
}
