//! Many locks that are held, and many who wait for one that is not given back: what it costs when nothing happens.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use lockkeeper_testkit::server::{PostgresServer, RedisServer};

use crate::bench::REPETITIONS;
use crate::child::{Orders, Process, Role};
use crate::figures::Figure;
use crate::load::{self, Load, Meter};
use crate::make::{Kind, Make, Outcome, fresh, told};
use crate::makes;
use crate::report::Section;

/// What a make has for itself, so that it is known what it costs.
#[derive(Clone)]
pub(crate) enum Place {
    Redis(Arc<RedisServer>),
    /// A database, by its name: one server has many.
    Postgres(Arc<PostgresServer>, String),
    Files(PathBuf),
}

impl Place {
    fn meter(&self) -> Option<Meter<'_>> {
        match self {
            Self::Redis(server) => Some(Meter::Redis(server)),
            Self::Postgres(server, database) => Some(Meter::Database(server, database)),
            Self::Files(_) => None,
        }
    }

    /// The store, and where it is.
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

/// Makes a new database on a server, for one make alone.
pub(crate) async fn database(server: &Arc<PostgresServer>) -> Outcome<Place> {
    let name = fresh("quiet").replace('-', "_");
    let client = makes::connect_postgres(&server.url()).await?;
    client.batch_execute(&format!("CREATE DATABASE {name}")).await.map_err(told)?;
    Ok(Place::Postgres(server.clone(), name))
}

/// One make that is to be watched, for a section.
pub(crate) struct Task {
    /// Which of the sections it is for.
    pub(crate) section: usize,
    pub(crate) role: Role,
    pub(crate) make: Make,
    pub(crate) place: Place,
    pub(crate) ttl: Duration,
    /// How many locks or waiters there should be.
    pub(crate) wanted: usize,
}

impl Task {
    /// As many as were wanted, or as it can have.
    fn count(&self) -> usize {
        let most = if self.role == Role::Hold { self.make.most_held } else { self.make.most_tasks };
        self.wanted.min(most)
    }
}

/// A task that is under way, in a process of its own.
struct Subject {
    task: Task,
    process: Process,
    key: String,
}

/// What a task has cost so far.
struct Reading {
    at: Instant,
    server: Option<Load>,
    /// Seconds of processor time.
    client: f64,
}

impl Subject {
    async fn start(task: Task) -> (Task, Outcome<(Process, String)>) {
        let key = fresh("quiet");
        let (store, place) = task.place.address();
        let orders = Orders {
            role: task.role,
            store: store.into(),
            place,
            make: task.make.label(),
            ttl_ms: u64::try_from(task.ttl.as_millis()).unwrap_or(u64::MAX),
            key: key.clone(),
            count: task.count(),
        };
        let process = Process::start(&orders).await;
        (task, process.map(|process| (process, key)))
    }

    fn read(&self) -> Reading {
        let at = Instant::now();
        let server = self.task.place.meter().map(|meter| meter.read(&self.task.make));
        Reading { at, server, client: load::processor_time(self.process.pid()) }
    }

    /// How many of its locks are still held, in percent: all are counted, but on Redis some are looked at.
    async fn kept(&self) -> Outcome<f64> {
        let count = self.task.count();
        let held = match &self.task.place {
            Place::Redis(server) => {
                let is_held = |number: &usize| {
                    let key = self.task.make.key_of(&format!("{}-{number}", self.key));
                    server.command(&["EXISTS", &key]) == "1"
                };
                let step = (count / 100).max(1);
                let looked_at = (0..count).step_by(step);
                let part = looked_at.clone().count() as f64 / count as f64;
                looked_at.filter(is_held).count() as f64 / part
            }
            Place::Postgres(server, database) => {
                let client = makes::connect_postgres(&database_url(server, database)).await?;
                let rows = client.query_one(include_str!("held.sql"), &[]).await.map_err(told)?;
                rows.get::<_, i64>(0) as f64
            }
            Place::Files(_) => load::locked_files(self.process.pid()),
        };
        Ok(held / count as f64 * 100.0)
    }
}

/// Starts all tasks and, once each has got where it is to be, watches them for five windows, all at the same time.
pub(crate) async fn watch(
    sections: &mut [Section],
    tasks: Vec<Task>,
    settle: Duration,
    window: Duration,
) {
    // Not too many at once: until it has come to rest, each may want a whole core.
    let mut starting =
        futures_util::stream::iter(tasks.into_iter().map(Subject::start)).buffered(3);
    let mut subjects = Vec::new();
    while let Some((task, started)) = starting.next().await {
        let row = sections[task.section].row(&task.make);
        let Some((process, key)) = row.worked(started) else { continue };
        let (count, wanted) = (task.count(), task.wanted);
        row.put_once("count", Some(count as f64));
        row.put_once("bytes", Some(process.bytes / count as f64));
        if count < wanted {
            row.note(format!("{count}, not {wanted}: it needs a connection for each"));
        }
        subjects.push(Subject { task, process, key });
    }
    tokio::time::sleep(settle).await;
    for repetition in 0..REPETITIONS {
        let before: Vec<_> = subjects.iter().map(Subject::read).collect();
        tokio::time::sleep(window).await;
        for (subject, before) in subjects.iter().zip(before) {
            put(sections, subject, repetition, (&before, &subject.read()));
        }
    }
    for subject in &mut subjects {
        finish(sections, subject).await;
    }
}

fn put(
    sections: &mut [Section],
    subject: &Subject,
    repetition: usize,
    (before, now): (&Reading, &Reading),
) {
    let Task { section, role, make, ttl, .. } = &subject.task;
    let count = subject.task.count() as f64;
    let row = sections[*section].row(make);
    let mut put = |key: &str, value: f64| row.put(key, repetition, Some(value));
    let seconds = now.at.duration_since(before.at).as_secs_f64();
    let client = (now.client - before.client) / seconds * 100.0;
    put("client", client);
    put("client-each", client / count * 1000.0);
    if let Some(threads) = load::threads(subject.process.pid()) {
        put("threads", threads);
    }
    if let (Some(now), Some(before)) = (&now.server, &before.server) {
        let requests = now.requests_since(before) / seconds;
        put("requests", requests);
        put("server", now.processor_since(before) / seconds * 100.0);
        put("connections", now.connections);
        // Who waits with us asks every third of its ttl: the rate is that of 30 s, whatever the ttl was.
        let ours = *role == Role::Wait && make.kind == Kind::Ours;
        let scale = if ours { ttl.as_secs_f64() / 30.0 } else { 1.0 };
        put("rate", requests * scale / count);
    }
}

/// Looks whether all is still as it was.
async fn finish(sections: &mut [Section], subject: &mut Subject) {
    let row = sections[subject.task.section].row(&subject.task.make);
    let count = subject.task.count() as f64;
    match subject.task.role {
        Role::Hold => {
            let kept = row.worked(subject.kept().await);
            row.put_once("kept", kept);
            let silent = row.figures.get("requests").and_then(Figure::most) == Some(0.0);
            if silent && kept < Some(100.0) {
                row.note("**does not renew: what is held longer than its ttl is lost**");
            }
        }
        Role::Wait => {
            let waiting = row.worked(subject.process.waiting().await);
            let Some((waiting, why)) = waiting else { return };
            row.put_once("kept", Some(waiting / count * 100.0));
            if waiting < count {
                let over = count - waiting;
                row.note(format!("{over} of {count} no longer waited at the end: {why}"));
            }
        }
    }
}
