//! Six jobs, at most two of which run at a time.
//!
//! `cargo run --example semaphore -p lockkeeper`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lockkeeper::{Keeper, Memory, Result};
use tokio::task::JoinSet;

#[tokio::main]
async fn main() -> Result<()> {
    let gpus = Keeper::new(Memory::new()).semaphore("gpu", 2);
    let running = Arc::new(AtomicU32::new(0));

    let mut jobs = JoinSet::new();
    for job in 1..=6 {
        let (gpus, running) = (gpus.clone(), running.clone());
        jobs.spawn(async move {
            let permit = gpus.acquire().await?;
            let now = running.fetch_add(1, Ordering::SeqCst) + 1;
            println!("job {job} starts: {now} running, {} free", gpus.available().await?);
            assert!(now <= 2, "more than two run");

            tokio::time::sleep(Duration::from_millis(50)).await;

            running.fetch_sub(1, Ordering::SeqCst);
            println!("job {job} ends");
            permit.release().await
        });
    }
    for done in jobs.join_all().await {
        done?;
    }

    let all = gpus.acquire_many(2).await?;
    println!("one job holds both permits: {} free", gpus.available().await?);
    assert!(gpus.try_acquire().await?.is_none());
    all.release().await?;
    println!("all done: {} free", gpus.available().await?);
    Ok(())
}
