//! Many who wait for a lock that is not given back.

use std::time::{Duration, Instant};

use lockkeeper_testkit::server::RedisServer;

use crate::bench::{Bench, REPETITIONS};
use crate::load;
use crate::make::{Kind, Mode, Outcome, fresh};
use crate::makes;
use crate::report::{Better, Section};

/// Measures the requests of waiters that have nothing to do but wait.
///
/// Ours refreshes a place in the queue every third of a ttl, so its rate is that of a ttl of 30 s, whatever the ttl was.
pub(crate) async fn run(bench: &mut Bench, section: Section, server: &RedisServer) -> Outcome<()> {
    let mut section = section.column("rate", "requests per second and waiter", Better::Low).column(
        "server",
        "server % of a core",
        Better::Neither,
    );
    bench.begin(&mut section).await?;
    let ttl = Duration::from_secs(bench.either(30, 2));
    let waiters = bench.either(1000, 100);
    for make in makes::on_redis(&server.url(), ttl).await? {
        let known = bench.quick && make.kind == Kind::Peer;
        if make.kind == Kind::Raw || make.most_tasks < waiters || known {
            continue;
        }
        let key = fresh("idle");
        let held = make.lock(&key, waiters).await?.acquire(Mode::Exclusive).await?;
        let tasks: Vec<_> = make
            .locks(&key, waiters)
            .await?
            .into_iter()
            .map(|lock| tokio::spawn(async move { lock.acquire(Mode::Exclusive).await.map(drop) }))
            .collect();
        tokio::time::sleep(bench.ms(1500, 200)).await;
        let ours = make.kind == Kind::Ours;
        // A third of the ttl, in which ours asks once.
        let window = if ours { ttl / 3 } else { bench.ms(400, 100) };
        for _ in 0..REPETITIONS {
            let (before, start) = (load::of_redis(server, &make), Instant::now());
            tokio::time::sleep(window).await;
            let seconds = start.elapsed().as_secs_f64();
            let load = load::of_redis(server, &make) - before;
            let scale = if ours { ttl.as_secs_f64() / 30.0 } else { 1.0 };
            let row = section.row(&make);
            row.put("rate", Some(load.requests * scale / seconds / waiters as f64));
            row.put("server", Some(load.processor / seconds * 100.0));
        }
        let over = tasks.iter().filter(|task| task.is_finished()).count();
        if over > 0 {
            section.row(&make).note(format!("{over} of {waiters} no longer waited at the end"));
        }
        for task in tasks {
            task.abort();
            let _ = task.await;
        }
        let _ = held.release().await;
    }
    bench.end(section);
    Ok(())
}
