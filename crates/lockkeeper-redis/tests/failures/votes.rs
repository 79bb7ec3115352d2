//! Redlock: split votes, nodes that do not vote, and skewed clocks.

use std::time::{Duration, Instant};

use lockkeeper_core::{ErrorKind, Fence, Keeper, State};
use lockkeeper_redis::{Config, redlock};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::{RedisServer, RedlockNodes, ServerClock};
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{LONG, close, millis, proxies, until_empty};

async fn keeper_at(url: &str) -> Keeper {
    let nodes = Config::redlock_from_url(url).unwrap();
    Keeper::new(soon("a majority", redlock(nodes)).await.unwrap()).ttl(LONG)
}

/// Opens a keeper with a delay to all nodes but one. Returns it with its proxies.
async fn keeper_near(servers: &RedlockNodes, own: usize, delay: Duration) -> (Keeper, Vec<Proxy>) {
    let (proxies, url) = proxies(servers).await;
    for (i, proxy) in proxies.iter().enumerate() {
        proxy.delay(if i == own { Duration::ZERO } else { delay });
    }
    (keeper_at(&format!("{url}?min_uptime=0s")).await, proxies)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exactly_one_of_concurrent_tries_near_different_nodes_succeeds() {
    let servers = RedlockNodes::start_or_panic(3);
    let mut clients = Vec::new();
    for own in 0..3 {
        clients.push(keeper_near(&servers, own, millis(1)).await);
    }
    // Opens all connections before the first round.
    for (keeper, _) in &clients {
        keeper.mutex("warm").lock().await.unwrap().release().await.unwrap();
    }
    for round in 0..30 {
        let tries: Vec<_> = clients
            .iter()
            .map(|(keeper, _)| {
                let mutex = keeper.mutex(format!("a{round}"));
                tokio::spawn(async move { mutex.try_lock().await.unwrap() })
            })
            .collect();
        let mut guards = Vec::new();
        for one in tries {
            guards.extend(soon("a try", one).await.unwrap());
        }
        assert_eq!(guards.len(), 1, "round {round}");
    }
    for (keeper, _) in &clients {
        close(keeper).await;
    }
    for node in servers.nodes() {
        until_empty(node).await;
    }
}

/// Returns an upper bound of the attempts and releases that a node has executed: each checks at least once whether keys
/// exist. The number of calls would be too low, since several requests share a call.
fn requests(node: &RedisServer) -> u64 {
    let stats = node.command(&["INFO", "commandstats"]);
    let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_exists:calls="));
    calls.and_then(|calls| calls.split(',').next()).map_or(0, |calls| calls.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_per_hold_stay_bounded_as_the_number_of_tasks_grows() {
    let servers = RedlockNodes::start_or_panic(5);
    for tasks in [8, 50, 100] {
        let keepers = [keeper_at(&servers.url()).await, keeper_at(&servers.url()).await];
        let before = requests(&servers.nodes()[0]);
        let work: Vec<_> = (0..tasks)
            .map(|i| {
                let mutex = keepers[i % 2].mutex("a");
                tokio::spawn(async move {
                    let guard = mutex.lock().await.unwrap();
                    tokio::time::sleep(millis(2)).await;
                    guard.release().await.unwrap();
                })
            })
            .collect();
        for task in work {
            soon("a turn", task).await.unwrap();
        }
        let per_hold = (requests(&servers.nodes()[0]) - before) / tasks as u64;
        // If all waiters retried at once after every release, there would be thousands with 50 tasks.
        assert!(per_hold <= 150, "{per_hold} requests per hold with {tasks} tasks");
        for keeper in &keepers {
            close(keeper).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_node_does_not_vote_for_a_lock_that_it_may_have_forgotten() {
    let mut servers = RedlockNodes::start_or_panic(3);
    let one = keeper_at(&servers.url()).await;
    servers.nodes_mut()[2].kill9();
    let guard = one.mutex("a").lock().await.unwrap();
    // One of its two nodes loses its data, and the third restarts: a majority that does not know the holder.
    servers.nodes_mut()[1].restart().unwrap();
    servers.nodes_mut()[2].restart().unwrap();
    let other = keeper_at(&servers.cautious_url()).await;
    let error = soon("an error", other.mutex("a").try_lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("does not vote before it has been up for 600s"), "{error}");
    assert_eq!(guard.state(), State::Held);
    // With min_uptime=0s, nodes vote at once.
    drop(guard);
    let trusting = keeper_at(&servers.url()).await;
    soon("a lock", crate::common::lock(&trusting.mutex("a"))).await.release().await.unwrap();
    for keeper in [&one, &other, &trusting] {
        close(keeper).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_vote_once_they_have_been_up_for_min_uptime() {
    let started = Instant::now();
    let servers = RedlockNodes::start_or_panic(3);
    // A node reports an uptime of 1 as soon as the second of its clock changes, which may be right after its start.
    for node in servers.nodes() {
        eventually("an uptime of a second", async || {
            let info = node.command(&["INFO", "server"]);
            let line = info.lines().find_map(|line| line.strip_prefix("uptime_in_seconds:"));
            line.unwrap().trim().parse::<u64>().unwrap() >= 1
        })
        .await;
    }
    let url = format!("{}?min_uptime=1s", servers.cautious_url());
    let keeper = keeper_at(&url).await;
    let guard = soon("a lock", crate::common::lock(&keeper.mutex("a"))).await;
    let up = started.elapsed();
    assert!(up >= Duration::from_secs(1), "nodes voted after at most {up:?}");
    guard.release().await.unwrap();
    close(&keeper).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_do_not_report_their_uptime_are_a_config_error_with_advice() {
    let servers = RedlockNodes::start_or_panic(3);
    for node in servers.nodes() {
        node.command(&["ACL", "SETUSER", "shop", "on", ">pw", "~*", "&*", "+@all", "-info"]);
    }
    let url = servers.cautious_url().replace("redlock://", "redlock://shop:pw@");
    let keeper = keeper_at(&url).await;
    let error = soon("an error", keeper.mutex("a").lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("(ACL +info), or set min_uptime=0s"), "{error}");
    let trusting = keeper_at(&format!("{url}?min_uptime=0s")).await;
    trusting.mutex("a").lock().await.unwrap().release().await.unwrap();
    close(&trusting).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicate_server_is_refused_even_if_it_is_detected_late() {
    let servers = RedlockNodes::start_or_panic(2);
    let [a, b] = servers.nodes() else { panic!("two") };
    // A second address of the first server, which does not reply at first.
    let alias = Proxy::start(a.addr()).await.unwrap();
    alias.freeze();
    let url = format!("redlock://{},{},{}?min_uptime=0s", a.addr(), b.addr(), alias.addr());
    let keeper = keeper_at(&url).await;
    keeper.mutex("a").lock().await.unwrap().release().await.unwrap();
    alias.heal();
    let mutex = keeper.mutex("a");
    let mut error = None;
    eventually("an error", async || {
        error = mutex.try_lock().await.err();
        error.as_ref().is_some_and(|error| error.kind() == ErrorKind::Config)
    })
    .await;
    let error = error.unwrap().to_string();
    assert!(error.contains("are the same server: name each server once"), "{error}");
    assert!(error.contains(&a.addr().to_string()), "{error}");
    assert!(error.contains(&alias.addr().to_string()), "{error}");
    // Permanently, and in every mode.
    let error = keeper.rw_lock("b").read().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    close(&keeper).await;
    for node in servers.nodes() {
        until_empty(node).await;
    }
}

/// Fewer than a majority of the nodes name the holder (docs/backends/redis.md).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_for_a_lock_whose_holder_lost_a_node_is_undecided_and_does_not_acquire() {
    let mut servers = RedlockNodes::start_or_panic(3);
    let [first, second, third] = servers.nodes() else { panic!("three") };
    // The holder never reaches the third node: its attempt there must not arrive late.
    let proxy = Proxy::start(third.addr()).await.unwrap();
    proxy.cut();
    let hosts = format!("{},{},{}", first.addr(), second.addr(), proxy.addr());
    let one = keeper_at(&format!("redlock://{hosts}?min_uptime=0s")).await;
    let guard = one.mutex("a").lock().await.unwrap();
    servers.nodes_mut()[1].kill9();
    let other = keeper_at(&servers.url()).await;
    let tried = Instant::now();
    let error = soon("an error", other.mutex("a").try_lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Undecided, "{error}");
    assert!(tried.elapsed() >= Duration::from_secs(2), "{:?}", tried.elapsed());
    assert_eq!(guard.state(), State::Held);
    // A waiter acquires the lock when it is released.
    let waiter = crate::common::waiting(other.mutex("a"));
    drop(guard);
    soon("the lock", waiter).await.unwrap().release().await.unwrap();
    servers.nodes_mut()[1].restart().unwrap();
    proxy.heal();
    for keeper in [&one, &other] {
        close(keeper).await;
    }
}

/// Starts nodes whose clocks are this many milliseconds ahead of this machine's.
fn skewed(ahead: &[i64]) -> RedlockNodes {
    let builders = ahead.iter().map(|millis| {
        let clock = ServerClock::new().unwrap();
        clock.set_ahead(millis * 1000);
        RedisServer::builder().clock(&clock)
    });
    let nodes = RedlockNodes::from_builders(builders.collect()).unwrap();
    let seconds = |node: &RedisServer| -> i64 {
        node.command(&["TIME"]).lines().next().unwrap().parse().unwrap()
    };
    let (first, last) = (&nodes.nodes()[0], &nodes.nodes()[ahead.len() - 1]);
    let apart = seconds(first) - seconds(last) - (ahead[0] - ahead[ahead.len() - 1]) / 1000;
    assert!(apart.abs() < 60, "the skew of the clocks is wrong by {apart} s");
    nodes
}

/// Locks and releases with a new keeper, which has no floor. Returns the fence, and the keeper: closing it waits for
/// releases on disconnected nodes.
async fn next_fence(url: &str) -> (Option<Fence>, Keeper) {
    let keeper = keeper_at(url).await;
    let guard = soon("a lock", crate::common::lock(&keeper.mutex("a"))).await;
    let fence = guard.fence();
    guard.release().await.unwrap();
    (fence, keeper)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_rise_across_majorities_of_nodes_whose_clocks_are_minutes_apart() {
    let servers = skewed(&[300_000, 10_000, 0, -10_000, -300_000]);
    let (proxies, url) = proxies(&servers).await;
    let url = format!("{url}?min_uptime=0s");
    let mut last = None;
    // Each pair of nodes is disconnected once. Consecutive majorities share one to three nodes, in this order often one.
    let pairs = [(0, 1), (2, 3), (0, 4), (1, 2), (3, 4), (0, 2), (1, 3), (2, 4), (0, 3), (1, 4)];
    for (a, b) in pairs {
        let away = [&proxies[a], &proxies[b]];
        for proxy in away {
            proxy.cut();
        }
        let (fence, keeper) = next_fence(&url).await;
        assert!(fence > last, "without {a} and {b}: {fence:?} after {last:?}");
        last = fence;
        for proxy in away {
            proxy.heal();
        }
        close(&keeper).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_does_not_lower_fences_while_clocks_differ_by_less_than_min_uptime() {
    let mut servers = skewed(&[900, 0, 0, 0, 0]);
    let (proxies, url) = proxies(&servers).await;
    proxies[3].cut();
    proxies[4].cut();
    let (first, one) = next_fence(&format!("{url}?min_uptime=0s")).await;
    // The only node that the next majority shares with this one loses the fence, which is ahead of all clocks but one.
    servers.nodes_mut()[2].restart().unwrap();
    for proxy in &proxies[..2] {
        proxy.cut();
    }
    for proxy in &proxies[3..] {
        proxy.heal();
    }
    let (second, two) = next_fence(&format!("{url}?min_uptime=1s")).await;
    assert!(second > first, "{second:?} after {first:?}");
    proxies.iter().for_each(Proxy::heal);
    close(&one).await;
    close(&two).await;
}
