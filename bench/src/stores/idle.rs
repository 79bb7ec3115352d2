//! Held locks and idle waiters, measured on all stores concurrently, because they cost next to nothing.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_testkit::server::{PostgresServer, RedisServer};

use super::{FILES, POSTGRES, REDIS};
use crate::bench::Bench;
use crate::child::{self, Role};
use crate::implementation::{Implementation, Kind, Outcome, one_line};
use crate::report::{Better, Section};
use crate::scenarios::idle::{IdleTest, Instance, database, watch};

/// The text of sections that are measured concurrently.
const CONCURRENTLY: &str = "Each implementation runs in its own process. All of them, on all stores, were measured concurrently, for five thirds of a TTL.";

/// How many locks and waiters, and their TTL.
#[derive(Clone, Copy)]
struct Size {
    held: usize,
    waiters: usize,
    ttl: Duration,
}

pub(crate) async fn idle_and_held(bench: &mut Bench) -> Outcome<()> {
    let ttl = Duration::from_secs(bench.either(30, 3));
    let size = Size { held: bench.either(10_000, 1_000), waiters: bench.either(1000, 100), ttl };
    let mut all = IdleRun { sections: Vec::new(), tests: Vec::new(), size };
    let dir = tempfile::tempdir().map_err(one_line)?;
    on_redis(bench, &mut all).await?;
    on_postgres(bench, &mut all).await?;
    for section in [held_files(bench), idle_files(bench)] {
        let Some((section, role)) = section else { continue };
        let path = dir.path().display().to_string();
        let implementations = child::implementations_on("file", &path, ttl).await?;
        let index = all.open(bench, section).await?;
        for implementation in implementations.into_iter().filter(is_peer_or_default) {
            all.add(index, role, implementation, Instance::Files(dir.path().into()));
        }
    }
    if !all.sections.is_empty() {
        // Long enough for the setup to finish.
        let settle_time = bench.ms(1500, 200);
        watch(&mut all.sections, all.tests, settle_time, ttl / 3).await;
    }
    for section in all.sections {
        bench.end(section);
    }
    Ok(())
}

/// The sections that are measured concurrently, and their tests.
struct IdleRun {
    sections: Vec<Section>,
    tests: Vec<IdleTest>,
    size: Size,
}

impl IdleRun {
    /// Begins a section and returns its index.
    async fn open(&mut self, bench: &mut Bench, mut section: Section) -> Outcome<usize> {
        bench.begin(&mut section).await?;
        self.sections.push(section);
        Ok(self.sections.len() - 1)
    }

    fn test(
        &self,
        section: usize,
        role: Role,
        implementation: Implementation,
        instance: Instance,
    ) -> IdleTest {
        let Size { held, waiters, ttl } = self.size;
        let wanted = if role == Role::Hold { held } else { waiters };
        IdleTest { section, role, implementation, instance, ttl, wanted }
    }

    fn add(
        &mut self,
        section: usize,
        role: Role,
        implementation: Implementation,
        instance: Instance,
    ) {
        let test = self.test(section, role, implementation, instance);
        self.tests.push(test);
    }
}

/// Excludes the bare driver, which renews nothing and waits like its peers, and variants without fences, which cost the same when idle.
fn is_peer_or_default(implementation: &Implementation) -> bool {
    implementation.kind != Kind::Raw && implementation.variant != "fence off"
}

async fn on_redis(bench: &mut Bench, all: &mut IdleRun) -> Outcome<()> {
    let (held, idle) = (held_redis(bench), idle_redis(bench));
    if held.is_none() && idle.is_none() {
        return Ok(());
    }
    let start =
        || RedisServer::start().map(|server| Instance::Redis(Arc::new(server))).map_err(one_line);
    let server = RedisServer::start().map_err(one_line)?;
    // `redlock` needs a thread per lock, and is not run.
    let implementations = child::implementations_on("redis", &server.url(), all.size.ttl).await?;
    let implementations = implementations.into_iter().filter(is_peer_or_default);
    let implementations: Vec<Implementation> =
        implementations.filter(|implementation| implementation.max_tasks == usize::MAX).collect();
    if let Some(section) = held {
        let index = all.open(bench, section).await?;
        // The retry interval does not matter for held locks.
        for implementation in
            implementations.iter().filter(|implementation| implementation.kind != Kind::Tuned)
        {
            all.add(index, Role::Hold, implementation.clone(), start()?);
        }
    }
    if let Some(section) = idle {
        let index = all.open(bench, section).await?;
        for implementation in implementations {
            // A quick run skips variants with long retry intervals.
            if implementation.kind == Kind::Ours {
                all.add(index, Role::Wait, implementation, start()?);
            } else if implementation.kind == Kind::Tuned || !bench.quick {
                // Polling uses CPU time: each of these runs alone, for a shorter time.
                let test = all.test(index, Role::Wait, implementation, start()?);
                let (settle_time, window) = (bench.ms(600, 100), bench.ms(300, 100));
                watch(&mut all.sections, vec![test], settle_time, window).await;
            }
        }
    }
    Ok(())
}

async fn on_postgres(bench: &mut Bench, all: &mut IdleRun) -> Outcome<()> {
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
    let server = Arc::new(server.map_err(one_line)?);
    for (section, role) in sections {
        let Some(section) = section else { continue };
        let implementations =
            child::implementations_on("postgres", &server.url(), all.size.ttl).await?;
        let index = all.open(bench, section).await?;
        for implementation in implementations.into_iter().filter(is_peer_or_default) {
            all.add(index, role, implementation, database(&server).await?);
        }
    }
    Ok(())
}

fn held_redis(bench: &Bench) -> Option<Section> {
    let text = format!("10,000 locks with a TTL of 30 s, acquired over some seconds (1,000 with 3 s in a quick run). Each implementation has its own server. {CONCURRENTLY}
        (`redlock`, which does not renew, is not run.)");
    let section = REDIS.section(bench, "held", "many held locks", &text)?;
    Some(
        section
            .column("requests", "requests per second", Better::Neither)
            .column("client", "client % of a core", Better::Low)
            .column("server", "server % of a core", Better::Neither)
            .column("bytes", "client bytes each", Better::Low)
            .column("remaining", "still held, %", Better::Neither),
    )
}

fn held_postgres(bench: &Bench) -> Option<Section> {
    let text = format!("As many locks as an implementation can hold, up to 10,000, with a TTL of 30 s where there is one (1,000 with 3 s in a quick run). Lockkeeper's locks
        share 16 connections, the others need a connection per lock. Each implementation has its own database on one server. The server's CPU time is
        that of the processes that serve this database, and statements are counted in the server's log. {CONCURRENTLY}");
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
            .column("remaining", "still held, %", Better::Neither),
    )
}

fn held_files(bench: &Bench) -> Option<(Section, Role)> {
    let text = format!(
        "10,000 locks, with a TTL of 30 s where there is one (1,000 with 3 s in a quick run). Locks still held are counted by the kernel. {CONCURRENTLY}"
    );
    let section = FILES.section(bench, "held", "many held locks", &text)?;
    let section = section
        .column("client", "client % of a core", Better::Low)
        .column("bytes", "client bytes each", Better::Low)
        .column("threads", "threads", Better::Neither)
        .column("remaining", "still held, %", Better::Neither);
    Some((section, Role::Hold))
}

fn idle_redis(bench: &Bench) -> Option<Section> {
    let text = "Waiters for a lock that is held with a TTL of 30 s: 1,000 of them, or 100 in a quick run, whose TTL is 3 s and whose rate for Lockkeeper is scaled to
        30 s. All are in one process, and Lockkeeper batches their requests: a single waiter sends one every third of its TTL, which is 0.1 per second.
        Lockkeeper was measured concurrently with the other idle scenarios, for five thirds of a TTL. The others, which poll, ran one after the other, for five
        times 0.3 s. (`redlock` needs a thread per waiter, and is not run.)";
    let section = REDIS.section(bench, "idle", "idle waiters", text)?;
    Some(
        section
            .column("rate", "requests per second and waiter", Better::Low)
            .column("client", "client % of a core", Better::Low)
            .column("server", "server % of a core", Better::Neither)
            .column("remaining", "still waiting, %", Better::Neither),
    )
}

fn idle_postgres(bench: &Bench) -> Option<Section> {
    let text = format!("Waiters for a held lock: 1,000 of them, or as many as an implementation can have (100 in a quick run). All waiters of an implementation are in one
        process and use one database on one server; the server's CPU time is that of the processes that serve this database, and statements are counted in the server's
        log. {CONCURRENTLY}");
    let section = POSTGRES.section(bench, "idle", "idle waiters", &text)?;
    Some(
        section
            .column("count", "waiters", Better::Neither)
            .column("connections", "connections", Better::Low)
            .column("rate", "statements per second and waiter", Better::Low)
            .column("client", "client % of a core", Better::Low)
            .column("server", "server % of a core", Better::Neither)
            .column("remaining", "still waiting, %", Better::Neither),
    )
}

fn idle_files(bench: &Bench) -> Option<(Section, Role)> {
    let text = format!(
        "1,000 waiters for a held lock, or 100 in a quick run; all waiters of an implementation in one process. {CONCURRENTLY}"
    );
    let section = FILES.section(bench, "idle", "idle waiters", &text)?;
    let section = section
        .column("client", "client % of a core", Better::Low)
        .column("threads", "threads", Better::Low)
        .column("remaining", "still waiting, %", Better::Neither);
    Some((section, Role::Wait))
}
