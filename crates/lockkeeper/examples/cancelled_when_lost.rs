//! Cancels a job as soon as its lock is lost.
//!
//! `cargo run --example cancelled_when_lost -p lockkeeper`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::time::Duration;

use lockkeeper::{ErrorKind, Keeper, Memory, Result};
use tokio::sync::mpsc;

#[tokio::main]
async fn main() -> Result<()> {
    let keeper = Keeper::new(Memory::new());
    let guard = keeper.mutex("nightly-export").label("export on web-1").lock().await?;
    let (progress, mut rows) = mpsc::channel(1);

    let job = tokio::spawn(async move {
        let export = async {
            for row in 1_u32.. {
                // The work can be cancelled at every await.
                tokio::time::sleep(Duration::from_millis(20)).await;
                println!("job: row {row} written under fence {:?}", guard.fence());
                let _ = progress.send(row).await;
            }
        };
        let result = guard.while_held(export).await;
        println!("job: cancelled, the lock is {:?}", guard.state());
        result
    });

    // An operator assumes that the job hangs, and breaks its lock.
    while rows.recv().await.is_some_and(|row| row < 3) {}
    let inspect = keeper.inspect()?;
    for lock in inspect.list("").await? {
        println!("operator: {} is held by {}", lock.name, lock.holders[0].who());
    }
    let broken = inspect.break_lock("nightly-export").await?;
    println!("operator: broke the lock of {broken} holder");

    match job.await {
        Ok(Err(error)) if error.kind() == ErrorKind::Lost => println!("job: failed: {error}"),
        other => panic!("the job was not cancelled: {other:?}"),
    }
    let next = keeper.mutex("nightly-export").lock().await?;
    println!("next: acquired, fence {:?}", next.fence());
    Ok(())
}
