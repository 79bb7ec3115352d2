//! Three nodes with skewed clocks share one job: one node runs each tick.
//!
//! `cargo run --example three_nodes -p lockkeeper-schedule`
#![allow(clippy::print_stdout, reason = "the example prints its runs")]

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use lockkeeper::{Keeper, Memory, Result};
use lockkeeper_schedule::{Schedule, Scheduler};
use tokio::sync::mpsc;

#[tokio::main]
async fn main() -> Result<()> {
    let keeper = Keeper::new(Memory::new()); // in one process; redis://… for several
    let (sender, mut runs) = mpsc::unbounded_channel();

    let mut nodes = Vec::new();
    for (node, ahead) in [("node-1", 0), ("node-2", 300), ("node-3", 700)] {
        let sender = sender.clone();
        let job = Schedule::every(Duration::from_secs(1))
            .job("pulse", move |ctx| {
                let sender = sender.clone();
                async move {
                    println!("{node} runs, fence {:?}", ctx.fence());
                    // The receiver is dropped when the example ends.
                    let _ = sender.send(ctx.scheduled_at());
                }
            })
            .jitter(Duration::from_millis(800));
        let clock = move || SystemTime::now() + Duration::from_millis(ahead);
        nodes.push(Scheduler::new(keeper.clone()).job(job).clock(clock).start()?);
    }

    let mut ticks = HashSet::new();
    while ticks.len() < 3 {
        let tick = runs.recv().await.expect("the jobs hold senders");
        assert!(ticks.insert(tick), "a tick was run twice");
    }
    for node in nodes {
        node.shutdown().await;
    }
    keeper.close().await;
    println!("3 ticks, each run once");
    Ok(())
}
