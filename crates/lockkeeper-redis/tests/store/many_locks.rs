//! Many concurrent locks.

use std::time::Duration;

use lockkeeper_core::{Guard, ReleaseOutcome};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;

use crate::common::{nothing_left, number, open, secs};

/// How many calls of the clients the server has run: scripts, and attempts without one, which share one `TIME`.
fn calls(server: &RedisServer) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]);
    let calls = ["cmdstat_evalsha:calls=", "cmdstat_time:calls="].map(|start| {
        let line = stats.lines().find_map(|line| line.strip_prefix(start));
        line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
    });
    calls.iter().sum()
}

/// Waits until all locks have been renewed once more, and asserts that none is lost.
async fn renewed(guards: &[Guard]) {
    // A second later at least: `expires_at` is computed from clocks and varies slightly between calls.
    let end = |guard: &Guard| guard.expires_at().unwrap();
    let ends: Vec<_> = guards.iter().map(|guard| end(guard) + secs(1)).collect();
    while guards.iter().zip(&ends).any(|(guard, later)| end(guard) < *later) {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(guards.iter().filter(|guard| !guard.is_held()).count(), 0, "lost");
    }
}

#[tokio::test]
async fn ten_thousand_locks_are_held_and_renewed_in_shared_calls() {
    const COUNT: usize = 10_000;
    let server = RedisServer::start_or_panic();
    // A long timeout, because the server may be slow on a busy machine.
    let keeper = open(&format!("{}?command_timeout=60s", server.url())).await.ttl(secs(30));
    let mut guards: Vec<Guard> = Vec::with_capacity(COUNT);
    while guards.len() < COUNT {
        let asks = (guards.len()..guards.len() + 100).map(|number| {
            let mutex = keeper.mutex(format!("{number}"));
            async move { mutex.lock().await.unwrap() }
        });
        guards.extend(futures_util::future::join_all(asks).await);
    }
    let before = calls(&server);
    renewed(&guards).await;
    let sent = calls(&server) - before;
    assert!(sent > 0 && sent * 4 < COUNT as u64, "{sent} calls for {COUNT} renewals");
    assert_eq!(number(&server, &["DBSIZE"]), 10_000, "one key for each lock");
    drop(guards);
    keeper.close().await;
    assert_eq!(number(&server, &["DBSIZE"]), 0);
}

/// With one call in flight, a round trip would renew 64 locks: too few with this latency.
#[tokio::test]
async fn renewals_keep_up_over_a_connection_with_high_latency() {
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

#[tokio::test]
async fn concurrent_acquires_share_calls() {
    const COUNT: usize = 500;
    let server = RedisServer::start_or_panic();
    let keeper = open(&server.url()).await;
    let asks = (0..COUNT).map(|number| {
        let mutex = keeper.mutex(format!("{number}"));
        async move { mutex.lock().await.unwrap() }
    });
    let guards = futures_util::future::join_all(asks).await;
    assert!(calls(&server) < 30, "{} calls to take {COUNT} locks", calls(&server));
    let mut fences: Vec<_> = guards.iter().map(Guard::fence).collect();
    fences.dedup();
    assert!(fences.iter().all(Option::is_some));
    let releases = guards.into_iter().map(Guard::release);
    for outcome in futures_util::future::join_all(releases).await {
        assert_eq!(outcome.unwrap(), ReleaseOutcome::Released);
    }
    assert!(calls(&server) < 60, "{} calls for {COUNT} locks", calls(&server));
    nothing_left(&keeper, &server).await;
}

/// A batch must not depend on the caller that started it.
#[tokio::test]
async fn an_attempt_that_is_no_longer_polled_does_not_delay_others() {
    let server = RedisServer::start_or_panic();
    let keeper = open(&server.url()).await;
    let mut left: Vec<_> = ["left/1", "left/2", "left/3"]
        .map(|name| keeper.mutex(name))
        .map(|mutex| Box::pin(async move { mutex.lock().await.unwrap() }))
        .into();
    // Each is sent or waits to be sent, and is then not polled.
    for acquire in &mut left {
        assert!(futures_util::poll!(acquire).is_pending());
    }
    let others = (0..100).map(|number| {
        let mutex = keeper.mutex(format!("{number}"));
        async move { mutex.lock().await.unwrap().release().await.unwrap() }
    });
    soon("the others", futures_util::future::join_all(others)).await;
    for acquire in left {
        soon("the first acquires", acquire).await.release().await.unwrap();
    }
    nothing_left(&keeper, &server).await;
}

/// A dropped acquire may be unsent, in flight or granted. A grant is released.
#[tokio::test]
async fn acquires_dropped_in_a_batch_leave_no_key() {
    let server = RedisServer::start_or_panic();
    let keeper = open(&server.url()).await;
    for polls in 0..8 {
        let mut asks: Vec<_> = (0..200)
            .map(|number| {
                let mutex = keeper.mutex(format!("{}", number % 50));
                Box::pin(async move { mutex.lock().await.unwrap() })
            })
            .collect();
        for _ in 0..polls {
            let mut pending = Vec::new();
            for mut acquire in asks {
                // A guard is dropped at once.
                if futures_util::poll!(&mut acquire).is_pending() {
                    pending.push(acquire);
                }
            }
            asks = pending;
            tokio::task::yield_now().await;
        }
        drop(asks);
        // Every lock can be acquired again.
        for number in 0..50 {
            let mutex = keeper.mutex(format!("{number}"));
            soon("the lock", mutex.lock()).await.unwrap().release().await.unwrap();
        }
    }
    nothing_left(&keeper, &server).await;
}
