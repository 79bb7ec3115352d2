//! What became of ticks, as a metric.
#![cfg(feature = "metrics")]
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod kit;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use kit::{Ledger, Wall, mins};
use lockkeeper::{Keeper, Memory};
use lockkeeper_schedule::{Schedule, Scheduler};
use lockkeeper_testkit::{Fault, Faulty};
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use tokio::time::sleep;

/// Counts what happens on this thread.
#[derive(Default)]
struct Ticks(Mutex<BTreeMap<String, Arc<AtomicU64>>>);

impl Ticks {
    fn seen(&self) -> Vec<(String, u64)> {
        let counts = self.0.lock().unwrap();
        counts.iter().map(|(text, count)| (text.clone(), count.load(Ordering::SeqCst))).collect()
    }
}

impl Recorder for Ticks {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        if key.name() != "lockkeeper_ticks_total" {
            return Counter::noop();
        }
        let labels = key.labels().map(|label| format!("{}={}", label.key(), label.value()));
        let text = labels.collect::<Vec<_>>().join(" ");
        Counter::from_arc(self.0.lock().unwrap().entry(text).or_default().clone())
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[tokio::test(start_paused = true)]
async fn ticks_are_counted_by_job_and_outcome() {
    let ticks = Ticks::default();
    let _here = metrics::set_default_local_recorder(&ticks);
    let wall = Wall::at("2026-03-01T00:00:30Z");
    let (store, faults) = Faulty::new(Memory::new());
    let job = Schedule::cron("* * * * *", "UTC").job("nightly", Ledger::default().note("a"));
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
