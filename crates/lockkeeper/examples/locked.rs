//! Functions under a lock: a second, concurrent payment of an order fails at once.
//!
//! `cargo run --example locked -p lockkeeper --features macros`
#![allow(clippy::print_stdout, reason = "an example prints")]

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
            Self::Busy => f.write_str("this order is being paid by another request"),
            Self::Locking(error) => error.fmt(f),
        }
    }
}

struct Payment {
    order_id: u64,
    cents: u64,
}

/// One payment at a time for each order. A concurrent one fails at once.
#[locked(key = "order:{payment.order_id}", ttl = "15s", wait = "0s")]
async fn pay(payment: &Payment) -> Result<String, AppError> {
    tokio::time::sleep(Duration::from_millis(50)).await; // the call to the bank
    Ok(format!("order {}: {} cents paid", payment.order_id, payment.cents))
}

/// A blocking function: it blocks the calling thread.
#[locked(key = "report", wait = "5s")]
fn report() -> Result<&'static str, AppError> {
    Ok("reported")
}

#[tokio::main]
async fn main() -> Result<(), AppError> {
    let keeper = Keeper::new(Memory::new());
    lockkeeper::install(keeper.clone())?; // once per process

    let payment = Payment { order_id: 42, cents: 1250 };
    let other = Payment { order_id: 43, cents: 99 };
    let (first, second, third) = tokio::join!(pay(&payment), pay(&payment), pay(&other));
    println!("{}", first?);
    println!("order 42 again: {}", second.expect_err("the order is being paid"));
    println!("{}", third?);

    let reported = tokio::task::spawn_blocking(report).await.expect("the task does not panic")?;
    println!("{reported}");
    println!("after the first payment: {}", pay(&payment).await?);

    assert!(keeper.inspect()?.list("").await?.is_empty());
    keeper.close().await;
    Ok(())
}
