//! How many requests the hot paths send, exactly: that does not depend on how fast the machine is.
//!
//! Whoever changes one of these numbers on purpose writes the new one here.

use std::time::{Duration, Instant};

use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{got, key, lock, nothing_left, number, open, secs, server};

/// So long that nothing is renewed or refreshed meanwhile.
const LONG: Duration = Duration::from_secs(3600);

/// How many requests have been sent. All of ours are scripts; what those run in the server is counted under other names.
fn requests(server: &RedisServer) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]);
    let calls = |command: &str| {
        let start = format!("cmdstat_{command}:calls=");
        let line = stats.lines().find_map(|line| line.strip_prefix(&start));
        line.map_or(0, |line| line.split(',').next().unwrap().parse::<u64>().unwrap())
    };
    calls("evalsha") + calls("eval")
}

/// Takes a lock once, so that the scripts are loaded.
async fn warm(keeper: &lockkeeper_core::Keeper) {
    lock(keeper, "warm").await.release().await.unwrap();
}

#[tokio::test]
async fn an_uncontended_lock_and_its_release_are_two_requests() {
    let (server, keeper) = server().await;
    let keeper = keeper.ttl(LONG);
    warm(&keeper).await;
    let before = requests(&server);
    for _ in 0..100 {
        lock(&keeper, "a").await.release().await.unwrap();
    }
    assert_eq!(requests(&server) - before, 200);
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_try_that_fails_is_one_request_and_one_that_succeeds_as_well() {
    let (server, keeper) = server().await;
    let keeper = keeper.ttl(LONG);
    warm(&keeper).await;
    let before = requests(&server);
    let guard = soon("the try", keeper.mutex("a").try_lock()).await.unwrap().unwrap();
    assert_eq!(requests(&server) - before, 1);
    assert!(soon("the other try", keeper.mutex("a").try_lock()).await.unwrap().is_none());
    assert_eq!(requests(&server) - before, 2);
    guard.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

/// One request to get in line and one to give back: the winner sends nothing between the two.
#[tokio::test]
async fn a_hand_over_is_two_requests_however_many_wait() {
    const WAITERS: u64 = 10;
    let (server, keeper) = server().await;
    let keeper = keeper.ttl(LONG);
    warm(&keeper).await;
    let mut guard = lock(&keeper, "a").await;
    let before = requests(&server);
    let mut waiters = Vec::new();
    for place in 1..=WAITERS {
        let mutex = keeper.mutex("a");
        waiters.push(tokio::spawn(async move { mutex.lock().await }));
        // An inspection would send requests of its own.
        let queue = format!("{}:q", key("a"));
        let count = || u64::try_from(number(&server, &["ZCARD", &queue])).unwrap();
        eventually("a place in the queue", async || count() == place).await;
    }
    assert_eq!(requests(&server) - before, WAITERS, "asks, and nothing else");
    for waiter in waiters {
        guard.release().await.unwrap();
        guard = got(waiter).await;
    }
    assert_eq!(requests(&server) - before, 2 * WAITERS, "releases, and nothing else");
    guard.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn tasks_that_contend_send_no_more_than_two_requests_for_each_turn() {
    const TASKS: u64 = 16;
    const TURNS: u64 = 25;
    let (server, keeper) = server().await;
    let keeper = keeper.ttl(LONG);
    warm(&keeper).await;
    let before = requests(&server);
    let tasks = (0..TASKS).map(|_| {
        let mutex = keeper.mutex("a");
        tokio::spawn(async move {
            for _ in 0..TURNS {
                mutex.lock().await.unwrap().release().await.unwrap();
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        soon("all turns", task).await.unwrap();
    }
    let sent = requests(&server) - before;
    assert!(sent <= 2 * TASKS * TURNS, "{sent} requests for {} turns", TASKS * TURNS);
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn an_extension_is_one_request() {
    let (server, keeper) = server().await;
    let keeper = keeper.ttl(LONG);
    let guard = lock(&keeper, "a").await;
    guard.extend(LONG).await.unwrap();
    let before = requests(&server);
    guard.extend(LONG).await.unwrap();
    assert_eq!(requests(&server) - before, 1);
    guard.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_renewal_is_one_request() {
    const TTL: Duration = secs(6);
    let server = RedisServer::start_or_panic();
    let keeper = open(&format!("{}?command_timeout=60s", server.url())).await.ttl(TTL);
    warm(&keeper).await;
    // The script that renews may have to be loaded the first time.
    for name in ["first", "second", "third", "fourth"] {
        let start = Instant::now();
        let guard = lock(&keeper, name).await;
        // It is computed from clocks each time: the same end is never quite the same.
        let later = guard.expires_at().unwrap() + secs(1);
        let before = requests(&server);
        eventually("a renewal", async || guard.expires_at().unwrap() > later).await;
        let sent = requests(&server) - before;
        let took = start.elapsed();
        guard.release().await.unwrap();
        // If it took longer, another one may have been due.
        if name != "first" && took < TTL * 2 / 3 {
            assert_eq!(sent, 1);
            nothing_left(&keeper, &server).await;
            return;
        }
    }
    panic!("the machine is too busy to tell one renewal from the next");
}
