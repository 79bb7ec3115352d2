//! Redis.

use lockkeeper_testkit::server::RedisServer;

use super::{RAW_REDIS, REDIS, TTL, queues, readers_section, scaling, tuned, wake_section};
use crate::bench::Bench;
use crate::implementation::{Implementation, Outcome, one_line};
use crate::implementations;
use crate::load::Meter;
use crate::scenarios::takeover::Target;
use crate::scenarios::{keys, queue, readers, semantics, takeover, wake};

pub(crate) async fn on_redis(bench: &mut Bench) -> Outcome<()> {
    let server = RedisServer::start().map_err(one_line)?;
    let url = server.url();
    let all = implementations::on_redis(&url, TTL).await?;
    let (best, meter) = (tuned(&all), Some(Meter::Redis(&server)));
    let text = "64 tasks, each on its own key, all on one client. (`redlock` opens a connection per request.)";
    if let Some(section) = REDIS.section(bench, "keys", "64 tasks on 64 keys", text) {
        let unit = (RAW_REDIS, "in units of the raw pair");
        keys::run(bench, section, &best, unit, meter).await?;
    }
    for tasks in [8, 64, 512] {
        // A quick run measures slow variants only with 64 tasks.
        let implementations = if bench.quick && tasks != 64 { &best } else { &all };
        queues(bench, REDIS, implementations, &[tasks], meter).await?;
    }
    let text = "One slice for each number of tasks. It is so long that one acquisition is less than the threshold.";
    if let Some(section) = REDIS.section(bench, "fairness", "fairness between tasks", text) {
        queue::fairness(bench, section, &all[0], &[8, 64, 512]).await?;
    }
    if let Some(section) = wake_section(bench, REDIS) {
        let others = implementations::on_redis(&url, TTL).await?;
        let (implementations, others) =
            if bench.quick { (best.clone(), tuned(&others)) } else { (all, others) };
        wake::run(bench, section, &implementations, &others).await?;
    }
    failures_readers_and_semantics(bench, &server).await?;
    // A quick run skips implementations that need threads.
    let implementations: Vec<Implementation> = best
        .into_iter()
        .filter(|implementation| !bench.quick || implementation.max_tasks == usize::MAX)
        .collect();
    let keys = bench.either(vec![1, 8, 64, 256, 1024], vec![1, 8, 64, 512]);
    let waiters = bench.either(vec![2, 8, 64, 512, 2048], vec![2, 8, 64, 512]);
    scaling(bench, REDIS, &implementations, &keys, &waiters).await
}

/// Measures take-over, readers and semantics.
async fn failures_readers_and_semantics(bench: &mut Bench, server: &RedisServer) -> Outcome<()> {
    let url = server.url();
    let text = "The holder's process is killed with SIGKILL. Leases expire on Redis: the time from the end of the lease to the guard of the only waiter.";
    if let Some(section) = REDIS.section(bench, "takeover", "take-over after kill -9", text) {
        let target = Target { store: "redis", address: &url, redis: Some(server) };
        takeover::run(bench, section, target).await?;
    }
    if let Some(section) = readers_section(bench, REDIS) {
        let implementations = implementations::shared_on_redis(&url, TTL).await?;
        readers::run(bench, section, &implementations).await?;
    }
    let text = "Not speed: 1 is yes, 0 is no. A lock with a TTL of 1 s is held for 2 s; a guard is dropped without a release; acquires of a free lock are cancelled at
        different moments within about 3 ms.";
    if let Some(section) =
        REDIS.section(bench, "semantics", "semantics after loss, drop and cancellation", text)
    {
        semantics::run(bench, section, server).await?;
    }
    Ok(())
}
