//! Two clients of a Redis server: the second waits and is handed the lock.
//!
//! `cargo run --example redis -p lockkeeper --features redis -- redis://127.0.0.1/`
//!
//! Without a URL it starts a server of its own, if `redis-server` is installed.
#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use std::time::Instant;

use lockkeeper::Result;
use lockkeeper_testkit::server::RedisServer;

#[tokio::main]
async fn main() -> Result<()> {
    let mut server = None;
    let url = std::env::args().nth(1).unwrap_or_else(|| {
        let url = server.insert(RedisServer::start_or_panic()).url();
        println!("no URL given: started a server of my own at {url}");
        url
    });
    let (one, other) = (lockkeeper::open(&url).await?, lockkeeper::open(&url).await?);

    let guard = one.mutex("orders/42").label("the first").lock().await?;
    println!("the first holds it with fence {:?}", guard.fence());
    let waiter = tokio::spawn({
        let orders = other.mutex("orders/42").label("the second");
        async move { orders.lock().await }
    });
    // So that there is something to see.
    while one.inspect()?.show("orders/42").await?.iter().all(|lock| lock.waiters.is_empty()) {
        tokio::task::yield_now().await;
    }
    for lock in one.inspect()?.list("orders/").await? {
        println!(
            "{}: held by {:?}, awaited by {:?}",
            lock.name,
            lock.holders[0].who(),
            lock.waiters[0].who()
        );
    }

    let released = Instant::now();
    guard.release().await?;
    let guard = waiter.await.expect("the waiter did not panic")?;
    println!("the second has it after {:?}, with fence {:?}", released.elapsed(), guard.fence());
    guard.release().await?;
    one.close().await;
    other.close().await;
    Ok(())
}
