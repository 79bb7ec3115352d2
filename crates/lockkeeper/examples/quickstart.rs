//! The dozen lines of the README.
//!
//! `cargo run --example quickstart -p lockkeeper`
#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use lockkeeper::Result;

#[tokio::main]
async fn main() -> Result<()> {
    let keeper = lockkeeper::open("memory:").await?;
    let orders = keeper.mutex("orders/42");

    let guard = orders.lock().await?; // waits for whoever holds it
    println!("holding {}, fence {:?}", guard.name(), guard.fence());
    assert!(orders.try_lock().await?.is_none()); // contention is not an error

    guard.while_held(async { println!("working, stopped if the lock is lost") }).await?;
    let outcome = guard.release().await?; // dropping it would do, too
    println!("given back: {outcome:?}");

    keeper.with_lock("orders/43", async |guard| println!("holding {}", guard.name())).await?;
    keeper.close().await; // waits for releases that are still under way
    Ok(())
}
