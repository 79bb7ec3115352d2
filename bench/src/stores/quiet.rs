//! What is held and who waits, while nothing happens: on all stores at the same time, since it is next to nothing.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_testkit::server::{PostgresServer, RedisServer};

use super::{FILES, POSTGRES, REDIS};
use crate::bench::Bench;
use crate::child::{self, Role};
use crate::make::{Kind, Make, Outcome, told};
use crate::report::{Better, Section};
use crate::work::quiet::{Place, Task, database, watch};

/// Said of all that are watched together.
const TOGETHER: &str = "Each make is in a process of its own; all of them, and those that hold or wait on other stores, were watched at the same time, for five thirds of a ttl.";

/// How many, and for how long at a time.
#[derive(Clone, Copy)]
struct Size {
    held: usize,
    waiters: usize,
    ttl: Duration,
}

pub(crate) async fn at_rest(bench: &mut Bench) -> Outcome<()> {
    let ttl = Duration::from_secs(bench.either(30, 3));
    let size = Size { held: bench.either(10_000, 1_000), waiters: bench.either(1000, 100), ttl };
    let mut all = Quiet { sections: Vec::new(), tasks: Vec::new(), size };
    let dir = tempfile::tempdir().map_err(told)?;
    on_redis(bench, &mut all).await?;
    on_postgres(bench, &mut all).await?;
    for section in [held_files(bench), idle_files(bench)] {
        let Some((section, role)) = section else { continue };
        let path = dir.path().display().to_string();
        let makes = child::of("file", &path, ttl).await?;
        let place = all.open(bench, section).await?;
        for make in makes.into_iter().filter(is_peer_or_default) {
            all.add(place, role, make, Place::Files(dir.path().into()));
        }
    }
    if !all.sections.is_empty() {
        // What was done to get there is over by then.
        let settle = bench.ms(1500, 200);
        watch(&mut all.sections, all.tasks, settle, ttl / 3).await;
    }
    for section in all.sections {
        bench.end(section);
    }
    Ok(())
}

/// The sections that are watched together, and what is watched for them.
struct Quiet {
    sections: Vec<Section>,
    tasks: Vec<Task>,
    size: Size,
}

impl Quiet {
    /// Begins a section, and says which one it is.
    async fn open(&mut self, bench: &mut Bench, mut section: Section) -> Outcome<usize> {
        bench.begin(&mut section).await?;
        self.sections.push(section);
        Ok(self.sections.len() - 1)
    }

    fn task(&self, section: usize, role: Role, make: Make, place: Place) -> Task {
        let Size { held, waiters, ttl } = self.size;
        let wanted = if role == Role::Hold { held } else { waiters };
        Task { section, role, make, place, ttl, wanted }
    }

    fn add(&mut self, section: usize, role: Role, make: Make, place: Place) {
        let task = self.task(section, role, make, place);
        self.tasks.push(task);
    }
}

/// Without the bare driver, which renews nothing and waits as its peers do, and without what fences do not change.
fn is_peer_or_default(make: &Make) -> bool {
    make.kind != Kind::Raw && make.variant != "fence off"
}

async fn on_redis(bench: &mut Bench, all: &mut Quiet) -> Outcome<()> {
    let (held, idle) = (held_redis(bench), idle_redis(bench));
    if held.is_none() && idle.is_none() {
        return Ok(());
    }
    let start = || RedisServer::start().map(|server| Place::Redis(Arc::new(server))).map_err(told);
    let server = RedisServer::start().map_err(told)?;
    // `redlock` has a thread for each, and is not run.
    let makes = child::of("redis", &server.url(), all.size.ttl).await?;
    let makes = makes.into_iter().filter(is_peer_or_default);
    let makes: Vec<Make> = makes.filter(|make| make.most_tasks == usize::MAX).collect();
    if let Some(section) = held {
        let place = all.open(bench, section).await?;
        // Those that poll hold as they do with other pauses.
        for make in makes.iter().filter(|make| make.kind != Kind::Tuned) {
            all.add(place, Role::Hold, make.clone(), start()?);
        }
    }
    if let Some(section) = idle {
        let place = all.open(bench, section).await?;
        for make in makes {
            // A quick run has no time for those who ask less often than they can.
            if make.kind == Kind::Ours {
                all.add(place, Role::Wait, make, start()?);
            } else if make.kind == Kind::Tuned || !bench.quick {
                // They poll, and that is not next to nothing: each is alone, and for a shorter time.
                let task = all.task(place, Role::Wait, make, start()?);
                let (settle, window) = (bench.ms(600, 100), bench.ms(300, 100));
                watch(&mut all.sections, vec![task], settle, window).await;
            }
        }
    }
    Ok(())
}

async fn on_postgres(bench: &mut Bench, all: &mut Quiet) -> Outcome<()> {
    let sections = [(held_postgres(bench), Role::Hold), (idle_postgres(bench), Role::Wait)];
    if sections.iter().all(|(section, _)| section.is_none()) {
        return Ok(());
    }
    let server = PostgresServer::with_args(&[
        "-c",
        "max_connections=1500",
        "-c",
        "log_statement=all",
        "-c",
        "log_line_prefix=%d ",
    ]);
    let server = Arc::new(server.map_err(told)?);
    for (section, role) in sections {
        let Some(section) = section else { continue };
        let makes = child::of("postgres", &server.url(), all.size.ttl).await?;
        let place = all.open(bench, section).await?;
        for make in makes.into_iter().filter(is_peer_or_default) {
            all.add(place, role, make, database(&server).await?);
        }
    }
    Ok(())
}

fn held_redis(bench: &Bench) -> Option<Section> {
    let text = format!("10,000 locks at a ttl of 30 s, taken over some seconds (1,000 at 3 s in a quick run), each make on a server of its own. {TOGETHER}
        (`redlock`, which renews nothing either, is not run.)");
    let section = REDIS.section(bench, "held", "many held locks", &text)?;
    Some(
        section
            .column("requests", "requests per second", Better::Neither)
            .column("client", "client % of a core", Better::Low)
            .column("server", "server % of a core", Better::Neither)
            .column("bytes", "client bytes each", Better::Low)
            .column("kept", "still held, %", Better::Neither),
    )
}

fn held_postgres(bench: &Bench) -> Option<Section> {
    let text = format!("As many locks as a make can hold, up to 10,000, at a ttl of 30 s where there is one (1,000 at 3 s in a quick run). Lockkeeper's share
        its 16 connections, the others need one for each lock. Each make has a database of its own on one server; the server's time is that of the processes which
        serve it, and statements are those in the server's log. {TOGETHER}");
    let section = POSTGRES.section(bench, "held", "many held locks", &text)?;
    Some(
        section
            .column("count", "locks", Better::Neither)
            .column("connections", "connections", Better::Neither)
            .column("requests", "statements per second", Better::Neither)
            .column("client", "client % of a core", Better::Neither)
            .column("client-each", "client % of a core per 1,000 locks", Better::Low)
            .column("server", "server % of a core", Better::Neither)
            .column("bytes", "client bytes each", Better::Low)
            .column("kept", "still held, %", Better::Neither),
    )
}

fn held_files(bench: &Bench) -> Option<(Section, Role)> {
    let text = format!(
        "10,000 locks, at a ttl of 30 s where there is one (1,000 at 3 s in a quick run). What is still held is what the kernel says. {TOGETHER}"
    );
    let section = FILES.section(bench, "held", "many held locks", &text)?;
    let section = section
        .column("client", "client % of a core", Better::Low)
        .column("bytes", "client bytes each", Better::Low)
        .column("threads", "threads", Better::Neither)
        .column("kept", "still held, %", Better::Neither);
    Some((section, Role::Hold))
}

fn idle_redis(bench: &Bench) -> Option<Section> {
    let text = "Waiters on a lock that is held at a ttl of 30 s: 1,000 of them, or 100 in a quick run, whose ttl is 3 s and whose rate for Lockkeeper
        is scaled to 30 s. All are in one process, and Lockkeeper's share calls: one waiter alone asks every third of its ttl, which is 0.1 in a second.
        Lockkeeper was watched together with what else holds or waits, for five thirds of a ttl; the others, which poll, one after the other, for five times 0.3 s. (`redlock` has a thread for each, and is not run.)";
    let section = REDIS.section(bench, "idle", "waiters with nothing to do", text)?;
    Some(
        section
            .column("rate", "requests per second and waiter", Better::Low)
            .column("client", "client % of a core", Better::Low)
            .column("server", "server % of a core", Better::Neither)
            .column("kept", "still waiting, %", Better::Neither),
    )
}

fn idle_postgres(bench: &Bench) -> Option<Section> {
    let text = format!("Waiters on a lock that is held: 1,000 of them, or as many as a make can have (100 in a quick run). All of a make are in one process and one
        database on one server; the server's time is that of the processes which serve it, and statements are those in the server's log. {TOGETHER}");
    let section = POSTGRES.section(bench, "idle", "waiters with nothing to do", &text)?;
    Some(
        section
            .column("count", "waiters", Better::Neither)
            .column("connections", "connections", Better::Low)
            .column("rate", "statements per second and waiter", Better::Low)
            .column("client", "client % of a core", Better::Low)
            .column("server", "server % of a core", Better::Neither)
            .column("kept", "still waiting, %", Better::Neither),
    )
}

fn idle_files(bench: &Bench) -> Option<(Section, Role)> {
    let text = format!(
        "1,000 waiters on a lock that is held, or 100 in a quick run; all of a make in one process. {TOGETHER}"
    );
    let section = FILES.section(bench, "idle", "waiters with nothing to do", &text)?;
    let section = section
        .column("client", "client % of a core", Better::Low)
        .column("threads", "threads", Better::Low)
        .column("kept", "still waiting, %", Better::Neither);
    Some((section, Role::Wait))
}
