//! Locks on a PostgreSQL server, and their inspection.
//!
//! `cargo run --example postgres -p lockkeeper --features postgres -- postgres://user@host/database`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::time::Duration;

use lockkeeper::postgres::{AdvisoryKey, Postgres};
use lockkeeper::{Keeper, Participant, Result};

#[tokio::main]
async fn main() -> Result<()> {
    let Some(url) = std::env::args().nth(1) else {
        println!("usage: postgres postgres://user:password@host/database");
        println!(
            "a server to try it with: docker run -e POSTGRES_PASSWORD=secret -p 5432:5432 postgres"
        );
        println!("and its URL: postgres://postgres:secret@127.0.0.1/postgres");
        return Ok(());
    };
    let keeper = lockkeeper::open(&url).await?.ttl(Duration::from_secs(10));
    let orders = keeper.mutex("orders/42");
    let guard = orders.lock().await?;
    println!("holding {}, fence {:?}", guard.name(), guard.fence());
    println!("in psql: SELECT * FROM pg_locks WHERE locktype = 'advisory'");
    println!("its advisory key is {}", AdvisoryKey::of("orders/42"));

    let waiter = tokio::spawn(async move { orders.lock().await });
    for info in keeper.inspect()?.list("").await? {
        let holders: Vec<_> = info.holders.iter().map(Participant::who).collect();
        println!("{}: holders {holders:?}, {} waiting", info.name, info.waiters.len());
    }
    guard.release().await?;
    let next = waiter.await.expect("the waiter does not panic")?;
    println!("handed off to the waiter, fence {:?}", next.fence());
    next.release().await?;

    // The same lock as pg_advisory_lock(42) in SQL. Such keys are rejected unless the store allows them.
    let numbers = Keeper::new(Postgres::new(&url)?.with_foreign_keys());
    let number = numbers.mutex(AdvisoryKey::from_i64(42)).try_lock().await?;
    println!("key 42 was {}", if number.is_some() { "free" } else { "taken" });
    drop(number);
    numbers.close().await;
    keeper.close().await;
    Ok(())
}
