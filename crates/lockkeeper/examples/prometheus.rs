//! Prints the metrics of some locks in the text format of Prometheus.
//!
//! `cargo run -p lockkeeper --features metrics --example prometheus`
//!
//! The exporter is a minimal recorder for the `metrics` crate. In a program, use `metrics-exporter-prometheus`, which
//! serves HTTP.
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};

use lockkeeper::{Keeper, Memory};
use metrics::{
    Counter, CounterFn, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};

// On one thread, so that every counter is updated before the report is printed.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let exporter = Exporter::default();
    metrics::set_global_recorder(exporter.clone()).map_err(|error| error.to_string())?;
    lockkeeper::describe_metrics();

    let keeper = Keeper::new(Memory::new());
    let orders = keeper.mutex("orders/42");
    let guard = orders.lock().await?;
    assert!(orders.try_lock().await?.is_none());
    let (next, released) = tokio::join!(orders.lock(), guard.release());
    released?;
    drop(next?);

    let report = keeper.rw_lock("report").read().await?;
    keeper.inspect()?.break_lock("report").await?;
    report.lost().await;
    keeper.close().await;

    let text = exporter.text();
    print!("{text}");
    for line in [
        r#"lockkeeper_acquisitions_total{store="memory",mode="exclusive",outcome="not_acquired"} 1"#,
        r#"lockkeeper_wait_seconds_count{store="memory",mode="exclusive",outcome="granted_after_wait"} 1"#,
        r#"lockkeeper_losses_total{store="memory",mode="shared",reason="broken"} 1"#,
    ] {
        assert!(text.contains(line), "{line} is missing");
    }
    Ok(())
}

/// The upper bounds of a histogram's buckets.
const BUCKETS: [f64; 4] = [0.01, 1.0, 60.0, f64::INFINITY];

/// All metrics by name and labels, shared by clones.
#[derive(Clone, Default)]
struct Exporter(Arc<Mutex<Metrics>>);

#[derive(Default)]
struct Metrics {
    help: BTreeMap<String, SharedString>,
    counters: BTreeMap<String, BTreeMap<String, Arc<Count>>>,
    histograms: BTreeMap<String, BTreeMap<String, Arc<Measured>>>,
}

#[derive(Default)]
struct Count(Mutex<u64>);

#[derive(Default)]
struct Measured(Mutex<Vec<f64>>);

impl Exporter {
    fn with<T>(&self, work: impl FnOnce(&mut Metrics) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the report in the text format.
    fn text(&self) -> String {
        self.with(|metrics| metrics.text()).unwrap_or_default()
    }
}

impl Metrics {
    fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        let none = SharedString::const_str("");
        let help = |name| self.help.get(name).unwrap_or(&none);
        for (name, series) in &self.counters {
            writeln!(text, "# HELP {name} {}\n# TYPE {name} counter", help(name))?;
            for (labels, count) in series {
                let count = count.0.lock().unwrap_or_else(PoisonError::into_inner);
                writeln!(text, "{name}{{{labels}}} {count}")?;
            }
        }
        for (name, series) in &self.histograms {
            writeln!(text, "# HELP {name} {}\n# TYPE {name} histogram", help(name))?;
            for (labels, measured) in series {
                let values = measured.0.lock().unwrap_or_else(PoisonError::into_inner);
                for bound in BUCKETS {
                    let within = values.iter().filter(|value| **value <= bound).count();
                    let bound = if bound.is_finite() { bound.to_string() } else { "+Inf".into() };
                    writeln!(text, "{name}_bucket{{{labels},le=\"{bound}\"}} {within}")?;
                }
                writeln!(text, "{name}_sum{{{labels}}} {}", values.iter().sum::<f64>())?;
                writeln!(text, "{name}_count{{{labels}}} {}", values.len())?;
            }
        }
        Ok(text)
    }
}

/// Formats labels for the text format. The labels of locks need no escaping.
fn labels(key: &Key) -> String {
    let labels = key.labels().map(|label| format!("{}=\"{}\"", label.key(), label.value()));
    labels.collect::<Vec<_>>().join(",")
}

impl Recorder for Exporter {
    fn describe_counter(&self, name: KeyName, _: Option<Unit>, help: SharedString) {
        self.with(|metrics| metrics.help.insert(name.as_str().into(), help));
    }

    fn describe_gauge(&self, name: KeyName, _: Option<Unit>, help: SharedString) {
        self.with(|metrics| metrics.help.insert(name.as_str().into(), help));
    }

    fn describe_histogram(&self, name: KeyName, _: Option<Unit>, help: SharedString) {
        self.with(|metrics| metrics.help.insert(name.as_str().into(), help));
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        self.with(|metrics| {
            let series = metrics.counters.entry(key.name().into()).or_default();
            Counter::from_arc(series.entry(labels(key)).or_default().clone())
        })
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop() // Lockkeeper has no gauges
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        self.with(|metrics| {
            let series = metrics.histograms.entry(key.name().into()).or_default();
            Histogram::from_arc(series.entry(labels(key)).or_default().clone())
        })
    }
}

impl CounterFn for Count {
    fn increment(&self, by: u64) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) += by;
    }

    fn absolute(&self, value: u64) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = value;
    }
}

impl HistogramFn for Measured {
    fn record(&self, value: f64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(value);
    }
}
