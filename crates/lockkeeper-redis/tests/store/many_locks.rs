//! Many locks at once.

use std::time::Duration;

use lockkeeper_core::{Guard, ReleaseOutcome};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;

use crate::common::{nothing_left, number, open, secs};

/// How many scripts the server has run.
fn scripts(server: &RedisServer) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]);
    let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    line.unwrap().split(',').next().unwrap().parse().unwrap()
}

/// Waits until all have been renewed once more. Renewed or lost: one of the two happens to each.
async fn renewed(guards: &[Guard]) {
    // Computed from clocks each time, the same end is never quite the same.
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
    assert!(calls > 0 && calls * 4 < COUNT as u64, "{calls} calls for {COUNT} renewals");
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

#[tokio::test]
async fn locks_that_are_asked_for_at_once_share_calls() {
    const COUNT: usize = 500;
    let server = RedisServer::start_or_panic();
    let keeper = open(&server.url()).await;
    let asks = (0..COUNT).map(|number| {
        let mutex = keeper.mutex(format!("{number}"));
        async move { mutex.lock().await.unwrap() }
    });
    let guards = futures_util::future::join_all(asks).await;
    assert!(scripts(&server) < 30, "{} calls to take {COUNT} locks", scripts(&server));
    let mut fences: Vec<_> = guards.iter().map(Guard::fence).collect();
    fences.dedup();
    assert!(fences.iter().all(Option::is_some));
    let releases = guards.into_iter().map(Guard::release);
    for outcome in futures_util::future::join_all(releases).await {
        assert_eq!(outcome.unwrap(), ReleaseOutcome::Released);
    }
    assert!(scripts(&server) < 60, "{} calls for {COUNT} locks", scripts(&server));
    nothing_left(&keeper, &server).await;
}

/// What shares calls must not depend on whoever happened to ask first.
#[tokio::test]
async fn an_attempt_that_is_no_longer_polled_delays_no_other() {
    let server = RedisServer::start_or_panic();
    let keeper = open(&server.url()).await;
    let mut left: Vec<_> = ["left/1", "left/2", "left/3"]
        .map(|name| keeper.mutex(name))
        .map(|mutex| Box::pin(async move { mutex.lock().await.unwrap() }))
        .into();
    // Each is sent or waits to be sent, and is then looked at by nobody.
    for ask in &mut left {
        assert!(futures_util::poll!(ask).is_pending());
    }
    let others = (0..100).map(|number| {
        let mutex = keeper.mutex(format!("{number}"));
        async move { mutex.lock().await.unwrap().release().await.unwrap() }
    });
    soon("the others", futures_util::future::join_all(others)).await;
    for ask in left {
        soon("the first", ask).await.release().await.unwrap();
    }
    nothing_left(&keeper, &server).await;
}

/// A dropped ask may be waiting to be sent, on its way, or answered; what it may have got is given back.
#[tokio::test]
async fn asks_dropped_among_others_that_share_their_calls_leave_nothing() {
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
            for mut ask in asks {
                // One that is granted is dropped as a guard.
                if futures_util::poll!(&mut ask).is_pending() {
                    pending.push(ask);
                }
            }
            asks = pending;
            tokio::task::yield_now().await;
        }
        drop(asks);
        // Every lock is to be had again.
        for number in 0..50 {
            let mutex = keeper.mutex(format!("{number}"));
            soon("the lock", mutex.lock()).await.unwrap().release().await.unwrap();
        }
    }
    nothing_left(&keeper, &server).await;
}
