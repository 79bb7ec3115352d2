//! Redlock on five nodes, some of which fail.

use std::time::{Duration, Instant};

use lockkeeper_core::{ErrorKind, Fence, Keeper, ReleaseOutcome, State};
use lockkeeper_redis::{Config, redlock};
use lockkeeper_testkit::history::History;
use lockkeeper_testkit::server::{RedisServer, RedlockNodes};
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{LONG, close, key, millis, passing, proxies, secs, until_empty};

/// A node timeout that no test reaches: a test that waited for it would fail.
const NEVER: Duration = Duration::from_secs(20);

/// Opens a keeper that waits this long for a node if there is no majority without it.
async fn keeper_at(url: &str, node_timeout: Duration) -> Keeper {
    let nodes = Config::redlock_from_url(url).unwrap();
    let quorum = soon("a majority", redlock(nodes)).await.unwrap();
    Keeper::new(quorum.node_timeout(node_timeout)).ttl(LONG)
}

async fn keeper(servers: &RedlockNodes) -> Keeper {
    keeper_at(&servers.url(), NEVER).await
}

async fn until_all_empty(servers: &RedlockNodes) {
    for node in servers.nodes() {
        until_empty(node).await;
    }
}

/// Returns the number of nodes that have a holder.
fn holders(nodes: &[RedisServer], name: &str) -> usize {
    nodes.iter().filter(|node| node.command(&["EXISTS", &key(name)]) == "1").count()
}

/// Acquires fifty locks of each kind. Waiting for one node would take longer than all of them may.
async fn fifty_locks_each(keeper: &Keeper) {
    let start = Instant::now();
    for i in 0..50 {
        let guard = keeper.mutex(format!("m{i}")).lock().await.unwrap();
        assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
        let lock = keeper.rw_lock(format!("r{i}"));
        let (one, two) = (lock.read().await.unwrap(), lock.read().await.unwrap());
        one.release().await.unwrap();
        two.release().await.unwrap();
    }
    assert!(start.elapsed() < NEVER, "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_do_not_wait_for_two_nodes_that_hang_or_are_dead() {
    let mut servers = RedlockNodes::start_or_panic(5);
    let keeper = keeper(&servers).await;
    servers.nodes()[0].stop();
    servers.nodes()[3].stop();
    fifty_locks_each(&keeper).await;
    servers.nodes()[0].cont();
    servers.nodes()[3].cont();
    // The grants of attempts that were sent while they hung are released.
    close(&keeper).await;
    until_all_empty(&servers).await;

    let keeper = self::keeper(&servers).await;
    servers.nodes_mut()[1].kill9();
    servers.nodes_mut()[2].kill9();
    fifty_locks_each(&keeper).await;
    let shared = keeper.rw_lock("s").read().await.unwrap();
    assert!(keeper.rw_lock("s").try_write().await.unwrap().is_none());
    drop(shared);
    servers.nodes_mut()[1].restart().unwrap();
    servers.nodes_mut()[2].restart().unwrap();
    close(&keeper).await;
    until_all_empty(&servers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_three_nodes_down_an_attempt_fails_in_bounded_time_and_leaves_no_key() {
    let mut servers = RedlockNodes::start_or_panic(5);
    let keeper = keeper_at(&servers.url(), secs(1)).await;
    for node in &servers.nodes()[..3] {
        node.stop();
    }
    let error = soon("an error", keeper.mutex("a").lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("of 5 nodes answered"), "{error}");
    for node in &servers.nodes()[..3] {
        node.cont();
    }
    until_all_empty(&servers).await;
    for node in &mut servers.nodes_mut()[..3] {
        node.kill9();
    }
    let error = soon("an error", keeper.rw_lock("a").read()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    for node in &mut servers.nodes_mut()[..3] {
        node.restart().unwrap();
    }
    let guard = soon("a lock", crate::common::lock(&keeper.mutex("a"))).await;
    drop(guard);
    close(&keeper).await;
    until_all_empty(&servers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uncontended_locks_leave_no_key_on_any_node() {
    let servers = RedlockNodes::start_or_panic(5);
    let keeper = keeper(&servers).await;
    for _ in 0..200 {
        let guard = keeper.mutex("a").lock().await.unwrap();
        assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    }
    close(&keeper).await;
    until_all_empty(&servers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_survives_a_minority_that_dies_and_restarts_empty() {
    let mut servers = RedlockNodes::start_or_panic(5);
    let (keeper, other) = (keeper(&servers).await, keeper(&servers).await);
    let guard = keeper.mutex("a").lock().await.unwrap();
    let reader = keeper.rw_lock("b").read().await.unwrap();
    // At once: replies of the slowest two nodes may still be in flight.
    servers.nodes_mut()[0].kill9();
    servers.nodes_mut()[1].kill9();
    for dead in [true, false] {
        if !dead {
            servers.nodes_mut()[0].restart().unwrap();
            servers.nodes_mut()[1].restart().unwrap();
        }
        guard.extend(LONG).await.unwrap();
        reader.extend(LONG).await.unwrap();
        assert_eq!((guard.state(), reader.state()), (State::Held, State::Held));
        assert!(other.mutex("a").try_lock().await.unwrap().is_none());
        assert!(other.rw_lock("b").try_write().await.unwrap().is_none());
    }
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    reader.release().await.unwrap();
    close(&keeper).await;
    close(&other).await;
    until_all_empty(&servers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_extension_needs_a_true_majority_and_a_failed_one_releases_nothing() {
    let servers = RedlockNodes::start_or_panic(5);
    let keeper = keeper_at(&servers.url(), secs(1)).await;
    let guard = crate::common::lock(&keeper.mutex("a")).await;
    eventually("a grant on all nodes", async || holders(servers.nodes(), "a") == 5).await;
    for node in &servers.nodes()[2..] {
        node.stop();
    }
    let error = soon("an error", guard.extend(LONG)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(guard.state(), State::AtRisk);
    assert!(guard.is_held(), "lost before its lease ended");
    for node in &servers.nodes()[2..] {
        node.cont();
    }
    assert_eq!(holders(servers.nodes(), "a"), 5, "the failed extension released a node");
    eventually("an extension", async || guard.extend(LONG).await.is_ok()).await;
    assert_eq!(guard.state(), State::Held);
    drop(guard);
    close(&keeper).await;
    until_all_empty(&servers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_validity_of_a_grant_excludes_the_time_of_the_attempt_and_must_be_positive() {
    let servers = RedlockNodes::start_or_panic(5);
    let (proxies, url) = proxies(&servers).await;
    let url = format!("{url}?min_uptime=0s");
    let keeper = keeper_at(&url, NEVER).await;
    // Every majority includes a slow node.
    let slow = |delay| proxies[..3].iter().for_each(|proxy| proxy.delay(delay));
    slow(millis(150));
    let start = Instant::now();
    let guard = keeper.mutex("a").ttl(secs(60)).lock().await.unwrap();
    let elapsed = start.elapsed();
    assert!(elapsed >= millis(300), "{elapsed:?}");
    let (ttl, drift) = (secs(60), millis(600 + 2));
    assert!(guard.remaining().unwrap() + drift + millis(300) <= ttl);
    // The attempt was sent after `start`, and at least 300 ms before its end.
    let ends = guard.expires_at().unwrap() + drift + millis(300);
    assert!(ends <= start + ttl + elapsed, "{:?}", ends.duration_since(start));

    let error = keeper.mutex("b").ttl(millis(250)).try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    slow(Duration::ZERO);
    drop(guard);
    close(&keeper).await;
    until_all_empty(&servers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_rise_across_all_majorities() {
    let servers = RedlockNodes::start_or_panic(5);
    // A majority stores a fence that is far ahead of the clock.
    let clock = servers.nodes()[0].command(&["TIME"]);
    let seconds: u64 = clock.lines().next().unwrap().parse().unwrap();
    let ahead = (seconds + 3600) * 1_000_000;
    for node in &servers.nodes()[..3] {
        let fence = format!("{}:f", key("a"));
        node.command(&["SET", &fence, &ahead.to_string(), "EX", "3600"]);
    }
    let mut last = Fence::new(ahead);
    let (proxies, url) = proxies(&servers).await;
    let url = format!("{url}?min_uptime=0s");
    for round in 0..10 {
        // Each majority shares only one or two nodes with the previous one.
        let away = [&proxies[round * 2 % 5], &proxies[(round * 2 + 1) % 5]];
        for proxy in away {
            proxy.cut();
        }
        // A new keeper has no floor.
        let keeper = keeper_at(&url, NEVER).await;
        let guard = keeper.mutex("a").lock().await.unwrap();
        assert!(guard.fence() > last, "round {round}: {:?} after {last:?}", guard.fence());
        last = guard.fence();
        guard.release().await.unwrap();
        for proxy in away {
            proxy.heal();
        }
        close(&keeper).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_rise_over_restarts() {
    let mut servers = RedlockNodes::start_or_panic(5);
    let mut last = None;
    for round in 0..5 {
        let keeper = keeper(&servers).await;
        let guard = keeper.mutex("a").lock().await.unwrap();
        assert!(guard.fence() > last, "round {round}: {:?} after {last:?}", guard.fence());
        last = guard.fence();
        guard.release().await.unwrap();
        close(&keeper).await;
        servers.nodes_mut()[round].restart().unwrap();
        servers.nodes_mut()[(round + 2) % 5].restart().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contending_tasks_are_woken_by_releases_and_never_overlap() {
    let servers = RedlockNodes::start_or_panic(5);
    let (one, other) = (keeper(&servers).await, keeper(&servers).await);
    let history = History::new();
    for _ in 0..3 {
        let guard = one.mutex("a").lock().await.unwrap();
        let open = history.begin("a", guard.owner(), guard.mode(), guard.fence());
        let tasks: Vec<_> = (0..8)
            .map(|i| passing(if i % 2 == 0 { &one } else { &other }.mutex("a"), &history))
            .collect();
        open.end();
        guard.release().await.unwrap();
        for task in tasks {
            // No lease expires in this time.
            soon("a task", task).await.unwrap();
        }
    }
    assert_eq!(history.assert_clean().holds, 27);
    close(&one).await;
    close(&other).await;
    until_all_empty(&servers).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redlock_opens_with_a_minority_down_and_uses_it_when_it_is_up() {
    let mut servers = RedlockNodes::start_or_panic(5);
    servers.nodes_mut()[0].kill9();
    servers.nodes()[1].stop();
    let keeper = keeper(&servers).await;
    keeper.mutex("a").lock().await.unwrap().release().await.unwrap();
    servers.nodes_mut()[0].restart().unwrap();
    servers.nodes()[1].cont();
    servers.nodes_mut()[2].kill9();
    servers.nodes_mut()[3].kill9();
    let guard = soon("a lock", crate::common::lock(&keeper.mutex("a"))).await;
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redlock_does_not_open_without_a_majority_or_with_a_duplicate_node() {
    let mut servers = RedlockNodes::start_or_panic(5);
    for hangs in [true, false] {
        for node in &mut servers.nodes_mut()[..3] {
            if hangs {
                node.stop();
            } else {
                node.kill9();
            }
        }
        let nodes = Config::redlock_from_url(&servers.url()).unwrap();
        let error = soon("an error", redlock(nodes)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("only 2 of 5 nodes answered"), "{error}");
        assert!(!error.to_string().contains('\n'), "{error}");
    }
    let twice = format!("{},{}", servers.cautious_url(), servers.nodes()[4].addr());
    let error = redlock(Config::redlock_from_url(&twice).unwrap()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("has a duplicate"), "{error}");
}
