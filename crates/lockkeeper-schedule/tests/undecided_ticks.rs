//! The scheduler on a quorum: a split vote does not count as a tick that another node has claimed.
#![cfg(feature = "metrics")]
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;
mod recorder;

use std::sync::Arc;
use std::time::Duration;

use common::{RunRecord, WallClock, mins, secs};
use lockkeeper::backend::{Attempt, Backend, Background, Claim, ClaimSpec, Quorum};
use lockkeeper::{Keeper, Memory, Name};
use lockkeeper_schedule::{Schedule, Scheduler};
use lockkeeper_testkit::{Fault, Faulty, Op};
use recorder::TickCounts;
use tokio::time::sleep;

const MILLISECOND: Duration = Duration::from_millis(1);

/// Returns a keeper with no latency to one node and a millisecond to the others.
fn keeper_near(stores: &[Memory], own: usize) -> Keeper {
    let nodes = stores.iter().enumerate().map(|(i, store)| {
        let (node, faults) = Faulty::new(store.clone());
        let delay = if i == own { Duration::ZERO } else { MILLISECOND };
        faults.always(Op::Attempt, Fault::SlowRequest(delay));
        faults.always(Op::Release, Fault::SlowRequest(MILLISECOND));
        Arc::new(node) as Arc<dyn Backend>
    });
    Keeper::new(Quorum::new(nodes.collect::<Vec<_>>()).unwrap())
}

#[tokio::test(start_paused = true)]
async fn exactly_one_of_three_nodes_that_attempt_at_the_same_time_runs_each_tick() {
    let stores: Vec<Memory> = (0..3).map(|_| Memory::new()).collect();
    let (record, wall) = (RunRecord::default(), WallClock::at("2026-03-01T00:00:30Z"));
    let mut nodes = Vec::new();
    for own in 0..3 {
        let job = Schedule::cron("* * * * *", "UTC").job("x", record.job(&own.to_string()));
        let scheduler = Scheduler::new(keeper_near(&stores, own)).job(job);
        nodes.push(scheduler.clock(wall.skewed(0)).start().unwrap());
    }
    sleep(mins(28)).await;
    let (runs, _) = record.assert_each_once();
    assert_eq!(runs, 28);
    for node in nodes {
        node.shutdown().await;
    }
}

/// Takes `name` on one node only, with a new owner. The claim has no majority.
async fn minority_claim(store: &Memory, name: &str) -> Box<dyn Claim> {
    let background = Background::new(tokio::runtime::Handle::current());
    let spec = ClaimSpec::new(Name::new(name).unwrap(), secs(3600), background);
    let mut claim = store.claim(spec).unwrap();
    assert!(matches!(claim.attempt(None).await.unwrap(), Attempt::Granted(_)));
    claim
}

#[tokio::test(start_paused = true)]
async fn an_undecided_tick_is_retried_for_a_minute_and_then_reported_as_undecided() {
    let ticks = TickCounts::default();
    let _here = metrics::set_default_local_recorder(&ticks);
    let stores: Vec<Memory> = (0..3).map(|_| Memory::new()).collect();
    let (record, wall) = (RunRecord::default(), WallClock::at("2026-03-01T00:00:30Z"));
    // The first tick is undecided for half a minute, the second until the end of the test.
    let tick = |minute| format!("schedule/tick/2026-03-01T00:0{minute}:00Z/x");
    let mut claims = Vec::new();
    for minute in [1, 2] {
        for store in &stores[..2] {
            claims.push(minority_claim(store, &tick(minute)).await);
        }
    }
    let job = Schedule::cron("* * * * *", "UTC").job("x", record.job("a"));
    let scheduler = Scheduler::new(keeper_near(&stores, 0)).job(job);
    let running = scheduler.clock(wall.skewed(0)).start().unwrap();
    sleep(secs(60)).await;
    assert_eq!(record.runs().len(), 0);
    claims[0].release().await.unwrap();
    sleep(secs(5)).await;
    assert_eq!(record.runs().len(), 1);
    sleep(secs(150)).await;
    let seen = ticks.seen();
    let undecided = ("job=x outcome=undecided".to_owned(), 1);
    assert!(seen.contains(&undecided), "{seen:?}");
    assert!(!seen.iter().any(|(outcome, _)| outcome.contains("taken")), "{seen:?}");
    assert_eq!(record.runs().len(), 3, "later ticks run");
    running.shutdown().await;
}
