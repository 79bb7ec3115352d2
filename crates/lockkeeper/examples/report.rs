//! Concurrent readers of a report, and a writer that downgrades to a reader.
//!
//! `cargo run --example report -p lockkeeper`
#![allow(clippy::print_stdout, reason = "an example prints")]

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
    println!("two readers share edition {}", edition.load(Ordering::SeqCst));
    assert!(report.try_write().await?.is_none());
    println!("no writer can enter meanwhile");
    drop((first, second));

    let write = report.write().await?; // waits for both readers
    println!("writing, under fence {:?}", write.fence());
    let mut readers = JoinSet::new();
    for reader in 1..=3 {
        let (report, edition) = (report.clone(), edition.clone());
        readers.spawn(async move {
            let guard = report.read().await?;
            println!("reader {reader} reads edition {}", edition.load(Ordering::SeqCst));
            assert_eq!(
                edition.load(Ordering::SeqCst),
                2,
                "the reader entered before the writer was done"
            );
            guard.release().await
        });
    }
    edition.store(2, Ordering::SeqCst);

    // A downgrade lets no other writer in, so readers see what was just written.
    println!("written; the writer downgrades, and the readers enter");
    write.downgrade().await?;
    assert!(report.try_write().await?.is_none());
    for done in readers.join_all().await {
        done?;
    }
    write.release().await?;

    assert!(report.try_write().await?.is_some());
    println!("all guards are released, and a writer can enter");
    Ok(())
}
