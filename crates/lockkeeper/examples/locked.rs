//! Functions under a lock: who pays an order twice at the same time gets an error at once.
//!
//! `cargo run --example locked -p lockkeeper --features macros`
#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use std::fmt;
use std::time::Duration;

use lockkeeper::{ErrorKind, Keeper, Memory, locked};

#[derive(Debug)]
enum AppError {
    Busy,
    Locking(lockkeeper::Error),
}

impl From<lockkeeper::Error> for AppError {
    fn from(error: lockkeeper::Error) -> Self {
        match error.kind() {
            ErrorKind::TimedOut => Self::Busy,
            _ => Self::Locking(error),
        }
    }
}

impl fmt::Display for AppError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy => f.write_str("somebody else is paying this order"),
            Self::Locking(error) => error.fmt(f),
        }
    }
}

struct Payment {
    order_id: u64,
    cents: u64,
}

/// One at a time for each order, and nobody waits.
#[locked(key = "order:{payment.order_id}", ttl = "15s", wait = "0s")]
async fn pay(payment: &Payment) -> Result<String, AppError> {
    tokio::time::sleep(Duration::from_millis(50)).await; // the bank takes its time
    Ok(format!("order {}: {} cents paid", payment.order_id, payment.cents))
}

/// Not async: it blocks its thread.
#[locked(key = "report", wait = "5s")]
fn report() -> Result<&'static str, AppError> {
    Ok("reported")
}

#[tokio::main]
async fn main() -> Result<(), AppError> {
    let keeper = Keeper::new(Memory::new());
    lockkeeper::install(keeper.clone())?; // once, for the whole program

    let payment = Payment { order_id: 42, cents: 1250 };
    let other = Payment { order_id: 43, cents: 99 };
    let (first, second, third) = tokio::join!(pay(&payment), pay(&payment), pay(&other));
    println!("{}", first?);
    println!("order 42 again: {}", second.expect_err("two at a time"));
    println!("{}", third?);

    let reported = tokio::task::spawn_blocking(report).await.expect("it does not panic")?;
    println!("{reported}");
    println!("{}, now that the first is done", pay(&payment).await?);

    assert!(keeper.inspect()?.list("").await?.is_empty());
    keeper.close().await;
    Ok(())
}
