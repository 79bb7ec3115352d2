//! The metric `lockkeeper_ticks_total`.
#![cfg(feature = "metrics")]
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;
mod recorder;

use common::{RunRecord, WallClock, mins};
use lockkeeper::{Keeper, Memory};
use lockkeeper_schedule::{Schedule, Scheduler};
use lockkeeper_testkit::{Fault, Faulty};
use recorder::TickCounts;
use tokio::time::sleep;

#[tokio::test(start_paused = true)]
async fn ticks_are_counted_by_job_and_outcome() {
    let ticks = TickCounts::default();
    let _here = metrics::set_default_local_recorder(&ticks);
    let wall = WallClock::at("2026-03-01T00:00:30Z");
    let (store, faults) = Faulty::new(Memory::new());
    let job = Schedule::cron("* * * * *", "UTC").job("nightly", RunRecord::default().job("a"));
    let scheduler = Scheduler::new(Keeper::new(store)).job(job).clock(wall.skewed(0));
    let running = scheduler.start().unwrap();
    sleep(mins(2)).await;
    assert_eq!(ticks.seen(), [("job=nightly outcome=ran".to_owned(), 2)]);
    faults.everything(Fault::Refused);
    sleep(mins(3)).await;
    faults.none();
    sleep(mins(1)).await;
    let expected = [("job=nightly outcome=ran", 3), ("job=nightly outcome=unavailable", 3)];
    assert_eq!(ticks.seen(), expected.map(|(text, count)| (text.to_owned(), count)));
    drop(running);
}
