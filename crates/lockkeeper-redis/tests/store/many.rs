//! Ten thousand locks at once.

use std::time::Duration;

use lockkeeper_core::Guard;
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::RedisServer;

use crate::kit::{number, open, secs};

/// How many scripts the server has run.
fn scripts(server: &RedisServer) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]);
    let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    line.unwrap().split(',').next().unwrap().parse().unwrap()
}

/// Waits until all have been renewed once more. Renewed or lost: one of the two happens to each.
async fn renewed(guards: &[Guard]) {
    let ends: Vec<_> = guards.iter().map(Guard::expires_at).collect();
    while guards.iter().zip(&ends).any(|(guard, end)| guard.expires_at() == *end) {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(guards.iter().filter(|guard| !guard.is_held()).count(), 0, "lost");
    }
}

#[tokio::test]
async fn ten_thousand_locks_are_held_and_renewed_in_shared_calls() {
    const COUNT: usize = 10_000;
    let server = RedisServer::start_or_panic();
    // A server that is slow because the machine is busy is not dead.
    let keeper = open(&format!("{}?command_timeout=60s", server.url())).await.ttl(secs(30));
    let mut guards: Vec<Guard> = Vec::with_capacity(COUNT);
    while guards.len() < COUNT {
        let asks = (guards.len()..guards.len() + 100).map(|number| {
            let mutex = keeper.mutex(format!("{number}"));
            async move { mutex.lock().await.unwrap() }
        });
        guards.extend(futures_util::future::join_all(asks).await);
    }
    let before = scripts(&server);
    renewed(&guards).await;
    let calls = scripts(&server) - before;
    assert!(calls * 4 < COUNT as u64, "{calls} calls for {COUNT} renewals");
    assert_eq!(number(&server, &["DBSIZE"]), 20_000);
    drop(guards);
    keeper.close().await;
    assert_eq!(number(&server, &["DBSIZE"]), 0);
}

/// A call at a time would renew 64 a round trip: too few, over a line as long as this one.
#[tokio::test]
async fn a_long_line_does_not_hold_renewals_up() {
    const COUNT: usize = 2_000;
    let server = RedisServer::start_or_panic();
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let url = format!("redis://{}/?command_timeout=60s&connect_timeout=60s", proxy.addr());
    let keeper = open(&url).await.ttl(secs(15));
    proxy.delay(Duration::from_millis(150));
    let asks = (0..COUNT).map(|number| {
        let mutex = keeper.mutex(format!("{number}"));
        async move { mutex.lock().await.unwrap() }
    });
    let guards = futures_util::future::join_all(asks).await;
    renewed(&guards).await;
    proxy.delay(Duration::ZERO);
    drop(guards);
    keeper.close().await;
    assert_eq!(number(&server, &["DBSIZE"]), 0);
}
