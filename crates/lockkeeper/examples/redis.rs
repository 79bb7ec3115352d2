//! Two clients of a Redis server: the first hands the lock off to the second.
//!
//! `cargo run --example redis -p lockkeeper --features redis -- redis://127.0.0.1/`
//!
//! Without a URL it starts a server, if `redis-server` is installed.
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::time::Instant;

use lockkeeper::Result;
use lockkeeper_testkit::server::RedisServer;

#[tokio::main]
async fn main() -> Result<()> {
    let mut server = None;
    let url = std::env::args().nth(1).unwrap_or_else(|| {
        let url = server.insert(RedisServer::start_or_panic()).url();
        println!("no URL given: started a server at {url}");
        url
    });
    let (one, other) = (lockkeeper::open(&url).await?, lockkeeper::open(&url).await?);

    let guard = one.mutex("orders/42").label("the first").lock().await?;
    println!("the first holds the lock, fence {:?}", guard.fence());
    let waiter = tokio::spawn({
        let orders = other.mutex("orders/42").label("the second");
        async move { orders.lock().await }
    });
    // Until the second client is in the queue.
    while one.inspect()?.show("orders/42").await?.iter().all(|lock| lock.waiters.is_empty()) {
        tokio::task::yield_now().await;
    }
    for lock in one.inspect()?.list("orders/").await? {
        println!(
            "{}: holder {:?}, waiter {:?}",
            lock.name,
            lock.holders[0].who(),
            lock.waiters[0].who()
        );
    }

    let released = Instant::now();
    guard.release().await?;
    let guard = waiter.await.expect("the waiter does not panic")?;
    println!("handed off to the second after {:?}, fence {:?}", released.elapsed(), guard.fence());
    guard.release().await?;
    one.close().await;
    other.close().await;
    Ok(())
}
