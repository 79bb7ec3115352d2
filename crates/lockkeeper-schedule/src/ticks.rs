//! Which tick is next, on a clock that may be set.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use lockkeeper_core::Result;

use crate::job::{Job, Misfire};
use crate::lived::Lived;
use crate::schedule::Schedule;

/// How often to look at the clock at least: timers do not hear of it when it is set, nor when the machine
/// was asleep.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// A job's ticks as this node comes by them.
#[derive(Debug)]
pub(crate) struct Ticks {
    schedule: Schedule,
    jitter: Duration,
    latest: Duration,
    /// Ticks up to here have been decided on, or are of no interest.
    position: Timestamp,
    /// When the clock was looked at last.
    looked: Timestamp,
    lived: Lived,
    /// The next tick from the position on, and how long after it to try.
    awaited: Option<(Timestamp, Duration)>,
}

/// What there is to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// Nothing for so long.
    Wait(Duration),
    /// Some ticks are due.
    Due {
        /// The last of them.
        tick: Timestamp,
        /// Whether it is still time for it.
        in_time: bool,
        /// The first of those that it overtook.
        overtook: Option<Timestamp>,
    },
    /// There is no tick any more.
    Over,
}

impl Ticks {
    pub(crate) fn new(job: &Job, now: Timestamp) -> Result<Self> {
        let mut ticks = Self {
            schedule: job.schedule.clone(),
            jitter: job.jitter,
            latest: job.latest(),
            position: now,
            looked: now,
            lived: Lived::default(),
            awaited: None,
        };
        if let Misfire::RunOnce { within } = job.misfire {
            // Of those that came before this node, the last is of interest, and the others not missed.
            let first = ticks.next(earlier(now, within))?.filter(|first| *first <= now);
            if let Some(first) = first {
                ticks.position = just_before(ticks.last(first, now)?);
            }
        }
        Ok(ticks)
    }

    /// Looks at the clock. What is due is due once.
    pub(crate) fn look(&mut self, now: Timestamp) -> Result<Look> {
        if now < self.looked {
            // The clock was set back. What lies before us again was lived already, but for what it
            // had been set over.
            self.position = self.position.min(now);
            self.awaited = None;
        }
        self.looked = now;
        let Some((first, delay)) = self.await_next()? else { return Ok(Look::Over) };
        let late = since(now, first);
        if now < first || late < delay {
            let left = since(first, now) + delay.saturating_sub(late);
            return Ok(Look::Wait(left.min(LOOK_EVERY)));
        }
        let tick = self.last(first, now)?;
        let (overtook, from) = if tick == first {
            (None, self.position)
        } else {
            // Those in between were not decided on: should the clock be set back, they may come yet.
            (Some(first), just_before(tick))
        };
        self.lived.add(from, tick);
        self.position = tick;
        self.awaited = None;
        Ok(Look::Due { tick, in_time: since(now, tick) <= self.latest, overtook })
    }

    fn await_next(&mut self) -> Result<Option<(Timestamp, Duration)>> {
        if self.awaited.is_none() {
            let next = self.next(self.position)?;
            self.awaited = next.map(|tick| (tick, self.jitter.mul_f64(fastrand::f64())));
        }
        Ok(self.awaited)
    }

    /// The next tick that was not decided on.
    fn next(&self, after: Timestamp) -> Result<Option<Timestamp>> {
        let mut tick = self.schedule.next(after)?;
        while let Some(end) = tick.and_then(|tick| self.lived.end_of(tick)) {
            tick = self.schedule.next(end)?;
        }
        Ok(tick)
    }

    /// The last tick from `first` on that is due. There may be millions of them, so it is looked for from
    /// the end.
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

/// How long it is from one time to another that is later; zero if it is not.
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
    fn a_clock_that_is_years_ahead_is_caught_up_with_at_once() {
        let job = Schedule::every(Duration::from_secs(1)).job("x", |_| async {});
        let mut ticks = Ticks::new(&job, at("2026-01-01T00:00:00Z")).unwrap();
        // There were 220 thousand million ticks in between.
        let due = ticks.look(at("9000-01-01T00:00:00.5Z")).unwrap();
        let (tick, first) = (at("9000-01-01T00:00:00Z"), at("2026-01-01T00:00:01Z"));
        assert_eq!(due, Look::Due { tick, in_time: true, overtook: Some(first) });
        let wait = Duration::from_millis(500);
        assert_eq!(ticks.look(at("9000-01-01T00:00:00.5Z")).unwrap(), Look::Wait(wait));
    }

    #[test]
    fn the_last_of_those_that_are_due_is_found_however_they_are_spread() {
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
                let found = match ticks.look(now).unwrap() {
                    Look::Due { tick, .. } => Some(tick),
                    _ => None,
                };
                assert_eq!(found, expected, "{pattern} after {hours} hours");
            }
        }
    }

    #[test]
    fn what_is_too_late_is_not_tried() {
        let job = Schedule::cron("0 * * * *", "UTC").job("x", |_| async {});
        for (now, in_time) in [("2026-01-01T01:01:00Z", true), ("2026-01-01T01:01:01Z", false)] {
            let mut ticks = Ticks::new(&job, at("2026-01-01T00:00:00Z")).unwrap();
            let due = Look::Due { tick: at("2026-01-01T01:00:00Z"), in_time, overtook: None };
            assert_eq!(ticks.look(at(now)).unwrap(), due);
        }
    }
}
