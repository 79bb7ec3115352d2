//! Redis Cluster: all keys of a lock are in one slot, and follow its migration.

use std::collections::BTreeSet;

use lockkeeper_core::{Keeper, ReleaseOutcome};
use lockkeeper_testkit::server::{RedisCluster, RedisServer};
use lockkeeper_testkit::wait::soon;

use crate::common::{got, key, lock, open, read, secs, waiter, write};

const NAMES: [&str; 16] = [
    "a",
    "orders/42",
    "{a}",
    "}",
    "}a",
    "{",
    "{}",
    "{}a",
    "a{b}c",
    "%",
    "%7D",
    "}{",
    "🔒",
    "a b\nc",
    "..",
    "lockkeeper:{x}",
];

/// Returns every key in the cluster, with its node.
fn keys(cluster: &RedisCluster) -> Vec<(usize, String)> {
    let nodes = cluster.nodes().iter().enumerate();
    let keys = nodes.map(|(which, node)| {
        // A name may contain a line break, which would look like two keys.
        let count: usize = node.command(&["DBSIZE"]).parse().unwrap();
        let script = "return {redis.call('KEYS', '*')[tonumber(ARGV[1])]}";
        let key = move |at: usize| node.command(&["EVAL", script, "0", &at.to_string()]);
        (1..=count).map(move |at| (which, key(at))).collect::<Vec<_>>()
    });
    keys.flatten().collect()
}

/// Returns the number of nodes that have sent MOVED redirects.
fn redirections(cluster: &RedisCluster) -> usize {
    let stats = cluster.nodes().iter().map(|node| node.command(&["INFO", "errorstats"]));
    stats.map(|stats| stats.matches("errorstat_MOVED").count()).sum()
}

#[tokio::test]
async fn the_keys_of_any_name_are_in_the_slot_that_the_client_computes() {
    let cluster = RedisCluster::start_or_panic();
    let keeper = open(&cluster.url()).await;
    let mut nodes = BTreeSet::new();
    for name in NAMES {
        let writer = lock(&keeper, name).await;
        let waiting = waiter(&keeper, name, 1, read(&keeper, name)).await;
        let permit = soon("a permit", keeper.semaphore(name, 2).acquire()).await.unwrap();
        let keys = keys(&cluster);
        // Holder and queue; and the semaphore's sharers and records.
        assert_eq!(keys.len(), 4, "{name:?}: {keys:?}");
        assert!(keys.iter().any(|(_, there)| *there == key(name)), "{name:?}: {keys:?}");
        let node = keys[0].0;
        let slots = keys.iter().map(|(at, key)| {
            assert_eq!(*at, node, "{name:?}: {keys:?}");
            cluster.nodes()[node].command(&["CLUSTER", "KEYSLOT", key])
        });
        assert_eq!(slots.collect::<BTreeSet<_>>().len(), 1, "{name:?}");
        nodes.insert(node);
        permit.release().await.unwrap();
        writer.release().await.unwrap();
        got(waiting).await.release().await.unwrap();
        assert_eq!(cluster.dbsize(), 0, "{name:?}");
    }
    assert_eq!(nodes.len(), 3, "the names are spread over all nodes");
    // The server would redirect a request to a wrong slot.
    assert_eq!(redirections(&cluster), 0);
    let mut guards = Vec::new();
    for name in NAMES {
        guards.push(lock(&keeper, name).await);
    }
    let infos = keeper.inspect().unwrap().list("").await.unwrap();
    let listed: BTreeSet<&str> = infos.iter().map(|info| info.name.as_str()).collect();
    assert_eq!(listed, NAMES.into_iter().collect());
    drop(guards);
    soon("the releases", keeper.close()).await;
    assert_eq!(cluster.dbsize(), 0);
}

/// Migrates the slot of a lock to another node.
fn move_slot(cluster: &RedisCluster, name: &str, from: usize, to: usize) {
    let nodes = cluster.nodes();
    let slot = nodes[0].command(&["CLUSTER", "KEYSLOT", &key(name)]);
    let id = |node: &RedisServer| node.command(&["CLUSTER", "MYID"]);
    nodes[to].command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id(&nodes[from])]);
    nodes[from].command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id(&nodes[to])]);
    let keys = nodes[from].command(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
    if !keys.is_empty() {
        let port = nodes[to].port().to_string();
        let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "30000", "KEYS"];
        migrate.extend(keys.lines());
        nodes[from].command(&migrate);
    }
    // First the importing node, as the manual of CLUSTER SETSLOT recommends.
    for node in [to, from, 3 - to - from] {
        nodes[node].command(&["CLUSTER", "SETSLOT", &slot, "NODE", &id(&nodes[to])]);
    }
}

async fn holds(keeper: &Keeper, name: &str) -> usize {
    let infos = keeper.inspect().unwrap().show(name).await.unwrap();
    infos.iter().map(|info| info.holders.len()).sum()
}

#[tokio::test]
async fn a_lock_follows_its_slot_to_another_node() {
    let cluster = RedisCluster::start_or_panic();
    let keeper = open(&cluster.url()).await.ttl(secs(15));
    let other = open(&cluster.url()).await.ttl(secs(15));
    // A free lock, whose old node the client knows.
    lock(&keeper, "a").await.release().await.unwrap();
    // The slot of "a" is the last node's: 15495.
    move_slot(&cluster, "a", 2, 0);
    let first = lock(&keeper, "a").await;
    assert!(redirections(&cluster) > 0, "no redirect");
    assert!(other.mutex("a").try_lock().await.unwrap().is_none());

    // A held lock with a waiter.
    let waiting = waiter(&keeper, "a", 1, write(&other, "a")).await;
    move_slot(&cluster, "a", 0, 1);
    assert_eq!(holds(&keeper, "a").await, 1);
    first.extend(secs(15)).await.unwrap();
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
    assert_eq!(first.release().await.unwrap(), ReleaseOutcome::Released);
    let second = got(waiting).await;
    second.extend(secs(15)).await.unwrap();
    second.release().await.unwrap();
    soon("the releases", keeper.close()).await;
    soon("the releases", other.close()).await;
    assert_eq!(cluster.dbsize(), 0);
}
