//! What the tests of the scheduler share.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "every test file is a crate, and uses a part of it"
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

/// A clock that goes with tokio's, and can be set.
#[derive(Clone)]
pub struct Wall {
    start: SystemTime,
    since: Instant,
    /// By how many seconds it was set.
    set: Arc<AtomicI64>,
}

impl Wall {
    pub fn at(start: &str) -> Self {
        let start: Timestamp = start.parse().unwrap();
        Self { start: start.into(), since: Instant::now(), set: Arc::default() }
    }

    /// Sets it forward, or back.
    pub fn set(&self, seconds: i64) {
        self.set.fetch_add(seconds, Ordering::SeqCst);
    }

    pub fn now(&self) -> SystemTime {
        shift(self.start + self.since.elapsed(), self.set.load(Ordering::SeqCst))
    }

    /// The same clock, some seconds ahead or behind.
    pub fn skewed(&self, seconds: i64) -> impl Fn() -> SystemTime + Send + Sync + Clone + 'static {
        let wall = self.clone();
        move || shift(wall.now(), seconds)
    }
}

pub fn shift(time: SystemTime, seconds: i64) -> SystemTime {
    let by = Duration::from_secs(seconds.unsigned_abs());
    if seconds < 0 { time - by } else { time + by }
}

/// Who ran what.
#[derive(Clone, Default)]
pub struct Ledger(Arc<Mutex<Entries>>);

#[derive(Default)]
struct Entries {
    runs: Vec<(String, Timestamp)>,
    delays: Vec<Duration>,
}

impl Ledger {
    /// A job that notes its runs.
    pub fn note(&self, who: &str) -> impl Fn(Context) -> Ready<()> + Send + Sync + 'static {
        let (ledger, who) = (self.clone(), who.to_owned());
        move |ctx| {
            let tick = Timestamp::try_from(ctx.scheduled_at()).unwrap();
            ledger.0.lock().unwrap().runs.push((who.clone(), tick));
            ready(())
        }
    }

    /// The same, with how late they are.
    pub fn note_with_delay(
        &self,
        who: &str,
        clock: impl Fn() -> SystemTime + Send + Sync + 'static,
    ) -> impl Fn(Context) -> Ready<()> + Send + Sync + 'static {
        let (note, ledger) = (self.note(who), self.clone());
        move |ctx| {
            let delay = clock().duration_since(ctx.scheduled_at()).unwrap();
            ledger.0.lock().unwrap().delays.push(delay);
            note(ctx)
        }
    }

    /// All runs, in order.
    pub fn runs(&self) -> Vec<String> {
        self.0.lock().unwrap().runs.iter().map(|(who, tick)| format!("{who} {tick}")).collect()
    }

    pub fn delays(&self) -> Vec<Duration> {
        self.0.lock().unwrap().delays.clone()
    }

    /// Fails if a tick was run twice; how many there were, and how many had one.
    pub fn assert_each_once(&self) -> (usize, usize) {
        let entries = self.0.lock().unwrap();
        let mut by_tick = HashMap::new();
        for (who, tick) in &entries.runs {
            if let Some(before) = by_tick.insert(*tick, who) {
                panic!("{tick} was run by {before} and by {who}");
            }
        }
        (by_tick.len(), by_tick.values().collect::<HashSet<_>>().len())
    }
}

/// Does something when it is dropped.
pub struct OnDrop<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
