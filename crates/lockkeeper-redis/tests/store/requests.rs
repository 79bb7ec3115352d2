//! The exact number of requests of the hot paths, which does not depend on the speed of the machine.
//!
//! If you change one of these numbers on purpose, write the new one here.

use std::time::{Duration, Instant};

use lockkeeper_core::ErrorKind;
use lockkeeper_redis::{Config, Redis};
use lockkeeper_testkit::server::{RedisCluster, RedisServer};
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{got, key, lock, nothing_left, number, open, secs, server};

/// A TTL with which no lease is renewed and no waiter refreshes during a test.
const LONG: Duration = Duration::from_secs(3600);

/// How often the server has run a command, also in scripts.
fn calls(server: &RedisServer, command: &str) -> u64 {
    let stats = server.command(&["INFO", "commandstats"]);
    let start = format!("cmdstat_{command}:calls=");
    let line = stats.lines().find_map(|line| line.strip_prefix(&start));
    line.map_or(0, |line| line.split(',').next().unwrap().parse::<u64>().unwrap())
}

/// How many scripts have been called.
fn scripts(server: &RedisServer) -> u64 {
    calls(server, "evalsha") + calls(server, "eval")
}

/// How many requests have been sent: scripts, and attempts without one, each of which has one `EXISTS`. (The scripts run
/// `EXISTS` only in rare cases, which the tests that use this do not meet.)
fn requests(server: &RedisServer) -> u64 {
    scripts(server) + calls(server, "exists")
}

/// Locks once, so that the scripts are loaded.
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
    assert_eq!(calls(&server, "set"), 101, "an uncontended lock writes one key");
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_try_is_one_request_whether_it_succeeds_or_not() {
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

/// One script to join the queue and one to release: the waiter that is granted the lock sends nothing between the two.
///
/// Attempts without a script are not counted. The first waiter sends one, which is refused, and so does each that queues more
/// than a second after the one before it.
#[tokio::test]
async fn a_hand_off_is_two_requests_however_many_wait() {
    const WAITERS: u64 = 10;
    let (server, keeper) = server().await;
    let keeper = keeper.ttl(LONG);
    warm(&keeper).await;
    let mut guard = lock(&keeper, "a").await;
    let before = scripts(&server);
    let mut waiters = Vec::new();
    for place in 1..=WAITERS {
        let mutex = keeper.mutex("a");
        waiters.push(tokio::spawn(async move { mutex.lock().await }));
        // Not by inspection, which would send requests.
        let queue = format!("{}:q", key("a"));
        let count = || u64::try_from(number(&server, &["ZCARD", &queue])).unwrap();
        eventually("a queued waiter", async || count() == place).await;
    }
    assert_eq!(scripts(&server) - before, WAITERS, "attempts, and nothing else");
    for waiter in waiters {
        guard.release().await.unwrap();
        guard = got(waiter).await;
    }
    assert_eq!(scripts(&server) - before, 2 * WAITERS, "releases, and nothing else");
    guard.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn contending_tasks_send_at_most_two_requests_per_hold() {
    const TASKS: u64 = 16;
    const TURNS: u64 = 25;
    let (server, keeper) = server().await;
    let keeper = keeper.ttl(LONG);
    warm(&keeper).await;
    let before = scripts(&server);
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
    let sent = scripts(&server) - before;
    assert!(sent <= 2 * TASKS * TURNS, "{sent} scripts for {} turns", TASKS * TURNS);

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
        // A second later at least: `expires_at` is computed from clocks and varies slightly between calls.
        let later = guard.expires_at().unwrap() + secs(1);
        let before = requests(&server);
        eventually("a renewal", async || guard.expires_at().unwrap() > later).await;
        let sent = requests(&server) - before;
        let took = start.elapsed();
        guard.release().await.unwrap();
        // If it took longer, there may have been a second renewal.
        if name != "first" && took < TTL * 2 / 3 {
            assert_eq!(sent, 1);
            nothing_left(&keeper, &server).await;
            return;
        }
    }
    panic!("the machine is too busy: no round finished before a second renewal");
}

#[tokio::test]
async fn a_ping_is_one_request_to_each_master_and_fails_when_the_server_is_gone() {
    let connect = async |url: &str| Redis::connect(Config::from_url(url).unwrap()).await.unwrap();
    let cluster = RedisCluster::start_or_panic();
    let store = connect(&cluster.url()).await;
    let pings = || cluster.nodes().iter().map(|node| calls(node, "ping")).collect::<Vec<_>>();
    let before = pings();
    soon("the reply", store.ping()).await.unwrap();
    assert_eq!(pings(), before.iter().map(|count| count + 1).collect::<Vec<_>>());

    let server = RedisServer::start_or_panic();
    let store = connect(&server.url()).await;
    soon("the reply", store.ping()).await.unwrap();
    drop(server);
    let error = soon("the error", store.ping()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}
