//! A metrics recorder that returns the changes since the last call.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use metrics::{
    Counter, CounterFn, Gauge, Histogram, HistogramFn, Key, KeyName, LocalRecorderGuard, Metadata,
    Recorder, SharedString, Unit, set_default_local_recorder,
};

/// A metric's name and unit.
pub(crate) type Described = (String, Option<Unit>);

/// The recorded values, by name and labels as text.
#[derive(Debug, Clone, Default)]
pub(crate) struct Recorded {
    values: Arc<Mutex<BTreeMap<String, Vec<f64>>>>,
    described: Arc<Mutex<Vec<Described>>>,
}

impl Recorded {
    /// Records the metrics of this thread until the guard is dropped.
    pub(crate) fn install(&self) -> LocalRecorderGuard<'_> {
        set_default_local_recorder(self)
    }

    /// Returns the changes since the last call, sorted: `losses_total memory exclusive broken: 1`.
    pub(crate) fn changes(&self) -> Vec<String> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *values)
            .into_iter()
            .map(|(key, values)| {
                // Timers round up to a millisecond.
                let measured = values.iter().map(|seconds| format!("{seconds:.1} s"));
                let text = if key.contains("_total ") {
                    values.len().to_string()
                } else {
                    measured.collect::<Vec<_>>().join(", ")
                };
                format!("{key}: {text}")
            })
            .collect()
    }

    /// Returns the number of recorded values whose text starts with `prefix`.
    pub(crate) fn count(&self, prefix: &str) -> usize {
        let values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        let matching = values.iter().filter(|(key, _)| key.starts_with(prefix));
        matching.map(|(_, values)| values.len()).sum()
    }

    pub(crate) fn described(&self) -> Vec<Described> {
        self.described.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn series(&self, key: &Key) -> Arc<Series> {
        let name = key.name().strip_prefix("lockkeeper_").unwrap();
        let mut text = name.to_owned();
        for (label, known) in key.labels().zip(["store", "mode", ""]) {
            if known.is_empty() {
                assert!(["outcome", "reason"].contains(&label.key()), "{key}");
            } else {
                assert_eq!(label.key(), known, "{key}");
            }
            text = format!("{text} {}", label.value());
        }
        Arc::new(Series { text, recorded: self.clone() })
    }

    fn describe(&self, key: &KeyName, unit: Option<Unit>) {
        let mut described = self.described.lock().unwrap_or_else(PoisonError::into_inner);
        described.push((key.as_str().to_owned(), unit));
    }
}

impl Recorder for Recorded {
    fn describe_counter(&self, key: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&key, unit);
    }

    fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&key, unit);
    }

    fn describe_histogram(&self, key: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&key, unit);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.series(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        panic!("{key}: there are no gauges")
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.series(key))
    }
}

struct Series {
    text: String,
    recorded: Recorded,
}

impl Series {
    fn push(&self, value: f64) {
        let mut values = self.recorded.values.lock().unwrap_or_else(PoisonError::into_inner);
        values.entry(self.text.clone()).or_default().push(value);
    }
}

impl CounterFn for Series {
    fn increment(&self, value: u64) {
        assert_eq!(value, 1, "counters are incremented by one");
        self.push(1.0);
    }

    fn absolute(&self, value: u64) {
        panic!("set to {value}: counters only grow")
    }
}

impl HistogramFn for Series {
    fn record(&self, value: f64) {
        self.push(value);
    }
}

/// A recorder that panics on every call.
pub(crate) struct Panics;

impl Recorder for Panics {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        panic!("on purpose")
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        panic!("on purpose")
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        panic!("on purpose")
    }
}
