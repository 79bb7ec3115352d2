//! The ticks of a schedule: patterns, time zones, daylight saving time.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use lockkeeper::ErrorKind;
use lockkeeper_schedule::Schedule;

/// Returns all ticks after `from`, up to and including `to`.
fn ticks(schedule: &Schedule, from: &str, to: &str) -> Vec<Timestamp> {
    let (mut at, to): (Timestamp, Timestamp) = (from.parse().unwrap(), to.parse().unwrap());
    let mut ticks = Vec::new();
    while let Some(next) = next(schedule, at).filter(|next| *next <= to) {
        assert!(next > at, "{next} after {at}");
        ticks.push(next);
        at = next;
    }
    ticks
}

fn next(schedule: &Schedule, after: Timestamp) -> Option<Timestamp> {
    let next = schedule.next_after(SystemTime::from(after)).unwrap();
    next.map(|next| Timestamp::try_from(next).unwrap())
}

fn texts(ticks: &[Timestamp]) -> Vec<String> {
    ticks.iter().map(Timestamp::to_string).collect()
}

#[test]
fn a_job_at_three_in_berlin_is_due_once_on_each_day_of_the_year() {
    let schedule = Schedule::cron("0 3 * * *", "Europe/Berlin");
    let ticks = ticks(&schedule, "2025-12-31T23:00:00Z", "2026-12-31T23:00:00Z");
    assert_eq!(ticks.len(), 365);
    let zone = jiff::tz::TimeZone::get("Europe/Berlin").unwrap();
    let mut day = jiff::civil::date(2026, 1, 1);
    for tick in ticks {
        let local = tick.to_zoned(zone.clone());
        assert_eq!((local.date(), local.hour(), local.minute()), (day, 3, 0));
        day = day.tomorrow().unwrap();
    }
}

#[test]
fn a_time_that_does_not_exist_is_due_once_at_the_end_of_the_gap() {
    let schedule = Schedule::cron("30 2 * * *", "Europe/Berlin");
    // On 29 March 2026 the local time jumps from 01:59 to 03:00.
    let ticks = ticks(&schedule, "2026-03-27T22:00:00Z", "2026-03-30T22:00:00Z");
    let expected = ["2026-03-28T01:30:00Z", "2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"];
    assert_eq!(texts(&ticks), expected);
}

#[test]
fn a_time_that_exists_twice_is_due_the_first_time() {
    let schedule = Schedule::cron("30 2 * * *", "Europe/Berlin");
    // On 25 October 2026 the local time jumps from 02:59 to 02:00.
    let ticks = ticks(&schedule, "2026-10-23T22:00:00Z", "2026-10-26T22:00:00Z");
    let expected = ["2026-10-24T00:30:00Z", "2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"];
    assert_eq!(texts(&ticks), expected);
}

#[test]
fn an_hourly_pattern_skips_the_gap_and_is_due_in_both_of_the_repeated_hours() {
    let schedule = Schedule::cron("30 * * * *", "Europe/Berlin");
    let spring = ticks(&schedule, "2026-03-29T00:00:00Z", "2026-03-29T02:00:00Z");
    assert_eq!(texts(&spring), ["2026-03-29T00:30:00Z", "2026-03-29T01:30:00Z"]);
    let autumn = ticks(&schedule, "2026-10-25T00:00:00Z", "2026-10-25T02:00:00Z");
    assert_eq!(texts(&autumn), ["2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z"]);
    let quarters = Schedule::cron("*/15 * * * *", "Europe/Berlin");
    let day = ticks(&quarters, "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z");
    assert_eq!(day.len(), 25 * 4, "the day has 25 hours");
}

#[test]
fn every_counts_seconds_and_ignores_time_zones() {
    let hourly = Schedule::every(Duration::from_secs(3600));
    let year = ticks(&hourly, "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z");
    assert_eq!(year.len(), 365 * 24);
    assert!(year.windows(2).all(|two| two[1].duration_since(two[0]).as_secs() == 3600));
    assert!(year.iter().all(|tick| tick.as_second() % 3600 == 0));
    // An interval that does not divide a day continues across midnight, and before 1970.
    let odd = Schedule::every(Duration::from_millis(1500));
    let ticks = ticks(&odd, "1969-12-31T23:59:58Z", "1970-01-01T00:00:02Z");
    assert_eq!(
        texts(&ticks),
        ["1969-12-31T23:59:58.5Z", "1970-01-01T00:00:00Z", "1970-01-01T00:00:01.5Z"]
    );
}

/// If two searches disagreed on a tick, two nodes would each run it.
#[test]
fn nodes_agree_on_the_ticks_regardless_of_when_they_search() {
    let nights = [
        ("Europe/Berlin", "2026-03-28T20:00:00Z"),
        ("Europe/Berlin", "2026-10-24T20:00:00Z"),
        ("America/New_York", "2026-03-08T02:00:00Z"),
        ("America/New_York", "2026-11-01T02:00:00Z"),
        // The clock changes by half an hour.
        ("Australia/Lord_Howe", "2026-10-03T10:00:00Z"),
        ("Australia/Lord_Howe", "2026-04-04T10:00:00Z"),
        // The clock changes at midnight.
        ("America/Santiago", "2026-09-05T23:00:00Z"),
        ("America/Santiago", "2026-04-04T23:00:00Z"),
        ("UTC", "2026-12-31T20:00:00Z"),
    ];
    let patterns = [
        "30 2 * * *",
        "0 3 * * *",
        "0 0 * * *",
        "15,45 0-3 * * *",
        "*/20 * * * *",
        "10 */2 * * *",
        "59 23 * * *",
        "15 30 2 * * *",
    ];
    for (zone, start) in nights {
        let start: Timestamp = start.parse().unwrap();
        let end = start + jiff::SignedDuration::from_hours(36);
        for pattern in patterns {
            let schedule = Schedule::cron(pattern, zone);
            let all = ticks(&schedule, &start.to_string(), &end.to_string());
            let mut at = start;
            while at < *all.last().unwrap() {
                let expected = all.iter().find(|tick| **tick > at).copied();
                assert_eq!(
                    next(&schedule, at),
                    expected,
                    "{pattern} in {zone}, searched from {at}"
                );
                at += jiff::SignedDuration::from_millis(97_500);
            }
            for tick in &all {
                let before = *tick - jiff::SignedDuration::from_nanos(1);
                assert_eq!(next(&schedule, before), Some(*tick), "{pattern} in {zone}");
            }
        }
    }
}

/// Compared with the local time of every minute of a day.
#[test]
fn a_recurring_pattern_is_due_whenever_the_local_time_matches() {
    for (zone, start) in [
        ("Europe/Berlin", "2026-03-28T20:00:00Z"),
        ("Europe/Berlin", "2026-10-24T20:00:00Z"),
        ("Australia/Lord_Howe", "2026-04-04T10:00:00Z"),
        ("America/Santiago", "2026-09-05T23:00:00Z"),
    ] {
        let start: Timestamp = start.parse().unwrap();
        let end = start + jiff::SignedDuration::from_hours(24);
        let found =
            ticks(&Schedule::cron("*/25 0-4 * * *", zone), &start.to_string(), &end.to_string());
        let minutes = (1..=24 * 60).map(|i| start + jiff::SignedDuration::from_mins(i));
        let expected = minutes.filter(|minute| {
            let local = minute.in_tz(zone).unwrap();
            local.hour() <= 4 && local.minute() % 25 == 0
        });
        assert_eq!(found, expected.collect::<Vec<_>>(), "{zone}");
    }
}

#[test]
fn a_day_that_a_time_zone_skips_does_not_end_the_schedule() {
    // Samoa skipped 30 December 2011.
    let schedule = Schedule::cron("0 12 * * *", "Pacific/Apia");
    let ticks = ticks(&schedule, "2011-12-28T00:00:00Z", "2012-01-02T00:00:00Z");
    assert!(ticks.len() >= 4, "{ticks:?}");
    assert_eq!(ticks.last().unwrap().to_string(), "2012-01-01T22:00:00Z");
}

#[test]
fn an_invalid_schedule_is_an_error_that_names_the_cause() {
    let wrong = |schedule: Schedule, text: &str| {
        let error = schedule.next_after(SystemTime::UNIX_EPOCH).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption);
        assert!(error.to_string().contains(text), "{error}");
        assert!(!error.to_string().contains('\n'), "{error}");
    };
    wrong(Schedule::cron("0 25 * * *", "UTC"), "cron pattern \"0 25 * * *\"");
    wrong(Schedule::cron("", "UTC"), "cron pattern \"\"");
    wrong(Schedule::cron("* * *", "UTC"), "cron pattern");
    wrong(Schedule::cron("0 3 * * *", "Europe/Bonn"), "unknown time zone \"Europe/Bonn\"");
    wrong(Schedule::cron("0 3 * * *", "../../etc/passwd"), "unknown time zone");
    wrong(Schedule::every(Duration::ZERO), "0ns is too short: the minimum is 1s");
}

#[test]
fn a_schedule_without_further_ticks_has_no_next_tick() {
    let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    assert_eq!(Schedule::cron("0 0 30 2 *", "UTC").next_after(start).unwrap(), None);
    assert_eq!(Schedule::every(Duration::MAX).next_after(start).unwrap(), None);
    let leap = Schedule::cron("0 0 29 2 *", "UTC").next_after(start).unwrap().unwrap();
    assert_eq!(Timestamp::try_from(leap).unwrap().to_string(), "2028-02-29T00:00:00Z");
}
