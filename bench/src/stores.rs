//! Which works are done on which store.

use std::time::Duration;

use lockkeeper_testkit::server::{PostgresServer, RedisServer};

use crate::bench::Bench;
use crate::make::{Kind, Make, Outcome, told};
use crate::report::Section;
use crate::work::takeover::Place;
use crate::work::{
    held, idle, keys, manners, memory, queue, quorum, readers, takeover, uncontended, wake,
};
use crate::{machine, makes};

const TTL: Duration = Duration::from_secs(30);

/// How those are run that are alone.
const ALONE: &str = "On a runtime with one thread, on a processor that the server does not share.";
/// The floor of Redis in tables.
pub(crate) const PINGS: &str = "two PINGs";
pub(crate) const RAW_REDIS: &str = "raw SET NX PX + EVALSHA, retry 1 ms";
pub(crate) const SELECTS: &str = "two SELECT 1";
pub(crate) const RAW_POSTGRES: &str = "raw pg_advisory_lock, a connection each";
pub(crate) const RAW_FILE: &str = "raw open + flock + close";

/// Those who poll, without those who poll more slowly than they can.
fn tuned(makes: &[Make]) -> Vec<Make> {
    let slow = |make: &Make| {
        make.kind == Kind::Peer
            && makes.iter().any(|other| other.kind == Kind::Tuned && other.name == make.name)
    };
    makes.iter().filter(|make| !slow(make)).cloned().collect()
}

const QUEUE: &str = "Each task locks and releases the one lock in a circle. A hand-over is a grant to another task than the
    last; its time is from before the release is called to the next task's guard. Where there is no order, a task may take the lock again that it has just
    given back: that is a turn, but no hand-over. Counted once everybody has a place.";

pub(crate) async fn on_redis(bench: &mut Bench) -> Outcome<()> {
    let server = RedisServer::start().map_err(told)?;
    let url = server.url();
    let all = makes::on_redis(&url, TTL).await?;
    let best = tuned(&all);
    if bench.wants("redis/keys") {
        let text = "64 tasks, each on a key of its own, all on one client. (`redlock` has a connection for each request.)";
        let section = Section::new("redis/keys", "Redis: 64 tasks on 64 keys", text);
        keys::run(bench, section, &best, (RAW_REDIS, "in units of the raw pair"), Some(&server))
            .await?;
    }
    for tasks in [8, 64, 512] {
        let id = format!("redis/queue-{tasks}");
        if bench.wants(&id) {
            let title = format!("Redis: {tasks} tasks, one lock");
            // A quick run has the slow ones once.
            let makes = if bench.quick && tasks != 64 { &best } else { &all };
            let section = Section::new(&id, &title, QUEUE);
            queue::run(bench, section, makes, tasks, Some(&server)).await?;
        }
    }
    if bench.wants("redis/fairness") {
        let text =
            "One slice for each number of tasks, so long that one turn is less than the bar.";
        let section = Section::new("redis/fairness", "Redis: how evenly turns are dealt", text);
        queue::fairness(bench, section, &all[0], &[8, 64, 512]).await?;
    }
    waiting_on_redis(bench, &server, &all).await?;
    lasting_on_redis(bench, &server).await?;
    scaling(bench, &best).await
}

/// One who waits, and many.
async fn waiting_on_redis(bench: &mut Bench, server: &RedisServer, all: &[Make]) -> Outcome<()> {
    let url = server.url();
    if bench.wants("redis/wake") {
        let others = makes::on_redis(&url, TTL).await?;
        let text = "One holder, and one waiter in another client: from the call of release to the waiter's guard.";
        let section = Section::new("redis/wake", "Redis: wake-up of a single waiter", text);
        wake::run(bench, section, all, &others).await?;
    }
    if bench.wants("redis/idle") {
        let text = "Waiters on a lock that is held at a ttl of 30 s: 1,000 of them, or 100 in a quick run, whose ttl is 2 s
            and whose figure for Lockkeeper is scaled to 30 s. All are in one process, and Lockkeeper's share calls: one waiter alone asks
            every third of its ttl, which is 0.1 in a second. (`redlock` has a thread for each, and is not run.)";
        let section = Section::new("redis/idle", "Redis: waiters with nothing to do", text);
        idle::run(bench, section, server).await?;
    }
    Ok(())
}

/// What holds for long, and what ends otherwise than by a release.
async fn lasting_on_redis(bench: &mut Bench, server: &RedisServer) -> Outcome<()> {
    let url = server.url();
    if bench.wants("redis/held") {
        let text = "10,000 locks at a ttl of 30 s, taken over some seconds (2,000 at 3 s in a quick run); each make in a process
            and on a server of its own, all at the same time. Watched for five thirds of a ttl. (`redlock`, which renews nothing either, is not run.)";
        let section = Section::new("redis/held", "Redis: many held locks", text);
        held::run(bench, section).await?;
    }
    if bench.wants("redis/takeover") {
        let text = "The holder's process is killed with SIGKILL. Leases end by themselves on Redis; what is shown is how long
            after that the only waiter has its guard.";
        let section = Section::new("redis/takeover", "Redis: take-over after kill -9", text);
        let place = Place { store: "redis", at: &url, redis: Some(server) };
        takeover::run(bench, section, place).await?;
    }
    if bench.wants("redis/readers") {
        let makes = makes::shared_on_redis(&url, TTL).await?;
        readers::run(bench, readers_section("redis", "Redis"), &makes).await?;
    }
    if bench.wants("redis/manners") {
        let text = "Not speed: 1 is yes, 0 is no. A lock at a ttl of 1 s is held for 2 s; a guard is dropped without a release; acquires
            of a free lock are dropped at different moments within the first 3 ms or so.";
        let section = Section::new("redis/manners", "Redis: manners", text);
        manners::run(bench, section, server).await?;
    }
    Ok(())
}

async fn scaling(bench: &mut Bench, best: &[Make]) -> Outcome<()> {
    if bench.wants("redis/scaling-keys") {
        let text = "As many tasks as keys; locks per second of all of them. (`redlock` has a thread for each, and is not run.)";
        let section =
            Section::new("redis/scaling-keys", "Redis: throughput by number of keys", text);
        let makes: Vec<Make> =
            best.iter().filter(|make| make.most_tasks == usize::MAX).cloned().collect();
        let points = bench.either(vec![1, 4, 16, 64, 256, 1024], vec![1, 8, 64, 512]);
        keys::scaling(bench, section, &makes, &points).await?;
    }
    if bench.wants("redis/scaling-waiters") {
        let text = "One lock; hand-overs per second between so many tasks, each make with its shortest pause.";
        let section =
            Section::new("redis/scaling-waiters", "Redis: hand-overs by number of waiters", text);
        let points = bench.either(vec![2, 8, 64, 256, 512, 2048], vec![2, 8, 64, 512]);
        let makes: Vec<Make> = best
            .iter()
            .filter(|make| !bench.quick || make.most_tasks == usize::MAX)
            .cloned()
            .collect();
        queue::scaling(bench, section, &makes, &points).await?;
    }
    Ok(())
}

fn readers_section(store: &str, title: &str) -> Section {
    let text = "32 tasks on one lock; 95 of 100 turns read, the rest write. Writers must be alone.";
    Section::new(&format!("{store}/readers"), &format!("{title}: readers and some writers"), text)
}

pub(crate) async fn on_redlock(bench: &mut Bench) -> Outcome<()> {
    if bench.wants("redlock/five") {
        let text = "Lock and release, uncontended, on a majority of five servers, which share this machine's cores; and with two of
            them stopped (SIGSTOP: connections stay open, nobody answers). Then what is left on the servers after everything was released.";
        let section = Section::new("redlock/five", "Redlock: five servers", text);
        quorum::run(bench, section).await?;
    }
    Ok(())
}

pub(crate) async fn on_postgres(bench: &mut Bench) -> Outcome<()> {
    let server = PostgresServer::with_args(&["-c", "max_connections=500"]).map_err(told)?;
    let url = server.url();
    let makes = makes::on_postgres(&url).await?;
    if bench.wants("postgres/keys") {
        let text = "64 tasks, each on a key of its own. The raw one has 64 connections, Lockkeeper as many as it likes.";
        let section = Section::new("postgres/keys", "PostgreSQL: 64 tasks on 64 keys", text);
        keys::run(bench, section, &makes, (RAW_POSTGRES, "in units of the raw one"), None).await?;
    }
    for tasks in [8, 64] {
        let id = format!("postgres/queue-{tasks}");
        if bench.wants(&id) {
            let title = format!("PostgreSQL: {tasks} tasks, one lock");
            queue::run(bench, Section::new(&id, &title, QUEUE), &makes, tasks, None).await?;
        }
    }
    if bench.wants("postgres/wake") {
        let others = makes::on_postgres(&url).await?;
        let text = "One holder, and one waiter in another client: from the call of release to the waiter's guard.";
        let section = Section::new("postgres/wake", "PostgreSQL: wake-up of a single waiter", text);
        wake::run(bench, section, &makes, &others).await?;
    }
    if bench.wants("postgres/takeover") {
        let text = "The holder's process is killed with SIGKILL: from then to the waiter's guard.";
        let section =
            Section::new("postgres/takeover", "PostgreSQL: take-over after kill -9", text);
        let place = Place { store: "postgres", at: &url, redis: None };
        takeover::run(bench, section, place).await?;
    }
    if bench.wants("postgres/readers") {
        let makes = makes::shared_on_postgres(&url).await?;
        readers::run(bench, readers_section("postgres", "PostgreSQL"), &makes).await?;
    }
    Ok(())
}

/// What is done on a runtime with one thread, each of client and server on a processor of its own: otherwise it is the
/// system that decides, for each connection and for as long as it likes, whether the two share one, and that makes a
/// difference of more than two to any make.
pub(crate) async fn alone(bench: &mut Bench) -> Outcome<()> {
    if bench.wants("redis/uncontended") {
        let server = machine::apart(RedisServer::start)?.map_err(told)?;
        let url = server.url();
        let all = makes::on_redis(&url, TTL).await?;
        let mut makes = tuned(&all);
        makes.push(makes::redis_floor(&url).await?);
        // Alone nobody polls, but distkit awaits a tick of its interval first.
        makes.extend(
            all.iter().filter(|make| make.name == "distkit" && make.kind == Kind::Peer).cloned(),
        );
        let text = format!(
            "One lock that nobody else wants, on one connection. Two PINGs are as many round trips. {ALONE}"
        );
        let section =
            Section::new("redis/uncontended", "Redis: lock and release, uncontended", &text);
        uncontended::run(bench, section, &makes, (PINGS, "in units of two PINGs")).await?;
    }
    if bench.wants("postgres/uncontended") {
        let server = machine::apart(PostgresServer::start)?.map_err(told)?;
        let url = server.url();
        let mut makes = makes::on_postgres(&url).await?;
        makes.push(makes::postgres_floor(&url).await?);
        let text = format!(
            "One lock that nobody else wants. Two `SELECT 1` are as many round trips. {ALONE}"
        );
        let title = "PostgreSQL: lock and release, uncontended";
        let section = Section::new("postgres/uncontended", title, &text);
        uncontended::run(bench, section, &makes, (SELECTS, "in units of two SELECT 1")).await?;
    }
    Ok(())
}

pub(crate) async fn on_files(bench: &mut Bench) -> Outcome<()> {
    let dir = tempfile::tempdir().map_err(told)?;
    let makes = makes::on_files(dir.path())?;
    if bench.wants("file/uncontended") {
        let text = "One file that nobody else wants.";
        let section =
            Section::new("file/uncontended", "Files: lock and release, uncontended", text);
        uncontended::run(bench, section, &makes, (RAW_FILE, "in units of the raw one")).await?;
    }
    if bench.wants("file/keys") {
        let text = "64 tasks, each on a file of its own.";
        let section = Section::new("file/keys", "Files: 64 tasks on 64 files", text);
        keys::run(bench, section, &makes, (RAW_FILE, "in units of the raw one"), None).await?;
    }
    for tasks in [8, 64] {
        let id = format!("file/queue-{tasks}");
        if bench.wants(&id) {
            let title = format!("Files: {tasks} tasks, one lock");
            queue::run(bench, Section::new(&id, &title, QUEUE), &makes, tasks, None).await?;
        }
    }
    if bench.wants("file/wake") {
        let others = makes::on_files(dir.path())?;
        let text = "One holder, and one waiter: from the call of release to the waiter's guard.";
        let section = Section::new("file/wake", "Files: wake-up of a single waiter", text);
        wake::run(bench, section, &makes, &others).await?;
    }
    if bench.wants("file/takeover") {
        let text = "The holder's process is killed with SIGKILL: from then to the waiter's guard.";
        let section = Section::new("file/takeover", "Files: take-over after kill -9", text);
        let path = dir.path().display().to_string();
        let place = Place { store: "file", at: &path, redis: None };
        takeover::run(bench, section, place).await?;
    }
    if bench.wants("file/readers") {
        let makes = makes::shared_on_files(dir.path())?;
        readers::run(bench, readers_section("file", "Files"), &makes).await?;
    }
    Ok(())
}

pub(crate) async fn in_memory(bench: &mut Bench) -> Outcome<()> {
    if bench.wants("memory/uncontended") {
        let text = "No server: what the engine costs. tokio's lock has no lease, no fence and no other process.";
        let section =
            Section::new("memory/uncontended", "Memory: lock and release, uncontended", text);
        memory::uncontended(bench, section).await?;
    }
    for tasks in [8, 64, 512] {
        let id = format!("memory/queue-{tasks}");
        if bench.wants(&id) {
            let title = format!("Memory: {tasks} tasks, one lock");
            let section = Section::new(&id, &title, QUEUE);
            queue::run(bench, section, &memory::makes(), tasks, None).await?;
        }
    }
    Ok(())
}
