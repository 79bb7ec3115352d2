//! Three nodes elect a leader, until each of them has led.
//!
//! `cargo run --example election -p lockkeeper`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::time::Duration;

use lockkeeper::{Keeper, Memory, Result};
use tokio::task::JoinSet;
use tokio::time::sleep;

#[tokio::main]
async fn main() -> Result<()> {
    let keeper = Keeper::new(Memory::new());
    let mut observe = keeper.election("service").observe()?;
    assert_eq!(observe.next().await?, None);

    let mut nodes = JoinSet::new();
    for node in ["node-1", "node-2", "node-3"] {
        let election = keeper.election("service").label(node);
        nodes.spawn(async move {
            // The first leader is deposed below: its work is dropped, and it campaigns again.
            let work = |term| async move {
                println!("{node} leads in term {term}");
                sleep(Duration::from_millis(200)).await;
                println!("{node} is done in term {term}");
            };
            election.run_while_leader(work).await
        });
    }

    let first = observe.next().await?.expect("a node leads");
    println!("{} is deposed", first.who());
    keeper.inspect()?.break_lock("election/service").await?;

    while let Some(node) = nodes.join_next().await {
        node.expect("no node panics")?;
    }
    assert_eq!(keeper.election("service").leader().await?, None);
    println!("no node leads");
    keeper.close().await;
    Ok(())
}
