//! Which nodes of a quorum vote, and what becomes of votes that split.

use std::time::{Duration, Instant};

use lockkeeper_core::{ErrorKind, Fence, Keeper, State};
use lockkeeper_redis::{Config, redlock};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::{RedisServer, RedlockNodes, ServerClock};
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{LONG, cables, close, millis, until_empty};

async fn keeper_at(url: &str) -> Keeper {
    let nodes = Config::redlock_from_url(url).unwrap();
    Keeper::new(soon("a majority", redlock(nodes)).await.unwrap()).ttl(LONG)
}

/// A keeper next to one node, with a delay to the others, and the cables between.
async fn neighbour(servers: &RedlockNodes, own: usize, delay: Duration) -> (Keeper, Vec<Proxy>) {
    let (cables, url) = cables(servers).await;
    for (i, cable) in cables.iter().enumerate() {
        cable.delay(if i == own { Duration::ZERO } else { delay });
    }
    (keeper_at(&format!("{url}?min_uptime=0s")).await, cables)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_clients_next_to_different_nodes_exactly_one_gets_a_free_lock() {
    let servers = RedlockNodes::start_or_panic(3);
    let mut clients = Vec::new();
    for own in 0..3 {
        clients.push(neighbour(&servers, own, millis(1)).await);
    }
    // All connections are there before the first round.
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
            guards.extend(soon("an answer", one).await.unwrap());
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

/// How often a node was asked or given back to, or a little more: every such step looks whether keys exist, once or
/// more. Several steps share a call, so calls would say little.
fn asked(node: &RedisServer) -> u64 {
    let stats = node.command(&["INFO", "commandstats"]);
    let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_exists:calls="));
    calls.and_then(|calls| calls.split(',').next()).map_or(0, |calls| calls.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_for_each_hold_stay_bounded_as_tasks_grow() {
    let servers = RedlockNodes::start_or_panic(5);
    for tasks in [8, 50, 100] {
        let keepers = [keeper_at(&servers.url()).await, keeper_at(&servers.url()).await];
        let before = asked(&servers.nodes()[0]);
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
        let steps = (asked(&servers.nodes()[0]) - before) / tasks as u64;
        // About 30. It was 7,000 with 50 tasks when every give-back made every waiter ask again at once.
        assert!(steps <= 150, "{steps} steps for each hold with {tasks} tasks");
        for keeper in &keepers {
            close(keeper).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_has_restarted_does_not_give_a_lock_away_that_it_has_forgotten() {
    let mut servers = RedlockNodes::start_or_panic(3);
    let one = keeper_at(&servers.url()).await;
    servers.nodes_mut()[2].kill9();
    let guard = one.mutex("a").lock().await.unwrap();
    // Of its two nodes one forgets, and the third comes back: a majority that knows nothing of the holder.
    servers.nodes_mut()[1].restart().unwrap();
    servers.nodes_mut()[2].restart().unwrap();
    let other = keeper_at(&servers.cautious_url()).await;
    let error = soon("an answer", other.mutex("a").try_lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("does not vote before it has been up for 600s"), "{error}");
    assert_eq!(guard.state(), State::Held);
    // Nodes that keep their data vote at once, if they are said to.
    drop(guard);
    let trusting = keeper_at(&servers.url()).await;
    soon("a lock", crate::common::lock(&trusting.mutex("a"))).await.release().await.unwrap();
    for keeper in [&one, &other, &trusting] {
        close(keeper).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_vote_when_they_have_been_up_for_as_long_as_was_asked() {
    let started = Instant::now();
    let servers = RedlockNodes::start_or_panic(3);
    // A node says 1 as soon as its clock shows another second, also if it started a moment before that.
    for node in servers.nodes() {
        eventually("it says that it has been up for a second", async || {
            let info = node.command(&["INFO", "server"]);
            let line = info.lines().find_map(|line| line.strip_prefix("uptime_in_seconds:"));
            line.unwrap().trim().parse::<u64>().unwrap() >= 1
        })
        .await;
    }
    let url = format!("{}?min_uptime=1s", servers.cautious_url());
    let keeper = keeper_at(&url).await;
    let guard = soon("they vote", crate::common::lock(&keeper.mutex("a"))).await;
    let up = started.elapsed();
    assert!(up >= Duration::from_secs(1), "they voted when they had been up for {up:?} at most");
    guard.release().await.unwrap();
    close(&keeper).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_do_not_tell_their_uptime_are_a_config_error_that_says_what_to_do() {
    let servers = RedlockNodes::start_or_panic(3);
    for node in servers.nodes() {
        node.command(&["ACL", "SETUSER", "shop", "on", ">pw", "~*", "&*", "+@all", "-info"]);
    }
    let url = servers.cautious_url().replace("redlock://", "redlock://shop:pw@");
    let keeper = keeper_at(&url).await;
    let error = soon("an answer", keeper.mutex("a").lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("(ACL +info), or set min_uptime=0s"), "{error}");
    let trusting = keeper_at(&format!("{url}?min_uptime=0s")).await;
    trusting.mutex("a").lock().await.unwrap().release().await.unwrap();
    close(&trusting).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_named_twice_is_refused_also_if_that_shows_late() {
    let servers = RedlockNodes::start_or_panic(2);
    let [a, b] = servers.nodes() else { panic!("two") };
    // Another name of the first server, which does not answer at first.
    let alias = Proxy::start(a.addr()).await.unwrap();
    alias.freeze();
    let url = format!("redlock://{},{},{}?min_uptime=0s", a.addr(), b.addr(), alias.addr());
    let keeper = keeper_at(&url).await;
    keeper.mutex("a").lock().await.unwrap().release().await.unwrap();
    alias.heal();
    let mutex = keeper.mutex("a");
    let mut told = None;
    eventually("it is refused", async || {
        told = mutex.try_lock().await.err();
        told.as_ref().is_some_and(|error| error.kind() == ErrorKind::Config)
    })
    .await;
    let told = told.unwrap().to_string();
    assert!(told.contains("are the same server: name each server once"), "{told}");
    assert!(told.contains(&a.addr().to_string()), "{told}");
    assert!(told.contains(&alias.addr().to_string()), "{told}");
    // For good, and in every mode.
    let error = keeper.rw_lock("b").read().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    close(&keeper).await;
    for node in servers.nodes() {
        until_empty(node).await;
    }
}

/// As docs/backends/redis.md says: fewer than a majority of the nodes can name the holder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_for_a_lock_whose_holder_lost_a_node_is_undecided_and_gets_nothing() {
    let mut servers = RedlockNodes::start_or_panic(3);
    let [first, second, third] = servers.nodes() else { panic!("three") };
    // The holder never reaches the third node: its attempt there must not arrive late.
    let cable = Proxy::start(third.addr()).await.unwrap();
    cable.cut();
    let hosts = format!("{},{},{}", first.addr(), second.addr(), cable.addr());
    let one = keeper_at(&format!("redlock://{hosts}?min_uptime=0s")).await;
    let guard = one.mutex("a").lock().await.unwrap();
    servers.nodes_mut()[1].kill9();
    let other = keeper_at(&servers.url()).await;
    let tried = Instant::now();
    let error = soon("an answer", other.mutex("a").try_lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Undecided, "{error}");
    assert!(tried.elapsed() >= Duration::from_secs(2), "{:?}", tried.elapsed());
    assert_eq!(guard.state(), State::Held);
    // A client that waits gets it when it is released.
    let waiter = crate::common::waiting(other.mutex("a"));
    drop(guard);
    soon("the lock", waiter).await.unwrap().release().await.unwrap();
    servers.nodes_mut()[1].restart().unwrap();
    cable.heal();
    for keeper in [&one, &other] {
        close(keeper).await;
    }
}

/// Nodes whose clocks are so many milliseconds ahead of this machine's.
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
    assert!(apart.abs() < 60, "the clocks are not skewed as they should be: {apart}");
    nodes
}

/// The fence of a lock that is given back at once, by a client that remembers none. The client, because what it has
/// not given back on nodes that are away is waited for when it is closed.
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
    let (cables, url) = cables(&servers).await;
    let url = format!("{url}?min_uptime=0s");
    let mut last = None;
    // Every two nodes are away once: majorities have one to three nodes in common, in this order often but one.
    let pairs = [(0, 1), (2, 3), (0, 4), (1, 2), (3, 4), (0, 2), (1, 3), (2, 4), (0, 3), (1, 4)];
    for (a, b) in pairs {
        let away = [&cables[a], &cables[b]];
        for cable in away {
            cable.cut();
        }
        let (fence, keeper) = next_fence(&url).await;
        assert!(fence > last, "without {a} and {b}: {fence:?} after {last:?}");
        last = fence;
        for cable in away {
            cable.heal();
        }
        close(&keeper).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_does_not_lower_fences_while_clocks_differ_by_less_than_min_uptime() {
    let mut servers = skewed(&[900, 0, 0, 0, 0]);
    let (cables, url) = cables(&servers).await;
    cables[3].cut();
    cables[4].cut();
    let (first, one) = next_fence(&format!("{url}?min_uptime=0s")).await;
    // The only node that the next majority has in common with this one forgets the fence, which is ahead of all clocks
    // but one.
    servers.nodes_mut()[2].restart().unwrap();
    for cable in &cables[..2] {
        cable.cut();
    }
    for cable in &cables[3..] {
        cable.heal();
    }
    let (second, two) = next_fence(&format!("{url}?min_uptime=1s")).await;
    assert!(second > first, "{second:?} after {first:?}");
    cables.iter().for_each(Proxy::heal);
    close(&one).await;
    close(&two).await;
}
