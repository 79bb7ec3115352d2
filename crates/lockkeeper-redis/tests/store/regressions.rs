//! Faults that a hostile reading found.

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

/// Waits until the lock can be had.
async fn until_it_locks(keeper: &Keeper, name: &str) {
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
async fn a_node_that_takes_over_in_a_cluster_is_found() {
    let mut cluster = RedisCluster::start_or_panic();
    let keeper = open(&cluster.url()).await;
    until_it_locks(&keeper, "a").await;
    let slot = cluster.nodes()[0].command(&["CLUSTER", "KEYSLOT", "lockkeeper:{a}"]);
    let has_it = |node: &RedisServer| node.try_command(&["GET", "lockkeeper:{a}"]).is_ok();
    let from = cluster.nodes().iter().position(has_it).unwrap();
    let (to, third) = ((from + 1) % 3, (from + 2) % 3);
    for node in [to, third] {
        let option = "cluster-require-full-coverage";
        cluster.nodes()[node].command(&["CONFIG", "SET", option, "no"]);
    }
    cluster.nodes_mut()[from].kill9();
    // The client meets the death before another has the slot.
    keeper.mutex("a").lock().await.unwrap_err();
    keeper.mutex("a").lock().await.unwrap_err();
    let id = cluster.nodes()[to].command(&["CLUSTER", "MYID"]);
    for node in [to, third] {
        cluster.nodes()[node].command(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]);
    }
    until_it_locks(&keeper, "a").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keeper_closes_although_a_node_hangs_on_which_it_listened() {
    let nodes = RedlockNodes::start_or_panic(3);
    let one = open_redlock(&nodes.url()).await.unwrap();
    let other = open_redlock(&format!("{}&command_timeout=500ms", nodes.url())).await.unwrap();
    // It waits for a ttl at most: until then the node may have something of ours.
    let other = other.ttl(Duration::from_secs(2));
    let _held = one.mutex("a").lock().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = other.mutex("a");
        async move { mutex.lock().await }
    });
    let last = &nodes.nodes()[2];
    eventually("it listens", async || {
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
    eventually("all are gone", async || {
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
        let error = soon("an answer", lock).await.unwrap().unwrap_err();
        assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
    }
    soon("close", keeper.close()).await;
    assert_eq!(server.command(&["DBSIZE"]), "0");
}

#[test]
fn a_store_outlives_the_runtime_that_it_was_made_in() {
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
async fn the_records_of_waiters_that_died_go() {
    let server = RedisServer::start_or_panic();
    let keeper = open(&server.url()).await;
    let guard = keeper.semaphore("gpu", 2).acquire().await.unwrap();
    // As a waiter leaves it whose place has ended.
    let record = "1794842320775257 0 p 2 2 1000 1 1 - somebody";
    let (info, dead) = ("lockkeeper:{gpu}:s:i", "0123456789abcdef0123456789abcdef");
    server.command(&["HSET", info, dead, record]);
    // The holder's, the dead waiter's and the tally.
    assert_eq!(server.command(&["HLEN", info]), "3");
    assert!(keeper.semaphore("gpu", 2).try_acquire_many(2).await.unwrap().is_none());
    assert_eq!(server.command(&["HLEN", info]), "2");
    assert_eq!(server.command(&["HEXISTS", info, dead]), "0");
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_behind_readers_retries_when_the_last_lease_ends() {
    let server = RedisServer::start_or_panic();
    let keeper = open(&server.url()).await;
    // The key of the readers lives as long as the longest of all who ever read.
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
async fn one_server_under_three_names_is_no_quorum() {
    let port = RedisServer::start_or_panic();
    let url = format!("redlock://127.0.0.1:{0},localhost:{0},127.0.1.1:{0}/", port.port());
    let error = open_redlock(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("the same server"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_of_a_quorum_that_want_a_password_say_so() {
    let nodes = RedlockNodes::start_or_panic(3);
    for node in nodes.nodes() {
        node.command(&["CONFIG", "SET", "requirepass", "hunter2"]);
    }
    let error = open_redlock(&nodes.url()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}
