//! Failover of a master under Sentinel, and failure and migration in a cluster.

use std::time::{Duration, Instant};

use lockkeeper_core::{ErrorKind, ReleaseOutcome, State};
use lockkeeper_testkit::history::History;
use lockkeeper_testkit::server::{RedisCluster, RedisSentinel, RedisServer};
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{
    LONG, close, keeper, key, lock, passing, secs, until_all_hear, until_empty, until_queued,
    waiting,
};

/// Awaits a future for longer than a failover takes on a busy machine.
async fn after_failover<T>(what: &str, future: impl Future<Output = T>) -> T {
    let output = tokio::time::timeout(secs(90), future).await;
    output.unwrap_or_else(|_| panic!("{what}: not within 90 s"))
}

/// Waits until the replica has the same state of a lock as the master.
async fn until_replicated(servers: &RedisSentinel, name: &str) {
    let (holder, queue) = (key(name), format!("{}:q", key(name)));
    let state = |server: &RedisServer| {
        let queue = server.command(&["ZRANGE", &queue, "0", "-1"]);
        (server.command(&["GET", &holder]), queue)
    };
    let (master, replica) = (servers.master(), servers.replica());
    eventually("replication", async || state(master) == state(replica)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_failover_replicated_locks_are_held_and_expired_ones_are_lost() {
    let mut servers = RedisSentinel::start_or_panic();
    let (one, other) = (keeper(&servers.url()).await, keeper(&servers.url()).await);
    let history = History::new();
    let guard = one.mutex("a").lock().await.unwrap();
    let open = history.begin("a", guard.owner(), guard.mode(), guard.fence());
    let waiters: Vec<_> = (0..4)
        .map(|i| passing(if i % 2 == 0 { &one } else { &other }.mutex("a"), &history))
        .collect();
    until_queued(servers.master(), "a", 4).await;
    // Its lease expires before there is a new master.
    let short = lock(&one.mutex("b").ttl(secs(1))).await;
    until_replicated(&servers, "a").await;

    servers.kill_master();
    let killed = Instant::now();
    after_failover("the loss of the short lease", short.lost()).await;
    assert!(!short.is_held());
    after_failover("a new lock", lock(&other.mutex("c"))).await.release().await.unwrap();
    eprintln!("unavailable for {:?}", killed.elapsed());
    after_failover("an extension", async {
        while guard.extend(LONG).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    assert_eq!(guard.state(), State::Held, "the new master has the lock");
    assert!(!waiters.iter().any(tokio::task::JoinHandle::is_finished), "two holders");

    // By index: not every sentinel may report the new master yet.
    let [_, master] = &*servers.servers_mut();
    until_all_hear(master, "a", 4).await;
    open.end();
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    for waiter in waiters {
        soon("a waiter", waiter).await.unwrap();
    }
    assert_eq!(history.assert_clean().holds, 5);
    let after = lock(&one.mutex("b")).await;
    assert!(after.fence() > short.fence());
    drop((after, short));
    close(&one).await;
    close(&other).await;
    until_empty(master).await;
}

/// Returns a name whose lock is in this range of slots.
fn name_on(node: &RedisServer, (first, last): (u32, u32)) -> String {
    let mut names = (0..).map(|i| format!("name-{i}"));
    let is_in_range = |name: &String| {
        let slot = node.command(&["CLUSTER", "KEYSLOT", &key(name)]);
        (first..=last).contains(&slot.parse().unwrap())
    };
    names.find(is_in_range).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_node_of_a_cluster_affects_only_its_own_locks() {
    let mut cluster = RedisCluster::start_or_panic();
    for node in cluster.nodes() {
        node.command(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
    }
    let dead_name = name_on(&cluster.nodes()[0], (0, 5460));
    let names = [(5461, 10922), (10923, 16383)].map(|slots| name_on(&cluster.nodes()[0], slots));
    let keeper = keeper(&cluster.url()).await;
    let dead = keeper.mutex(dead_name.clone()).ttl(secs(2)).lock().await.unwrap();
    let mut held = Vec::new();
    for (name, node) in names.iter().zip(1..) {
        let guard = keeper.mutex(name.clone()).lock().await.unwrap();
        let waiter = waiting(keeper.mutex(name.clone()));
        until_queued(&cluster.nodes()[node], name, 1).await;
        held.push((guard, waiter));
    }
    cluster.nodes_mut()[0].kill9();

    let error = soon("an error", keeper.mutex(dead_name.clone()).lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    soon("the loss", dead.lost()).await;
    for (guard, waiter) in held {
        guard.extend(LONG).await.unwrap();
        guard.release().await.unwrap();
        soon("the waiter", waiter).await.unwrap().release().await.unwrap();
    }

    cluster.nodes_mut()[0].restart().unwrap();
    cluster.wait_until_ok().unwrap();
    let again = soon("a lock on the restarted node", lock(&keeper.mutex(dead_name))).await;
    assert!(again.fence() > dead.fence());
    drop((again, dead));
    close(&keeper).await;
    eventually("no key is left", async || cluster.dbsize() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_survives_the_migration_of_its_slot() {
    let cluster = RedisCluster::start_or_panic();
    let [from, to, _] = cluster.nodes() else { panic!("{cluster:?}") };
    let name = name_on(from, (0, 5460));
    let keeper = keeper(&cluster.url()).await;
    let guard = keeper.mutex(name.clone()).lock().await.unwrap();

    let (port, slot) = (to.port().to_string(), from.command(&["CLUSTER", "KEYSLOT", &key(&name)]));
    let (from_id, to_id) = (from.command(&["CLUSTER", "MYID"]), to.command(&["CLUSTER", "MYID"]));
    to.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]);
    from.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]);
    let keys = from.command(&["CLUSTER", "GETKEYSINSLOT", &slot, "10"]);
    let migrate = ["MIGRATE", "127.0.0.1", &port, "", "0", "20000", "KEYS"];
    from.command(&migrate.into_iter().chain(keys.lines()).collect::<Vec<_>>());
    for node in [to, from] {
        node.command(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]);
    }

    guard.extend(LONG).await.unwrap();
    assert_eq!(guard.state(), State::Held);
    assert!(keeper.mutex(name.clone()).try_lock().await.unwrap().is_none());
    assert_eq!(to.command(&["EXISTS", &key(&name)]), "1");
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    soon("the next holder", keeper.mutex(name).lock()).await.unwrap().release().await.unwrap();
    close(&keeper).await;
    eventually("no key is left", async || cluster.dbsize() == 0).await;
}
