//! The scheduler on a quorum: votes that split are no ticks that another node has.
#![cfg(feature = "metrics")]
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;
mod meter;

use std::sync::Arc;
use std::time::Duration;

use common::{Ledger, Wall, mins, secs};
use lockkeeper::backend::{Attempt, Backend, Background, Claim, ClaimSpec, Quorum};
use lockkeeper::{Keeper, Memory, Name};
use lockkeeper_schedule::{Schedule, Scheduler};
use lockkeeper_testkit::{Fault, Faulty, Op};
use meter::Ticks;
use tokio::time::sleep;

const MILLISECOND: Duration = Duration::from_millis(1);

/// A keeper next to one of the nodes; the others are a millisecond away.
fn neighbour(stores: &[Memory], own: usize) -> Keeper {
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
async fn every_tick_is_run_by_exactly_one_of_three_nodes_that_ask_at_the_same_moment() {
    let stores: Vec<Memory> = (0..3).map(|_| Memory::new()).collect();
    let (ledger, wall) = (Ledger::default(), Wall::at("2026-03-01T00:00:30Z"));
    let mut nodes = Vec::new();
    for own in 0..3 {
        let job = Schedule::cron("* * * * *", "UTC").job("x", ledger.note(&own.to_string()));
        let scheduler = Scheduler::new(neighbour(&stores, own)).job(job);
        nodes.push(scheduler.clock(wall.skewed(0)).start().unwrap());
    }
    sleep(mins(28)).await;
    let (runs, _) = ledger.assert_each_once();
    assert_eq!(runs, 28);
    for node in nodes {
        node.shutdown().await;
    }
}

/// A claim of another make on one node, which has no majority and stays.
async fn stray(store: &Memory, name: &str) -> Box<dyn Claim> {
    let background = Background::new(tokio::runtime::Handle::current());
    let spec = ClaimSpec::new(Name::new(name).unwrap(), secs(3600), background);
    let mut claim = store.claim(spec).unwrap();
    assert!(matches!(claim.attempt(None).await.unwrap(), Attempt::Granted(_)));
    claim
}

#[tokio::test(start_paused = true)]
async fn a_tick_on_which_the_store_cannot_decide_is_tried_again_and_then_told_as_such() {
    let ticks = Ticks::default();
    let _here = metrics::set_default_local_recorder(&ticks);
    let stores: Vec<Memory> = (0..3).map(|_| Memory::new()).collect();
    let (ledger, wall) = (Ledger::default(), Wall::at("2026-03-01T00:00:30Z"));
    // One tick is undecided for half a minute, the next for good.
    let tick = |minute| format!("schedule/tick/2026-03-01T00:0{minute}:00Z/x");
    let mut strays = Vec::new();
    for minute in [1, 2] {
        for store in &stores[..2] {
            strays.push(stray(store, &tick(minute)).await);
        }
    }
    let job = Schedule::cron("* * * * *", "UTC").job("x", ledger.note("a"));
    let scheduler = Scheduler::new(neighbour(&stores, 0)).job(job);
    let running = scheduler.clock(wall.skewed(0)).start().unwrap();
    sleep(secs(60)).await;
    assert_eq!(ledger.runs().len(), 0);
    strays[0].release().await.unwrap();
    sleep(secs(5)).await;
    assert_eq!(ledger.runs().len(), 1);
    sleep(secs(150)).await;
    let seen = ticks.seen();
    let undecided = ("job=x outcome=undecided".to_owned(), 1);
    assert!(seen.contains(&undecided), "{seen:?}");
    assert!(!seen.iter().any(|(outcome, _)| outcome.contains("taken")), "{seen:?}");
    assert_eq!(ledger.runs().len(), 3, "the ticks after it are run");
    running.shutdown().await;
}
