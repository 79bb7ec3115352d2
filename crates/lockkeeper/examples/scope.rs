//! A request that locks the same account in nested calls, without a deadlock.
//!
//! `cargo run --example scope -p lockkeeper --features macros`
#![allow(clippy::print_stdout, reason = "an example prints")]

use lockkeeper::{ErrorKind, Fence, Keeper, Memory, Result, locked, scope};

#[locked(key = "account:{account}", keeper = "keeper", wait = "0s", reentrant)]
async fn book(keeper: &Keeper, account: u32, cents: i64) -> Result<Option<Fence>> {
    let held = keeper.inspect()?.show(format!("account:{account}")).await?;
    let fence = held.first().and_then(|lock| lock.holders.first()).and_then(|holder| holder.fence);
    println!("  account {account}: {cents:+} cents, under fence {fence:?}");
    Ok(fence)
}

#[locked(key = "account:{account}", keeper = "keeper", wait = "0s", reentrant)]
async fn close_account(keeper: &Keeper, account: u32) -> Result<()> {
    let interest = book(keeper, account, 17).await?; // re-entrant: the outer call holds the lock
    let payout = book(keeper, account, -5017).await?;
    assert_eq!(interest, payout, "one hold, one fence");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let keeper = Keeper::new(Memory::new());

    println!("in a scope:");
    scope(close_account(&keeper, 7)).await?;
    assert!(keeper.mutex("account:7").try_lock().await?.is_some());

    println!("without a scope:");
    let error = close_account(&keeper, 7).await.expect_err("the calls exclude each other");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    println!("  {error}");
    Ok(())
}
