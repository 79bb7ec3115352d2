//! Which nodes of a quorum vote, and what becomes of votes that split.

use std::time::Duration;

use lockkeeper_core::{ErrorKind, Keeper, State};
use lockkeeper_redis::{Config, redlock};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::{RedisServer, RedlockNodes};
use lockkeeper_testkit::wait::{eventually, soon};

use crate::kit::{LONG, close, millis, until_empty};

async fn keeper_at(url: &str) -> Keeper {
    let nodes = Config::redlock_from_url(url).unwrap();
    Keeper::new(soon("a majority", redlock(nodes)).await.unwrap()).ttl(LONG)
}

/// A keeper next to one node, with a delay to the others, and the cables between.
async fn neighbour(servers: &RedlockNodes, own: usize, delay: Duration) -> (Keeper, Vec<Proxy>) {
    let (mut cables, mut addresses) = (Vec::new(), Vec::new());
    for (i, node) in servers.nodes().iter().enumerate() {
        let cable = Proxy::start(node.addr()).await.unwrap();
        cable.delay(if i == own { Duration::ZERO } else { delay });
        addresses.push(cable.addr().to_string());
        cables.push(cable);
    }
    let url = format!("redlock://{}?min_uptime=0s", addresses.join(","));
    (keeper_at(&url).await, cables)
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
    soon("a lock", crate::kit::lock(&trusting.mutex("a"))).await.release().await.unwrap();
    for keeper in [&one, &other, &trusting] {
        close(keeper).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_vote_when_they_have_been_up_for_as_long_as_was_asked() {
    let servers = RedlockNodes::start_or_panic(3);
    // The nodes' uptime comes in whole seconds, rounded down; the rest of the time is measured here.
    let url = format!("{}?min_uptime=1s", servers.cautious_url());
    let keeper = keeper_at(&url).await;
    let guard = soon("they vote", crate::kit::lock(&keeper.mutex("a"))).await;
    guard.release().await.unwrap();
    for node in servers.nodes() {
        let info = node.command(&["INFO", "server"]);
        let line = info.lines().find_map(|line| line.strip_prefix("uptime_in_seconds:"));
        assert!(line.unwrap().trim().parse::<u64>().unwrap() >= 1);
    }
    close(&keeper).await;
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
