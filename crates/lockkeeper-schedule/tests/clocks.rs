//! Clocks that are set, machines that are stopped, and how ticks fare.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use common::{Ledger, Wall, hours, mins, secs};
use lockkeeper::backend::{Backend, Capabilities, Claim, ClaimSpec, Inspector};
use lockkeeper::{Keeper, Memory, Result};
use lockkeeper_schedule::{Misfire, Running, Schedule, Scheduler};
use lockkeeper_testkit::log::Log;
use lockkeeper_testkit::{Fault, Faulty, Op};
use tokio::time::sleep;

const HOUR: i64 = 3600;

fn start(keeper: Keeper, wall: &Wall, ledger: &Ledger, misfire: Misfire) -> Running {
    let job = Schedule::cron("0 * * * *", "UTC").job("x", ledger.note("a")).misfire(misfire);
    Scheduler::new(keeper).job(job).clock(wall.skewed(0)).start().unwrap()
}

/// The hours of which the job was run.
fn hours_of(ledger: &Ledger) -> Vec<String> {
    let hour = |run: String| run.split_once('T').unwrap().1.split_once(':').unwrap().0.to_owned();
    ledger.runs().into_iter().map(hour).collect()
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_is_set_back_brings_no_tick_again() {
    let (ledger, wall) = (Ledger::default(), Wall::at("2026-03-01T08:30:00Z"));
    let running = start(Keeper::new(Memory::new()), &wall, &ledger, Misfire::Skip);
    sleep(hours(3)).await;
    assert_eq!(hours_of(&ledger), ["09", "10", "11"]);
    // By more than any claim is kept for.
    wall.set(-3 * HOUR);
    sleep(hours(3)).await;
    assert_eq!(hours_of(&ledger), ["09", "10", "11"]);
    // Little by little, around a tick.
    sleep(mins(29)).await;
    for _ in 0..20 {
        sleep(secs(20)).await;
        wall.set(-15);
    }
    sleep(hours(2)).await;
    assert_eq!(hours_of(&ledger), ["09", "10", "11", "12", "13", "14"]);
    ledger.assert_each_once();
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_is_set_forward_leaves_what_it_missed_to_the_policy() {
    for (misfire, expected) in [
        (Misfire::Skip, vec!["09", "14"]),
        (Misfire::RunOnce { within: mins(10) }, vec!["09", "14"]),
        (Misfire::RunOnce { within: mins(30) }, vec!["09", "13", "14"]),
    ] {
        let (ledger, log) = (Ledger::default(), Log::start());
        let wall = Wall::at("2026-03-01T08:45:00Z");
        let running = start(Keeper::new(Memory::new()), &wall, &ledger, misfire);
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
        assert_eq!(hours_of(&ledger), expected, "{misfire:?}");
        drop(running);
    }
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_was_a_year_ahead_for_a_while_costs_no_tick_when_it_is_right_again() {
    let (ledger, wall) = (Ledger::default(), Wall::at("2026-03-01T08:45:00Z"));
    let within = Misfire::RunOnce { within: mins(30) };
    let running = start(Keeper::new(Memory::new()), &wall, &ledger, within);
    sleep(mins(30)).await;
    wall.set(366 * 24 * HOUR);
    sleep(hours(2)).await;
    wall.set(-366 * 24 * HOUR - 2 * HOUR);
    sleep(hours(2)).await;
    let runs = ledger.runs();
    let this_year: Vec<_> = runs.iter().filter(|run| run.contains(" 2026-")).collect();
    assert_eq!(
        this_year,
        ["a 2026-03-01T09:00:00Z", "a 2026-03-01T10:00:00Z", "a 2026-03-01T11:00:00Z"]
    );
    ledger.assert_each_once();
    drop(running);
}

/// Another node may have run the tick, and its claim have ended, while this one stood still.
#[tokio::test(start_paused = true)]
async fn a_node_that_is_stopped_on_its_way_to_the_store_does_not_run_when_it_is_too_late() {
    let (ledger, log) = (Ledger::default(), Log::start());
    let wall = Wall::at("2026-03-01T08:59:00Z");
    let (store, faults) = Faulty::new(Memory::new());
    faults.always(Op::Attempt, Fault::SlowRequest(secs(10)));
    let running = start(Keeper::new(store), &wall, &ledger, Misfire::Skip);
    sleep(secs(65)).await;
    assert_eq!(faults.asked(Op::Attempt), 1);
    wall.set(HOUR / 2);
    sleep(mins(10)).await;
    assert_eq!(ledger.runs().len(), 0);
    log.assert_has(&["WARN", "too late", "scheduled_at=2026-03-01T09:00:00Z"]);
    sleep(mins(30)).await;
    assert_eq!(hours_of(&ledger), ["10"]);
    drop(running);
}

/// The claim is its own, and so nobody else has run the tick; but a missed tick is to be skipped.
#[tokio::test(start_paused = true)]
async fn a_node_that_is_stopped_between_its_claim_and_its_run_does_not_run_when_it_is_too_late() {
    let (ledger, log) = (Ledger::default(), Log::start());
    let wall = Wall::at("2026-03-01T08:59:00Z");
    let (store, faults) = Faulty::new(Memory::new());
    faults.always(Op::Attempt, Fault::SlowRequest(secs(10)));
    let keeper = Keeper::new(store);
    let running = start(keeper.clone(), &wall, &ledger, Misfire::Skip);
    sleep(secs(75)).await;
    assert_eq!(faults.asked(Op::Attempt), 2, "it has the claim, and asks for the lock of the run");
    wall.set(HOUR / 2);
    sleep(mins(10)).await;
    assert_eq!(ledger.runs().len(), 0);
    log.assert_has(&["WARN", "too late", "scheduled_at=2026-03-01T09:00:00Z"]);
    assert!(keeper.inspect().unwrap().show("schedule/run/x").await.unwrap().is_empty());
    sleep(mins(30)).await;
    assert_eq!(hours_of(&ledger), ["10"]);
    drop(running);
}

/// A store whose holds end with their process.
#[derive(Debug)]
struct Sessions<B>(B);

impl<B: Backend> Backend for Sessions<B> {
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

/// As after a stop that was longer than the session lasts, and shorter than a tick may be late.
#[tokio::test(start_paused = true)]
async fn a_node_whose_claim_is_lost_before_its_run_leaves_the_tick_to_whoever_has_it() {
    let (ledger, log) = (Ledger::default(), Log::start());
    let wall = Wall::at("2026-03-01T08:59:00Z");
    let (store, faults) = Faulty::new(Memory::new());
    faults.always(Op::Attempt, Fault::SlowRequest(secs(10)));
    let keeper = Keeper::new(Sessions(store));
    let running = start(keeper.clone(), &wall, &ledger, Misfire::Skip);
    sleep(secs(75)).await;
    assert_eq!(faults.asked(Op::Attempt), 2, "it has the claim, and asks for the lock of the run");
    let claim = "schedule/tick/2026-03-01T09:00:00Z/x";
    assert_eq!(keeper.inspect().unwrap().break_lock(claim).await.unwrap(), 1);
    sleep(mins(10)).await;
    assert_eq!(ledger.runs().len(), 0);
    log.assert_has(&[
        "WARN",
        "the claim on the tick was lost",
        "scheduled_at=2026-03-01T09:00:00Z",
    ]);
    sleep(mins(60)).await;
    assert_eq!(hours_of(&ledger), ["10"]);
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn in_the_nights_in_which_the_clocks_change_each_job_runs_once() {
    for (evening, three, half) in [
        ("2026-03-28T23:00:00Z", "2026-03-29T01:00:00Z", "2026-03-29T01:00:00Z"),
        ("2026-10-24T23:00:00Z", "2026-10-25T02:00:00Z", "2026-10-25T00:30:00Z"),
    ] {
        let (ledger, wall) = (Ledger::default(), Wall::at(evening));
        let berlin = |pattern| Schedule::cron(pattern, "Europe/Berlin");
        let at_three = berlin("0 3 * * *").job("three", ledger.note("three"));
        let at_half = berlin("30 2 * * *").job("half", ledger.note("half"));
        let scheduler = Scheduler::new(Keeper::new(Memory::new())).job(at_three).job(at_half);
        let running = scheduler.clock(wall.skewed(0)).start().unwrap();
        sleep(hours(5)).await;
        let mut runs = ledger.runs();
        runs.sort();
        assert_eq!(runs, [format!("half {half}"), format!("three {three}")]);
        drop(running);
    }
}
