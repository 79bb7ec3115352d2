//! Redis.

use lockkeeper_testkit::server::RedisServer;

use super::{RAW_REDIS, REDIS, TTL, queues, readers_section, scaling, tuned, wake_section};
use crate::bench::Bench;
use crate::load::Meter;
use crate::make::{Make, Outcome, told};
use crate::makes;
use crate::work::takeover::Place;
use crate::work::{keys, manners, queue, readers, takeover, wake};

pub(crate) async fn on_redis(bench: &mut Bench) -> Outcome<()> {
    let server = RedisServer::start().map_err(told)?;
    let url = server.url();
    let all = makes::on_redis(&url, TTL).await?;
    let (best, meter) = (tuned(&all), Some(Meter::Redis(&server)));
    let text = "64 tasks, each on a key of its own, all on one client. (`redlock` has a connection for each request.)";
    if let Some(section) = REDIS.section(bench, "keys", "64 tasks on 64 keys", text) {
        let unit = (RAW_REDIS, "in units of the raw pair");
        keys::run(bench, section, &best, unit, meter).await?;
    }
    for tasks in [8, 64, 512] {
        // A quick run has the slow ones once.
        let makes = if bench.quick && tasks != 64 { &best } else { &all };
        queues(bench, REDIS, makes, &[tasks], meter).await?;
    }
    let text = "One slice for each number of tasks, so long that one turn is less than the bar.";
    if let Some(section) = REDIS.section(bench, "fairness", "how evenly turns are dealt", text) {
        queue::fairness(bench, section, &all[0], &[8, 64, 512]).await?;
    }
    if let Some(section) = wake_section(bench, REDIS) {
        let others = makes::on_redis(&url, TTL).await?;
        let (makes, others) =
            if bench.quick { (best.clone(), tuned(&others)) } else { (all, others) };
        wake::run(bench, section, &makes, &others).await?;
    }
    ends(bench, &server).await?;
    // In a quick run there is no time for threads.
    let makes: Vec<Make> =
        best.into_iter().filter(|make| !bench.quick || make.most_tasks == usize::MAX).collect();
    let keys = bench.either(vec![1, 8, 64, 256, 1024], vec![1, 8, 64, 512]);
    let waiters = bench.either(vec![2, 8, 64, 512, 2048], vec![2, 8, 64, 512]);
    scaling(bench, REDIS, &makes, &keys, &waiters).await
}

/// What ends otherwise than by a release; and readers.
async fn ends(bench: &mut Bench, server: &RedisServer) -> Outcome<()> {
    let url = server.url();
    let text = "The holder's process is killed with SIGKILL. Leases end by themselves on Redis; what is shown is how long
        after that the only waiter has its guard.";
    if let Some(section) = REDIS.section(bench, "takeover", "take-over after kill -9", text) {
        let place = Place { store: "redis", at: &url, redis: Some(server) };
        takeover::run(bench, section, place).await?;
    }
    if let Some(section) = readers_section(bench, REDIS) {
        let makes = makes::shared_on_redis(&url, TTL).await?;
        readers::run(bench, section, &makes).await?;
    }
    let text = "Not speed: 1 is yes, 0 is no. A lock at a ttl of 1 s is held for 2 s; a guard is dropped without a release; acquires
        of a free lock are dropped at different moments within the first 3 ms or so.";
    if let Some(section) = REDIS.section(bench, "manners", "manners", text) {
        manners::run(bench, section, server).await?;
    }
    Ok(())
}
