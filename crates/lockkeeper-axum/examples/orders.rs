//! A small shop: each order is paid by one request at a time, across any number of instances.
//!
//! With a Redis server, in two terminals:
//!
//! ```sh
//! cargo run -p lockkeeper-axum --example orders -- redis://127.0.0.1/ 127.0.0.1:3000
//! cargo run -p lockkeeper-axum --example orders -- redis://127.0.0.1/ 127.0.0.1:3001
//! ```
//!
//! Then, in a third, send two requests within five seconds. The second one is rejected with 409:
//!
//! ```sh
//! curl -i -X POST http://127.0.0.1:3000/orders/42/pay &
//! curl -i -X POST http://127.0.0.1:3001/orders/42/pay
//! ```
//!
//! The third argument sets how many milliseconds a payment takes. Without arguments the locks are in memory, for one
//! instance.
#![allow(clippy::print_stdout, reason = "an example prints what it does")]

use std::error::Error;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::{Path, State};
use axum::http::Method;
use axum::routing::{get, post};
use lockkeeper::Keeper;
use lockkeeper_axum::{Held, LockLayer, ProblemLayer};

/// A payment service, with the duration of a payment.
#[derive(Clone, Copy)]
struct Bank(Duration);

async fn pay(Path(order_id): Path<u64>, held: Held, State(bank): State<Bank>) -> String {
    let began = since_1970();
    // A real bank would get the fence with the payment, and reject it if it has seen a higher one for this order.
    let fence = held.fence().map_or("none".to_owned(), |fence| fence.to_string());
    tokio::time::sleep(bank.0).await;
    format!("order {order_id} paid: fence {fence}, began {began}, ended {}\n", since_1970())
}

fn app(keeper: &Keeper, bank: Bank) -> Router {
    // The extractor of the handler, so `/orders/042/pay` is the same order and the same lock.
    let lock = LockLayer::new(keeper.clone())
        .key_from(|Path(order_id): Path<u64>| format!("order:{order_id}"))
        .methods([Method::POST]);
    Router::new()
        .route("/orders/{order_id}/pay", post(pay))
        .route_layer(lock)
        .route("/", get(async || "POST /orders/42/pay\n"))
        .layer(ProblemLayer::new(keeper.clone()).show_holder())
        .with_state(bank)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut argument = |otherwise: &str| arguments.next().unwrap_or_else(|| otherwise.to_owned());
    let (url, address) = (argument("memory:"), argument("127.0.0.1:3000"));
    let bank = Bank(Duration::from_millis(argument("5000").parse()?));

    let keeper = lockkeeper::open(&url).await?.ttl(Duration::from_secs(60));
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    let server = axum::serve(listener, app(&keeper, bank));
    server.with_graceful_shutdown(interrupted()).await?;
    keeper.close().await; // waits for releases in the background
    Ok(())
}

async fn interrupted() {
    let _ = tokio::signal::ctrl_c().await;
}

/// Returns the time in microseconds.
fn since_1970() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros()
}
