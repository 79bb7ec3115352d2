//! Many readers of a report, and a writer that renews it and then reads on.
//!
//! `cargo run --example report -p lockkeeper`
#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use lockkeeper::{Keeper, Memory, Result};
use tokio::task::JoinSet;

#[tokio::main]
async fn main() -> Result<()> {
    let keeper = Keeper::new(Memory::new());
    let report = keeper.rw_lock("report");
    let edition = Arc::new(AtomicU32::new(1));

    let first = report.read().await?;
    let second = report.read().await?;
    println!("two read edition {} side by side", edition.load(Ordering::SeqCst));
    assert!(report.try_write().await?.is_none());
    println!("nobody can write meanwhile");
    drop((first, second));

    let write = report.write().await?; // waits until both have let go
    println!("writing, under fence {:?}", write.fence());
    let mut readers = JoinSet::new();
    for reader in 1..=3 {
        let (report, edition) = (report.clone(), edition.clone());
        readers.spawn(async move {
            let guard = report.read().await?;
            println!("reader {reader} reads edition {}", edition.load(Ordering::SeqCst));
            assert_eq!(edition.load(Ordering::SeqCst), 2, "read before it was written");
            guard.release().await
        });
    }
    edition.store(2, Ordering::SeqCst);

    // No other writer can come in between: what the readers see is what was just written.
    println!("written; the writer reads on, and the readers may come in");
    write.downgrade().await?;
    assert!(report.try_write().await?.is_none());
    for done in readers.join_all().await {
        done?;
    }
    write.release().await?;

    assert!(report.try_write().await?.is_some());
    println!("all have let go, and it can be written again");
    Ok(())
}
