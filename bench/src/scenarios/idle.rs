//! The idle cost of many held locks, and of many waiters for a lock that is not released.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use lockkeeper_testkit::server::{PostgresServer, RedisServer};

use crate::bench::REPETITIONS;
use crate::child::{ChildArgs, Process, Role};
use crate::figures::Figure;
use crate::implementation::{Implementation, Kind, Outcome, one_line, unique_name};
use crate::implementations;
use crate::load::{self, Load, Meter};
use crate::report::Section;

/// The store instance of one implementation. It is not shared, so that the cost of the implementation can be measured.
#[derive(Clone)]
pub(crate) enum Instance {
    Redis(Arc<RedisServer>),
    /// A database, by its name. Several databases share one server.
    Postgres(Arc<PostgresServer>, String),
    Files(PathBuf),
}

impl Instance {
    fn meter(&self) -> Option<Meter<'_>> {
        match self {
            Self::Redis(server) => Some(Meter::Redis(server)),
            Self::Postgres(server, database) => Some(Meter::Database(server, database)),
            Self::Files(_) => None,
        }
    }

    /// Returns the kind of store, and its address.
    fn address(&self) -> (&'static str, String) {
        match self {
            Self::Redis(server) => ("redis", server.url()),
            Self::Postgres(server, database) => ("postgres", database_url(server, database)),
            Self::Files(dir) => ("file", dir.display().to_string()),
        }
    }
}

fn database_url(server: &PostgresServer, database: &str) -> String {
    server.url().trim_end_matches("postgres").to_owned() + database
}

/// Creates a database for one implementation.
pub(crate) async fn database(server: &Arc<PostgresServer>) -> Outcome<Instance> {
    let name = unique_name("idle").replace('-', "_");
    let client = implementations::connect_postgres(&server.url()).await?;
    client.batch_execute(&format!("CREATE DATABASE {name}")).await.map_err(one_line)?;
    Ok(Instance::Postgres(server.clone(), name))
}

/// One implementation that is measured while idle, for one section.
pub(crate) struct IdleTest {
    /// The index of the section.
    pub(crate) section: usize,
    pub(crate) role: Role,
    pub(crate) implementation: Implementation,
    pub(crate) instance: Instance,
    pub(crate) ttl: Duration,
    /// The intended number of locks or waiters.
    pub(crate) wanted: usize,
}

impl IdleTest {
    /// Returns the number of locks or waiters: `wanted`, or the maximum of the implementation.
    fn count(&self) -> usize {
        let max = if self.role == Role::Hold {
            self.implementation.max_held
        } else {
            self.implementation.max_tasks
        };
        self.wanted.min(max)
    }
}

/// A test that runs in a child process.
struct RunningTest {
    test: IdleTest,
    process: Process,
    key: String,
}

/// What a test has cost so far.
struct Sample {
    at: Instant,
    server: Option<Load>,
    /// CPU seconds.
    client: f64,
}

impl RunningTest {
    async fn start(test: IdleTest) -> (IdleTest, Outcome<(Process, String)>) {
        let key = unique_name("idle");
        let (store, address) = test.instance.address();
        let args = ChildArgs {
            role: test.role,
            store: store.into(),
            address,
            implementation: test.implementation.label(),
            ttl_ms: u64::try_from(test.ttl.as_millis()).unwrap_or(u64::MAX),
            key: key.clone(),
            count: test.count(),
        };
        let process = Process::start(&args).await;
        (test, process.map(|process| (process, key)))
    }

    fn sample(&self) -> Sample {
        let at = Instant::now();
        let server = self.test.instance.meter().map(|meter| meter.read(&self.test.implementation));
        Sample { at, server, client: load::processor_time(self.process.pid()) }
    }

    /// Returns the percentage of locks that are still held. On Redis, about 100 of them are checked.
    async fn percent_held(&self) -> Outcome<f64> {
        let count = self.test.count();
        let held = match &self.test.instance {
            Instance::Redis(server) => {
                let is_held = |number: &usize| {
                    let key = self.test.implementation.key_of(&format!("{}-{number}", self.key));
                    server.command(&["EXISTS", &key]) == "1"
                };
                let step = (count / 100).max(1);
                let sampled = (0..count).step_by(step);
                let part = sampled.clone().count() as f64 / count as f64;
                sampled.filter(is_held).count() as f64 / part
            }
            Instance::Postgres(server, database) => {
                let client =
                    implementations::connect_postgres(&database_url(server, database)).await?;
                let rows =
                    client.query_one(include_str!("held.sql"), &[]).await.map_err(one_line)?;
                rows.get::<_, i64>(0) as f64
            }
            Instance::Files(_) => load::locked_files(self.process.pid()),
        };
        Ok(held / count as f64 * 100.0)
    }
}

/// Starts all tests. When all are ready, measures their cost concurrently, over five windows.
pub(crate) async fn watch(
    sections: &mut [Section],
    tests: Vec<IdleTest>,
    settle_time: Duration,
    window: Duration,
) {
    // Three at a time: until it is idle, each may use a whole core.
    let mut starting =
        futures_util::stream::iter(tests.into_iter().map(RunningTest::start)).buffered(3);
    let mut running = Vec::new();
    while let Some((test, started)) = starting.next().await {
        let row = sections[test.section].row(&test.implementation);
        let Some((process, key)) = row.ok_or_record(started) else { continue };
        let (count, wanted) = (test.count(), test.wanted);
        row.record_once("count", Some(count as f64));
        row.record_once("bytes", Some(process.bytes / count as f64));
        if count < wanted {
            row.note(format!("{count}, not {wanted}: it needs a connection per lock or waiter"));
        }
        running.push(RunningTest { test, process, key });
    }
    tokio::time::sleep(settle_time).await;
    for repetition in 0..REPETITIONS {
        let before: Vec<_> = running.iter().map(RunningTest::sample).collect();
        tokio::time::sleep(window).await;
        for (running, before) in running.iter().zip(before) {
            record(sections, running, repetition, (&before, &running.sample()));
        }
    }
    for running in &mut running {
        check_still_running(sections, running).await;
    }
}

fn record(
    sections: &mut [Section],
    running: &RunningTest,
    repetition: usize,
    (before, now): (&Sample, &Sample),
) {
    let IdleTest { section, role, implementation, ttl, .. } = &running.test;
    let count = running.test.count() as f64;
    let row = sections[*section].row(implementation);
    let mut record = |key: &str, value: f64| row.record(key, repetition, Some(value));
    let seconds = now.at.duration_since(before.at).as_secs_f64();
    let client = (now.client - before.client) / seconds * 100.0;
    record("client", client);
    record("client-each", client / count * 1000.0);
    if let Some(threads) = load::threads(running.process.pid()) {
        record("threads", threads);
    }
    if let (Some(now), Some(before)) = (&now.server, &before.server) {
        let requests = now.requests_since(before) / seconds;
        record("requests", requests);
        record("server", now.processor_since(before) / seconds * 100.0);
        record("connections", now.connections);
        // Lockkeeper's waiters send a request every third of the TTL: scale the rate to a TTL of 30 s.
        let ours = *role == Role::Wait && implementation.kind == Kind::Ours;
        let scale = if ours { ttl.as_secs_f64() / 30.0 } else { 1.0 };
        record("rate", requests * scale / count);
    }
}

/// Checks that all locks are still held, or that all waiters still wait.
async fn check_still_running(sections: &mut [Section], running: &mut RunningTest) {
    let row = sections[running.test.section].row(&running.test.implementation);
    let count = running.test.count() as f64;
    match running.test.role {
        Role::Hold => {
            let kept = row.ok_or_record(running.percent_held().await);
            row.record_once("remaining", kept);
            let silent = row.figures.get("requests").and_then(Figure::max) == Some(0.0);
            if silent && kept < Some(100.0) {
                row.note("**does not renew: a lock held longer than its TTL is lost**");
            }
        }
        Role::Wait => {
            let waiting = row.ok_or_record(running.process.waiting().await);
            let Some((waiting, why)) = waiting else { return };
            row.record_once("remaining", Some(waiting / count * 100.0));
            if waiting < count {
                let over = count - waiting;
                row.note(format!(
                    "{over} of {count} waiters had stopped waiting at the end: {why}"
                ));
            }
        }
    }
}
