//! The example in the README.
//!
//! `cargo run --example quickstart -p lockkeeper --features file`
#![allow(clippy::print_stdout, reason = "an example prints")]

use lockkeeper::Result;

#[tokio::main]
async fn main() -> Result<()> {
    // All processes that open this directory share its locks. A redis:// or postgres:// URL works the same way.
    let keeper = lockkeeper::open("file:target/locks").await?;
    let orders = keeper.mutex("orders/42");

    let guard = orders.lock().await?; // waits for the current holder
    assert!(orders.try_lock().await?.is_none()); // contention is not an error
    println!("holding {}, fence {:?}", guard.name(), guard.fence());

    guard.while_held(async { println!("working: dropped if the lock is lost") }).await?;
    guard.release().await?; // dropping the guard releases in the background
    keeper.close().await; // waits for releases in flight
    Ok(())
}
