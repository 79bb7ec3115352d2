//! A metrics recorder for `lockkeeper_ticks_total`.
#![allow(unreachable_pub, clippy::unwrap_used, reason = "every test file is a separate crate")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

/// The counts of the current thread, by labels.
#[derive(Default)]
pub struct TickCounts(Mutex<BTreeMap<String, Arc<AtomicU64>>>);

impl TickCounts {
    pub fn seen(&self) -> Vec<(String, u64)> {
        let counts = self.0.lock().unwrap();
        counts.iter().map(|(text, count)| (text.clone(), count.load(Ordering::SeqCst))).collect()
    }
}

impl Recorder for TickCounts {
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
