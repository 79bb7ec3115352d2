//! Regression tests.

use std::time::Duration;

use lockkeeper_core::{ErrorKind, Keeper, ReleaseOutcome};
use lockkeeper_redis::{Config, Redis, redlock};
use lockkeeper_testkit::server::{RedisCluster, RedisServer, RedlockNodes};
use lockkeeper_testkit::wait::{eventually, soon};

async fn open(url: &str) -> Keeper {
    Keeper::new(Redis::connect(Config::from_url(url).unwrap()).await.unwrap())
}

async fn open_redlock(url: &str) -> lockkeeper_core::Result<Keeper> {
    Ok(Keeper::new(redlock(Config::redlock_from_url(url).unwrap()).await?))
}

/// Waits until the lock can be acquired.
async fn until_lockable(keeper: &Keeper, name: &str) {
    eventually(name, async || match keeper.mutex(name).lock().await {
        Ok(guard) => guard.release().await.unwrap() == ReleaseOutcome::Released,
        Err(error) => {
            assert!(error.is_retryable(), "{error}");
            false
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_finds_the_node_that_takes_over_a_slot() {
    let mut cluster = RedisCluster::start_or_panic();
    let keeper = open(&cluster.url()).await;
    until_lockable(&keeper, "a").await;
    let slot = cluster.nodes()[0].command(&["CLUSTER", "KEYSLOT", "lockkeeper:{a}"]);
    let has_slot = |node: &RedisServer| node.try_command(&["GET", "lockkeeper:{a}"]).is_ok();
    let from = cluster.nodes().iter().position(has_slot).unwrap();
    let (to, third) = ((from + 1) % 3, (from + 2) % 3);
    for node in [to, third] {
        let option = "cluster-require-full-coverage";
        cluster.nodes()[node].command(&["CONFIG", "SET", option, "no"]);
    }
    cluster.nodes_mut()[from].kill9();
    // The client fails before another node has the slot.
    keeper.mutex("a").lock().await.unwrap_err();
    keeper.mutex("a").lock().await.unwrap_err();
    let id = cluster.nodes()[to].command(&["CLUSTER", "MYID"]);
    for node in [to, third] {
        cluster.nodes()[node].command(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]);
    }
    until_lockable(&keeper, "a").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keeper_closes_although_a_node_with_its_subscription_hangs() {
    let nodes = RedlockNodes::start_or_panic(3);
    let one = open_redlock(&nodes.url()).await.unwrap();
    let other = open_redlock(&format!("{}&command_timeout=500ms", nodes.url())).await.unwrap();
    // Closing waits for at most a TTL: until then the node may have a grant of this keeper.
    let other = other.ttl(Duration::from_secs(2));
    let _held = one.mutex("a").lock().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = other.mutex("a");
        async move { mutex.lock().await }
    });
    let last = &nodes.nodes()[2];
    eventually("a subscription", async || {
        last.command(&["PUBSUB", "NUMSUB", "lockkeeper:{a}"]).ends_with('1')
    })
    .await;
    last.stop();
    soon("close", other.close()).await;
    last.cont();
    assert_eq!(soon("the waiter", waiter).await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_that_fails_leaves_no_connection() {
    let master = RedisServer::start_or_panic();
    let replica = RedisServer::builder().replica_of(&master).start_or_panic();
    let url = format!("{}?protocol=resp2", replica.url());
    for _ in 0..3 {
        Redis::connect(Config::from_url(&url).unwrap()).await.unwrap_err();
    }
    eventually("no connections", async || {
        let clients = replica.command(&["CLIENT", "LIST", "TYPE", "pubsub"]);
        clients.trim().is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attempts_that_too_few_replicas_acknowledge_fail_with_the_reason() {
    let server = RedisServer::start_or_panic();
    let keeper = open(&format!("{}?min_replicas=1", server.url())).await;
    let locks = (0..12).map(|i| {
        let mutex = keeper.mutex(format!("lock {i}"));
        tokio::spawn(async move { mutex.lock().await })
    });
    for lock in locks.collect::<Vec<_>>() {
        let error = soon("an error", lock).await.unwrap().unwrap_err();
        assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
    }
    soon("close", keeper.close()).await;
    assert_eq!(server.command(&["DBSIZE"]), "0");
}

#[test]
fn a_store_outlives_the_runtime_that_it_was_created_in() {
    let server = RedisServer::start_or_panic();
    for options in ["", "?protocol=resp2"] {
        let config = Config::from_url(&format!("{}{options}", server.url())).unwrap();
        let first = tokio::runtime::Runtime::new().unwrap();
        let store = first.block_on(Redis::connect(config)).unwrap();
        drop(first);
        let second = tokio::runtime::Runtime::new().unwrap();
        second.block_on(async {
            let keeper = Keeper::new(store);
            let guard = soon("lock", keeper.mutex("a").lock()).await.unwrap();
            guard.release().await.unwrap();
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_behind_readers_retries_when_the_last_lease_ends() {
    let server = RedisServer::start_or_panic();
    let keeper = open(&server.url()).await;
    // The key of the readers lives as long as the longest lease so far.
    let long = keeper.rw_lock("a").ttl(Duration::from_secs(600)).read().await.unwrap();
    let short = keeper.rw_lock("a").ttl(Duration::from_secs(2)).read().await.unwrap();
    let ticket = short.detach().unwrap();
    long.release().await.unwrap();
    let writer = keeper.rw_lock("a").ttl(Duration::from_secs(600));
    let guard = soon("the writer", writer.write()).await.unwrap();
    guard.release().await.unwrap();
    drop(ticket);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_server_with_three_addresses_is_not_a_quorum() {
    let port = RedisServer::start_or_panic();
    let url = format!("redlock://127.0.0.1:{0},localhost:{0},127.0.1.1:{0}/", port.port());
    let error = open_redlock(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("the same server"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_password_for_the_nodes_of_a_quorum_is_a_config_error() {
    let nodes = RedlockNodes::start_or_panic(3);
    for node in nodes.nodes() {
        node.command(&["CONFIG", "SET", "requirepass", "hunter2"]);
    }
    let error = open_redlock(&nodes.url()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}
