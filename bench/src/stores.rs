//! Which scenarios run on which store.

mod file;
mod idle;
mod postgres;
mod redis;

pub(crate) use file::on_files;
pub(crate) use idle::idle_and_held;
pub(crate) use postgres::on_postgres;
pub(crate) use redis::on_redis;

use std::time::Duration;

use lockkeeper_testkit::server::{PostgresServer, RedisServer};

use crate::bench::Bench;
use crate::implementation::{Implementation, Kind, Outcome, one_line};
use crate::load::Meter;
use crate::report::Section;
use crate::scenarios::{keys, memory, queue, quorum, uncontended};
use crate::{implementations, machine};

pub(crate) const TTL: Duration = Duration::from_secs(30);

/// How uncontended scenarios with a server are run.
const PINNED: &str = "On a runtime with one thread, on a CPU that the server does not use.";
/// The labels of the rows that others are divided by.
pub(crate) const PINGS: &str = "two PINGs, redis-rs";
/// Shows how much of a lock's time is the client's.
pub(crate) const OUR_PINGS: &str = "two PINGs, lockkeeper's client";
pub(crate) const RAW_REDIS: &str = "raw SET NX PX + EVALSHA, retry 1 ms";
pub(crate) const SELECTS: &str = "two SELECT 1";
pub(crate) const RAW_POSTGRES: &str = "raw pg_advisory_lock, a connection each";
pub(crate) const RAW_FILE: &str = "raw open + flock + close";

/// A store: its prefix in section ids, and its name in titles.
#[derive(Clone, Copy)]
struct Store(&'static str, &'static str);

const REDIS: Store = Store("redis", "Redis");
const REDLOCK: Store = Store("redlock", "Redlock");
const POSTGRES: Store = Store("postgres", "PostgreSQL");
const FILES: Store = Store("file", "Files");
const MEMORY: Store = Store("memory", "Memory");

impl Store {
    /// Returns a new section, if it was selected.
    fn section(self, bench: &Bench, scenario: &str, title: &str, text: &str) -> Option<Section> {
        let id = format!("{}/{scenario}", self.0);
        bench.is_selected(&id).then(|| Section::new(&id, &format!("{}: {title}", self.1), text))
    }
}

/// Returns the implementations without those of which there is a tuned variant.
fn tuned(implementations: &[Implementation]) -> Vec<Implementation> {
    let slow = |implementation: &Implementation| {
        implementation.kind == Kind::Peer
            && implementations
                .iter()
                .any(|other| other.kind == Kind::Tuned && other.name == implementation.name)
    };
    implementations.iter().filter(|implementation| !slow(implementation)).cloned().collect()
}

/// Measures hand-offs between tasks that contend for one lock.
async fn queues(
    bench: &mut Bench,
    store: Store,
    implementations: &[Implementation],
    tasks: &[usize],
    meter: Option<Meter<'_>>,
) -> Outcome<()> {
    let text = "Each task locks and releases the one lock in a loop. A hand-off is a grant to another task than the previous one; its time is from before the call of
        release to the next task's guard. Without FIFO order, a task may reacquire the lock that it has just released: that is an acquisition, but not a
        hand-off. Counted after a warm-up.";
    for tasks in tasks {
        let (scenario, title) = (format!("queue-{tasks}"), format!("{tasks} tasks, one lock"));
        if let Some(section) = store.section(bench, &scenario, &title, text) {
            queue::run(bench, section, implementations, *tasks, meter).await?;
        }
    }
    Ok(())
}

/// Measures throughput by number of keys and by number of waiters.
async fn scaling(
    bench: &mut Bench,
    store: Store,
    implementations: &[Implementation],
    keys: &[usize],
    waiters: &[usize],
) -> Outcome<()> {
    // A quick run measures one variant of each crate.
    let is_last = |(index, implementation): &(usize, &Implementation)| {
        !bench.quick
            || implementations[index + 1..].iter().all(|other| other.name != implementation.name)
    };
    let implementations: Vec<Implementation> = implementations
        .iter()
        .enumerate()
        .filter(is_last)
        .map(|(_, implementation)| implementation.clone())
        .collect();
    let text = "As many tasks as keys; locks per second of all of them.";
    let title = "throughput by number of keys";
    if let Some(section) = store.section(bench, "scaling-keys", title, text) {
        keys::scaling(bench, section, &implementations, keys).await?;
    }
    let text = "One lock; hand-offs per second between this many tasks. Implementations that poll use their shortest interval.";
    let title = "hand-offs by number of waiters";
    if let Some(section) = store.section(bench, "scaling-waiters", title, text) {
        queue::scaling(bench, section, &implementations, waiters).await?;
    }
    Ok(())
}

fn wake_section(bench: &Bench, store: Store) -> Option<Section> {
    let text = "One holder, and one waiter in another client: the time from the call of release to the waiter's guard.";
    store.section(bench, "wake", "wake-up of a single waiter", text)
}

fn readers_section(bench: &Bench, store: Store) -> Option<Section> {
    let text = "32 tasks on one lock; 95 of 100 acquisitions read, the rest write.";
    store.section(bench, "readers", "readers and a few writers", text)
}

/// Returns the section for stores that free the lock when the holder's connection or file is closed.
fn killed_section(bench: &Bench, store: Store) -> Option<Section> {
    let text = "The holder's process is killed with SIGKILL: the time from the kill to the waiter's guard.";
    store.section(bench, "takeover", "take-over after kill -9", text)
}

pub(crate) async fn on_redlock(bench: &mut Bench) -> Outcome<()> {
    let text = "Lock and release, uncontended, on a majority of five servers, which share this machine's cores; and with two of
        them stopped (SIGSTOP: connections stay open, but the servers do not answer). Then the keys left on the servers after all locks were released.";
    if let Some(section) = REDLOCK.section(bench, "five", "five servers", text) {
        quorum::run(bench, section).await?;
    }
    Ok(())
}

/// Runs scenarios on a runtime with one thread, with client and server pinned to different CPUs. Otherwise the scheduler
/// decides for each connection, and for an arbitrary time, whether both share a CPU, which changes the times of any
/// implementation by more than a factor of two.
pub(crate) async fn single_threaded(bench: &mut Bench) -> Outcome<()> {
    let title = "lock and release, uncontended";
    let text = format!(
        "One lock without contention, on one connection. Two PINGs are as many round trips, with the redis crate and with Lockkeeper's client. {PINNED}"
    );
    if let Some(section) = REDIS.section(bench, "uncontended", title, &text) {
        let server = machine::on_separate_cpus(RedisServer::start)?.map_err(one_line)?;
        let url = server.url();
        let all = implementations::on_redis(&url, TTL).await?;
        let mut implementations = tuned(&all);
        implementations.extend(implementations::redis_floors(&url).await?);
        // Without contention nothing polls, but distkit's default interval matters: it awaits a tick before the first attempt.
        implementations.extend(
            all.iter()
                .filter(|implementation| {
                    implementation.name == "distkit" && implementation.kind == Kind::Peer
                })
                .cloned(),
        );
        uncontended::run(
            bench,
            section,
            &implementations,
            (PINGS, "in units of two PINGs by redis-rs"),
        )
        .await?;
    }
    let text =
        format!("One lock without contention. Two `SELECT 1` are as many round trips. {PINNED}");
    if let Some(section) = POSTGRES.section(bench, "uncontended", title, &text) {
        let server = machine::on_separate_cpus(PostgresServer::start)?.map_err(one_line)?;
        let url = server.url();
        let mut implementations = implementations::on_postgres(&url, TTL).await?;
        implementations.push(implementations::postgres_floor(&url).await?);
        uncontended::run(bench, section, &implementations, (SELECTS, "in units of two SELECT 1"))
            .await?;
    }
    Ok(())
}

pub(crate) async fn in_memory(bench: &mut Bench) -> Outcome<()> {
    let text = "No server: the cost of the engine. tokio's mutex has no lease, no fence and works in one process.";
    let title = "lock and release, uncontended";
    if let Some(section) = MEMORY.section(bench, "uncontended", title, text) {
        memory::uncontended(bench, section).await?;
    }
    let tasks = bench.either(vec![8, 64, 512], vec![8, 64]);
    queues(bench, MEMORY, &memory::implementations(), &tasks, None).await
}
