//! Three nodes with clocks that differ, one job: each tick is run by one of them.
//!
//! `cargo run --example three_nodes -p lockkeeper-schedule`
#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use lockkeeper::{Keeper, Memory, Result};
use lockkeeper_schedule::{Schedule, Scheduler};
use tokio::sync::mpsc;

#[tokio::main]
async fn main() -> Result<()> {
    let keeper = Keeper::new(Memory::new()); // in one process; redis://… for several
    let (tell, mut told) = mpsc::unbounded_channel();

    let mut nodes = Vec::new();
    for (node, ahead) in [("node-1", 0), ("node-2", 300), ("node-3", 700)] {
        let tell = tell.clone();
        let job = Schedule::every(Duration::from_secs(1))
            .job("pulse", move |ctx| {
                let tell = tell.clone();
                async move {
                    println!("{node} runs, fence {:?}", ctx.fence());
                    // Nobody listens any more once the example ends.
                    let _ = tell.send(ctx.scheduled_at());
                }
            })
            .jitter(Duration::from_millis(800));
        let clock = move || SystemTime::now() + Duration::from_millis(ahead);
        nodes.push(Scheduler::new(keeper.clone()).job(job).clock(clock).start()?);
    }

    let mut ticks = HashSet::new();
    while ticks.len() < 3 {
        let tick = told.recv().await.expect("the nodes live");
        assert!(ticks.insert(tick), "run twice");
    }
    for node in nodes {
        node.shutdown().await;
    }
    keeper.close().await;
    println!("3 ticks, each of them run once");
    Ok(())
}
