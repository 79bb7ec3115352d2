//! Ticks on clocks that are set, and on nodes that are suspended.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use common::{RunRecord, WallClock, hours, mins, secs};
use lockkeeper::backend::{Backend, Capabilities, Claim, ClaimSpec, Inspector};
use lockkeeper::{Keeper, Memory, Result};
use lockkeeper_schedule::{Misfire, Running, Schedule, Scheduler};
use lockkeeper_testkit::log::Log;
use lockkeeper_testkit::{Fault, Faulty, Op};
use tokio::time::sleep;

const HOUR: i64 = 3600;

fn start(keeper: Keeper, wall: &WallClock, record: &RunRecord, misfire: Misfire) -> Running {
    let job = Schedule::cron("0 * * * *", "UTC").job("x", record.job("a")).misfire(misfire);
    Scheduler::new(keeper).job(job).clock(wall.skewed(0)).start().unwrap()
}

/// Returns the hours whose ticks were run.
fn hours_of(record: &RunRecord) -> Vec<String> {
    let hour = |run: String| run.split_once('T').unwrap().1.split_once(':').unwrap().0.to_owned();
    record.runs().into_iter().map(hour).collect()
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_is_set_back_repeats_no_tick() {
    let (record, wall) = (RunRecord::default(), WallClock::at("2026-03-01T08:30:00Z"));
    let running = start(Keeper::new(Memory::new()), &wall, &record, Misfire::Skip);
    sleep(hours(3)).await;
    assert_eq!(hours_of(&record), ["09", "10", "11"]);
    // By more than a claim is kept for.
    wall.set(-3 * HOUR);
    sleep(hours(3)).await;
    assert_eq!(hours_of(&record), ["09", "10", "11"]);
    // In small steps, around a tick.
    sleep(mins(29)).await;
    for _ in 0..20 {
        sleep(secs(20)).await;
        wall.set(-15);
    }
    sleep(hours(2)).await;
    assert_eq!(hours_of(&record), ["09", "10", "11", "12", "13", "14"]);
    record.assert_each_once();
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn the_misfire_policy_decides_on_ticks_missed_by_a_clock_that_is_set_forward() {
    for (misfire, expected) in [
        (Misfire::Skip, vec!["09", "14"]),
        (Misfire::RunOnce { within: mins(10) }, vec!["09", "14"]),
        (Misfire::RunOnce { within: mins(30) }, vec!["09", "13", "14"]),
    ] {
        let (record, log) = (RunRecord::default(), Log::start());
        let wall = WallClock::at("2026-03-01T08:45:00Z");
        let running = start(Keeper::new(Memory::new()), &wall, &record, misfire);
        sleep(mins(30)).await;
        wall.set(4 * HOUR);
        sleep(secs(30)).await;
        log.assert_has(&[
            "WARN",
            "too late",
            "=2026-03-01T10:00:00Z",
            "until=2026-03-01T13:00:00Z",
        ]);
        sleep(hours(1)).await;
        assert_eq!(hours_of(&record), expected, "{misfire:?}");
        drop(running);
    }
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_was_a_year_ahead_misses_no_tick_after_it_is_corrected() {
    let (record, wall) = (RunRecord::default(), WallClock::at("2026-03-01T08:45:00Z"));
    let within = Misfire::RunOnce { within: mins(30) };
    let running = start(Keeper::new(Memory::new()), &wall, &record, within);
    sleep(mins(30)).await;
    wall.set(366 * 24 * HOUR);
    sleep(hours(2)).await;
    wall.set(-366 * 24 * HOUR - 2 * HOUR);
    sleep(hours(2)).await;
    let runs = record.runs();
    let this_year: Vec<_> = runs.iter().filter(|run| run.contains(" 2026-")).collect();
    assert_eq!(
        this_year,
        ["a 2026-03-01T09:00:00Z", "a 2026-03-01T10:00:00Z", "a 2026-03-01T11:00:00Z"]
    );
    record.assert_each_once();
    drop(running);
}

/// During the suspension another node may have run the tick, and its claim may have expired.
#[tokio::test(start_paused = true)]
async fn a_node_that_is_suspended_during_its_claim_does_not_run_a_tick_too_late() {
    let (record, log) = (RunRecord::default(), Log::start());
    let wall = WallClock::at("2026-03-01T08:59:00Z");
    let (store, faults) = Faulty::new(Memory::new());
    faults.always(Op::Attempt, Fault::SlowRequest(secs(10)));
    let running = start(Keeper::new(store), &wall, &record, Misfire::Skip);
    sleep(secs(65)).await;
    assert_eq!(faults.asked(Op::Attempt), 1);
    wall.set(HOUR / 2);
    sleep(mins(10)).await;
    assert_eq!(record.runs().len(), 0);
    log.assert_has(&["WARN", "too late", "scheduled_at=2026-03-01T09:00:00Z"]);
    sleep(mins(30)).await;
    assert_eq!(hours_of(&record), ["10"]);
    drop(running);
}

/// The node holds the claim, so no other node has run the tick. A missed tick must still be skipped.
#[tokio::test(start_paused = true)]
async fn a_node_that_is_suspended_between_its_claim_and_its_run_does_not_run_a_tick_too_late() {
    let (record, log) = (RunRecord::default(), Log::start());
    let wall = WallClock::at("2026-03-01T08:59:00Z");
    let (store, faults) = Faulty::new(Memory::new());
    faults.always(Op::Attempt, Fault::SlowRequest(secs(10)));
    let keeper = Keeper::new(store);
    let running = start(keeper.clone(), &wall, &record, Misfire::Skip);
    sleep(secs(75)).await;
    assert_eq!(
        faults.asked(Op::Attempt),
        2,
        "the claim was granted and the attempt on the run lock is in flight"
    );
    wall.set(HOUR / 2);
    sleep(mins(10)).await;
    assert_eq!(record.runs().len(), 0);
    log.assert_has(&["WARN", "too late", "scheduled_at=2026-03-01T09:00:00Z"]);
    assert!(keeper.inspect().unwrap().show("schedule/run/x").await.unwrap().is_empty());
    sleep(mins(30)).await;
    assert_eq!(hours_of(&record), ["10"]);
    drop(running);
}

/// Declares a store as one without leases.
#[derive(Debug)]
struct WithoutLeases<B>(B);

impl<B: Backend> Backend for WithoutLeases<B> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { leases: false, ..self.0.capabilities() }
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        self.0.claim(spec)
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.0.inspector()
    }
}

/// Models a suspension that outlasts the session but not the time in which a tick may run.
#[tokio::test(start_paused = true)]
async fn a_node_whose_claim_is_lost_before_its_run_does_not_run_the_tick() {
    let (record, log) = (RunRecord::default(), Log::start());
    let wall = WallClock::at("2026-03-01T08:59:00Z");
    let (store, faults) = Faulty::new(Memory::new());
    faults.always(Op::Attempt, Fault::SlowRequest(secs(10)));
    let keeper = Keeper::new(WithoutLeases(store));
    let running = start(keeper.clone(), &wall, &record, Misfire::Skip);
    sleep(secs(75)).await;
    assert_eq!(
        faults.asked(Op::Attempt),
        2,
        "the claim was granted and the attempt on the run lock is in flight"
    );
    let claim = "schedule/tick/2026-03-01T09:00:00Z/x";
    assert_eq!(keeper.inspect().unwrap().break_lock(claim).await.unwrap(), 1);
    sleep(mins(10)).await;
    assert_eq!(record.runs().len(), 0);
    log.assert_has(&[
        "WARN",
        "the claim on the tick was lost",
        "scheduled_at=2026-03-01T09:00:00Z",
    ]);
    sleep(mins(60)).await;
    assert_eq!(hours_of(&record), ["10"]);
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn each_job_runs_once_in_a_night_with_a_daylight_saving_change() {
    for (evening, three, half) in [
        ("2026-03-28T23:00:00Z", "2026-03-29T01:00:00Z", "2026-03-29T01:00:00Z"),
        ("2026-10-24T23:00:00Z", "2026-10-25T02:00:00Z", "2026-10-25T00:30:00Z"),
    ] {
        let (record, wall) = (RunRecord::default(), WallClock::at(evening));
        let berlin = |pattern| Schedule::cron(pattern, "Europe/Berlin");
        let at_three = berlin("0 3 * * *").job("three", record.job("three"));
        let at_half = berlin("30 2 * * *").job("half", record.job("half"));
        let scheduler = Scheduler::new(Keeper::new(Memory::new())).job(at_three).job(at_half);
        let running = scheduler.clock(wall.skewed(0)).start().unwrap();
        sleep(hours(5)).await;
        let mut runs = record.runs();
        runs.sort();
        assert_eq!(runs, [format!("half {half}"), format!("three {three}")]);
        drop(running);
    }
}
