//! Helpers shared by the tests of the scheduler.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "every test file is a crate and uses only some of the helpers"
)]

use std::collections::{HashMap, HashSet};
use std::future::{Ready, ready};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use lockkeeper_schedule::Context;
use tokio::time::Instant;

pub fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub fn mins(minutes: u64) -> Duration {
    secs(60 * minutes)
}

pub fn hours(hours: u64) -> Duration {
    mins(60 * hours)
}

/// A wall clock that advances with tokio's clock and can be set.
#[derive(Clone)]
pub struct WallClock {
    start: SystemTime,
    since: Instant,
    /// The seconds by which it was set, in total.
    set: Arc<AtomicI64>,
}

impl WallClock {
    pub fn at(start: &str) -> Self {
        let start: Timestamp = start.parse().unwrap();
        Self { start: start.into(), since: Instant::now(), set: Arc::default() }
    }

    /// Sets the clock forward, or back if `seconds` is negative.
    pub fn set(&self, seconds: i64) {
        self.set.fetch_add(seconds, Ordering::SeqCst);
    }

    pub fn now(&self) -> SystemTime {
        shift(self.start + self.since.elapsed(), self.set.load(Ordering::SeqCst))
    }

    /// Returns the same clock, ahead or behind by some seconds.
    pub fn skewed(&self, seconds: i64) -> impl Fn() -> SystemTime + Send + Sync + Clone + 'static {
        let wall = self.clone();
        move || shift(wall.now(), seconds)
    }
}

pub fn shift(time: SystemTime, seconds: i64) -> SystemTime {
    let by = Duration::from_secs(seconds.unsigned_abs());
    if seconds < 0 { time - by } else { time + by }
}

/// Records which node ran which tick.
#[derive(Clone, Default)]
pub struct RunRecord(Arc<Mutex<Entries>>);

#[derive(Default)]
struct Entries {
    runs: Vec<(String, Timestamp)>,
    delays: Vec<Duration>,
}

impl RunRecord {
    /// Returns a job that records its runs under the name of a node.
    pub fn job(&self, node: &str) -> impl Fn(Context) -> Ready<()> + Send + Sync + 'static {
        let (record, node) = (self.clone(), node.to_owned());
        move |ctx| {
            let tick = Timestamp::try_from(ctx.scheduled_at()).unwrap();
            record.0.lock().unwrap().runs.push((node.clone(), tick));
            ready(())
        }
    }

    /// Returns a job that also records how late its runs start.
    pub fn job_with_delay(
        &self,
        node: &str,
        clock: impl Fn() -> SystemTime + Send + Sync + 'static,
    ) -> impl Fn(Context) -> Ready<()> + Send + Sync + 'static {
        let (job, record) = (self.job(node), self.clone());
        move |ctx| {
            let delay = clock().duration_since(ctx.scheduled_at()).unwrap();
            record.0.lock().unwrap().delays.push(delay);
            job(ctx)
        }
    }

    /// Returns all runs, in order.
    pub fn runs(&self) -> Vec<String> {
        self.0.lock().unwrap().runs.iter().map(|(node, tick)| format!("{node} {tick}")).collect()
    }

    pub fn delays(&self) -> Vec<Duration> {
        self.0.lock().unwrap().delays.clone()
    }

    /// Panics if a tick was run twice. Returns the number of ticks that were run, and of nodes that ran one.
    pub fn assert_each_once(&self) -> (usize, usize) {
        let entries = self.0.lock().unwrap();
        let mut by_tick = HashMap::new();
        for (node, tick) in &entries.runs {
            if let Some(first) = by_tick.insert(*tick, node) {
                panic!("{tick} was run by {first} and by {node}");
            }
        }
        (by_tick.len(), by_tick.values().collect::<HashSet<_>>().len())
    }
}

/// Calls a function when dropped.
pub struct OnDrop<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
