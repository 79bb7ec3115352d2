//! Which works are done on which store.

mod file;
mod postgres;
mod quiet;
mod redis;

pub(crate) use file::on_files;
pub(crate) use postgres::on_postgres;
pub(crate) use quiet::at_rest;
pub(crate) use redis::on_redis;

use std::time::Duration;

use lockkeeper_testkit::server::{PostgresServer, RedisServer};

use crate::bench::Bench;
use crate::load::Meter;
use crate::make::{Kind, Make, Outcome, told};
use crate::report::Section;
use crate::work::{keys, memory, queue, quorum, uncontended};
use crate::{machine, makes};

pub(crate) const TTL: Duration = Duration::from_secs(30);

/// How those are run that are alone.
const ALONE: &str = "On a runtime with one thread, on a processor that the server does not share.";
/// The floor of Redis in tables.
pub(crate) const PINGS: &str = "two PINGs";
pub(crate) const RAW_REDIS: &str = "raw SET NX PX + EVALSHA, retry 1 ms";
pub(crate) const SELECTS: &str = "two SELECT 1";
pub(crate) const RAW_POSTGRES: &str = "raw pg_advisory_lock, a connection each";
pub(crate) const RAW_FILE: &str = "raw open + flock + close";

/// A store, as in the names of sections and as in their titles.
#[derive(Clone, Copy)]
struct Store(&'static str, &'static str);

const REDIS: Store = Store("redis", "Redis");
const REDLOCK: Store = Store("redlock", "Redlock");
const POSTGRES: Store = Store("postgres", "PostgreSQL");
const FILES: Store = Store("file", "Files");
const MEMORY: Store = Store("memory", "Memory");

impl Store {
    /// A section, if it was asked for.
    fn section(self, bench: &Bench, work: &str, title: &str, text: &str) -> Option<Section> {
        let id = format!("{}/{work}", self.0);
        bench.wants(&id).then(|| Section::new(&id, &format!("{}: {title}", self.1), text))
    }
}

/// Those who poll, without those who poll more slowly than they can.
fn tuned(makes: &[Make]) -> Vec<Make> {
    let slow = |make: &Make| {
        make.kind == Kind::Peer
            && makes.iter().any(|other| other.kind == Kind::Tuned && other.name == make.name)
    };
    makes.iter().filter(|make| !slow(make)).cloned().collect()
}

/// So many tasks, and one lock.
async fn queues(
    bench: &mut Bench,
    store: Store,
    makes: &[Make],
    tasks: &[usize],
    meter: Option<Meter<'_>>,
) -> Outcome<()> {
    let text = "Each task locks and releases the one lock in a circle. A hand-over is a grant to another task than the
        last; its time is from before the release is called to the next task's guard. Where there is no order, a task may take the lock again that it has just
        given back: that is a turn, but no hand-over. Counted once everybody has a place.";
    for tasks in tasks {
        let (work, title) = (format!("queue-{tasks}"), format!("{tasks} tasks, one lock"));
        if let Some(section) = store.section(bench, &work, &title, text) {
            queue::run(bench, section, makes, *tasks, meter).await?;
        }
    }
    Ok(())
}

/// Throughput by number of keys and by number of waiters.
async fn scaling(
    bench: &mut Bench,
    store: Store,
    makes: &[Make],
    keys: &[usize],
    waiters: &[usize],
) -> Outcome<()> {
    // In a quick run one of each crate has to do.
    let is_last = |(place, make): &(usize, &Make)| {
        !bench.quick || makes[place + 1..].iter().all(|other| other.name != make.name)
    };
    let makes: Vec<Make> =
        makes.iter().enumerate().filter(is_last).map(|(_, make)| make.clone()).collect();
    let text = "As many tasks as keys; locks per second of all of them.";
    let title = "throughput by number of keys";
    if let Some(section) = store.section(bench, "scaling-keys", title, text) {
        keys::scaling(bench, section, &makes, keys).await?;
    }
    let text = "One lock; hand-overs per second between so many tasks. Whoever polls does so with its shortest pause.";
    let title = "hand-overs by number of waiters";
    if let Some(section) = store.section(bench, "scaling-waiters", title, text) {
        queue::scaling(bench, section, &makes, waiters).await?;
    }
    Ok(())
}

fn wake_section(bench: &Bench, store: Store) -> Option<Section> {
    let text = "One holder, and one waiter in another client: from the call of release to the waiter's guard.";
    store.section(bench, "wake", "wake-up of a single waiter", text)
}

fn readers_section(bench: &Bench, store: Store) -> Option<Section> {
    let text = "32 tasks on one lock; 95 of 100 turns read, the rest write. Writers must be alone.";
    store.section(bench, "readers", "readers and some writers", text)
}

/// Where nothing runs out: the kill itself frees the lock.
fn killed_section(bench: &Bench, store: Store) -> Option<Section> {
    let text = "The holder's process is killed with SIGKILL: from then to the waiter's guard.";
    store.section(bench, "takeover", "take-over after kill -9", text)
}

pub(crate) async fn on_redlock(bench: &mut Bench) -> Outcome<()> {
    let text = "Lock and release, uncontended, on a majority of five servers, which share this machine's cores; and with two of
        them stopped (SIGSTOP: connections stay open, nobody answers). Then what is left on the servers after everything was released.";
    if let Some(section) = REDLOCK.section(bench, "five", "five servers", text) {
        quorum::run(bench, section).await?;
    }
    Ok(())
}

/// What is done on a runtime with one thread, each of client and server on a processor of its own: otherwise it is the
/// system that decides, for each connection and for as long as it likes, whether the two share one, and that makes a
/// difference of more than two to any make.
pub(crate) async fn alone(bench: &mut Bench) -> Outcome<()> {
    let title = "lock and release, uncontended";
    let text = format!(
        "One lock that nobody else wants, on one connection. Two PINGs are as many round trips. {ALONE}"
    );
    if let Some(section) = REDIS.section(bench, "uncontended", title, &text) {
        let server = machine::apart(RedisServer::start)?.map_err(told)?;
        let url = server.url();
        let all = makes::on_redis(&url, TTL).await?;
        let mut makes = tuned(&all);
        makes.push(makes::redis_floor(&url).await?);
        // Alone nobody polls, but distkit awaits a tick of its interval first.
        makes.extend(
            all.iter().filter(|make| make.name == "distkit" && make.kind == Kind::Peer).cloned(),
        );
        uncontended::run(bench, section, &makes, (PINGS, "in units of two PINGs")).await?;
    }
    let text =
        format!("One lock that nobody else wants. Two `SELECT 1` are as many round trips. {ALONE}");
    if let Some(section) = POSTGRES.section(bench, "uncontended", title, &text) {
        let server = machine::apart(PostgresServer::start)?.map_err(told)?;
        let url = server.url();
        let mut makes = makes::on_postgres(&url, TTL).await?;
        makes.push(makes::postgres_floor(&url).await?);
        uncontended::run(bench, section, &makes, (SELECTS, "in units of two SELECT 1")).await?;
    }
    Ok(())
}

pub(crate) async fn in_memory(bench: &mut Bench) -> Outcome<()> {
    let text = "No server: what the engine costs. tokio's lock has no lease, no fence and no other process.";
    let title = "lock and release, uncontended";
    if let Some(section) = MEMORY.section(bench, "uncontended", title, text) {
        memory::uncontended(bench, section).await?;
    }
    let tasks = bench.either(vec![8, 64, 512], vec![8, 64]);
    queues(bench, MEMORY, &memory::makes(), &tasks, None).await
}
