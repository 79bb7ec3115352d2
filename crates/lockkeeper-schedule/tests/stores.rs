//! The scheduler on real stores: Redis, and files, whose locks end with their process.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::time::SystemTime;

use common::{RunRecord, secs, shift};
use lockkeeper::{ErrorKind, Keeper};
use lockkeeper_schedule::{Misfire, Schedule, Scheduler};
use lockkeeper_testkit::Flock;
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::{eventually, soon};

const SKEWS: [i64; 5] = [-2, -1, 0, 1, 2];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_nodes_with_skewed_clocks_on_redis_run_each_tick_once() {
    let server = RedisServer::start_or_panic();
    let record = RunRecord::default();
    let (mut nodes, mut keepers) = (Vec::new(), Vec::new());
    for skew in SKEWS {
        let keeper = lockkeeper::open(&server.url()).await.unwrap();
        let job = Schedule::every(secs(1)).job("x", record.job(&skew.to_string()));
        let scheduler = Scheduler::new(keeper.clone()).job(job).max_skew(secs(600));
        let clock = move || shift(SystemTime::now(), skew);
        nodes.push((skew, scheduler.clock(clock).start().unwrap()));
        keepers.push(keeper);
    }
    // The node that is furthest ahead stops. The others then reach the ticks that it has run.
    while let Some((skew, node)) = nodes.pop() {
        let node_runs = || record.runs().iter().any(|run| run.starts_with(&format!("{skew} ")));
        eventually("a run of the node", async || node_runs()).await;
        soon("the shutdown", node.shutdown()).await;
    }
    let (runs, _) = record.assert_each_once();
    assert!(runs >= SKEWS.len());
    for keeper in keepers {
        soon("all releases", keeper.close()).await;
    }
    // Only claims are left. Each expires within latest + max_skew (60 s + 600 s).
    let keys = server.command(&["KEYS", "*"]);
    assert!(keys.lines().count() >= runs, "{keys}");
    for key in keys.lines() {
        assert!(key.contains("schedule/tick/"), "{key}");
        let left: i64 = server.command(&["PTTL", key]).parse().unwrap();
        assert!((1..=660_000).contains(&left), "{key} expires in {left} ms");
    }
    let longest = |key| server.command(&["PTTL", key]).parse::<i64>().unwrap();
    assert!(keys.lines().map(longest).max().unwrap() > 500_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_store_without_leases_a_node_keeps_its_claims_after_its_scheduler_has_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let record = RunRecord::default();
    let mut nodes = Vec::new();
    for skew in [-1, 0, 1] {
        let keeper = Keeper::new(Flock::new(dir.path()));
        let job = Schedule::every(secs(1)).job("x", record.job(&skew.to_string()));
        let clock = move || shift(SystemTime::now(), skew);
        nodes.push(Scheduler::new(keeper).job(job).clock(clock).start().unwrap());
    }
    eventually("four runs", async || record.runs().len() >= 4).await;
    soon("the shutdown", nodes.pop().unwrap().shutdown()).await;
    let so_far = record.runs().len();
    eventually("two more runs", async || record.runs().len() >= so_far + 2).await;
    for node in nodes {
        soon("the shutdown", node.shutdown()).await;
    }
    record.assert_each_once();
}

#[tokio::test]
async fn a_store_without_leases_refuses_to_run_missed_ticks() {
    let dir = tempfile::tempdir().unwrap();
    let keeper = Keeper::new(Flock::new(dir.path()));
    let job = Schedule::every(secs(60)).job("x", |_| async {});
    let job = job.misfire(Misfire::RunOnce { within: secs(60) });
    let error = Scheduler::new(keeper).job(job).start().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("job \"x\": this store cannot keep a claim"), "{error}");
}
