//! Grants that count only when replicas have them.

use lockkeeper_core::{ErrorKind, Guard, Keeper};
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{
    got, key, lock, nothing_left, number, open, read, secs, server, waiter, write,
};
use crate::refusals::check;

/// A lock that is granted: not at the first ask if the replica is held up on a busy machine.
async fn granted(keeper: &Keeper) -> Guard {
    let mutex = keeper.mutex("a");
    let mut granted = None;
    eventually("a grant that counts", async || {
        granted = mutex.try_lock().await.unwrap_or_default();
        granted.is_some()
    })
    .await;
    granted.unwrap()
}

#[tokio::test]
async fn a_grant_counts_when_a_replica_has_it() {
    let (server, plain) = server().await;
    let replica = RedisServer::builder().replica_of(&server).start_or_panic();
    let keeper = open(&format!("{}?min_replicas=1", server.url())).await;
    let guard = granted(&keeper).await;
    // What was acknowledged is there: nothing to wait for.
    assert_eq!(replica.command(&["GET", &key("a")]), guard.owner().to_string());
    let waiters = [
        waiter(&plain, "a", 1, read(&keeper, "a")).await,
        waiter(&plain, "a", 2, write(&keeper, "a")).await,
    ];
    guard.release().await.unwrap();
    for waiter in waiters {
        let guard = got(waiter).await;
        let holder = replica.command(&["GET", &key("a")]);
        assert!(holder == guard.owner().to_string() || holder == "(readers)", "{holder}");
        eventually("a renewal that counts", async || guard.extend(secs(40)).await.is_ok()).await;
        guard.release().await.unwrap();
    }
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn without_enough_replicas_nothing_is_granted_and_nothing_left() {
    let (server, plain) = server().await;
    let keeper = open(&format!("{}?min_replicas=1", server.url())).await;
    let error = soon("the refusal", keeper.mutex("a").try_lock()).await.unwrap_err();
    check(&error, ErrorKind::Unavailable, "0 of 1 replicas acknowledged it");
    assert_eq!(number(&server, &["DBSIZE"]), 0);
    let error = soon("the refusal", keeper.rw_lock("a").try_read()).await.unwrap_err();
    check(&error, ErrorKind::Unavailable, "0 of 1 replicas acknowledged it");
    let error = soon("the refusal", keeper.semaphore("a", 2).try_acquire()).await.unwrap_err();
    check(&error, ErrorKind::Unavailable, "0 of 1 replicas acknowledged it");
    assert_eq!(number(&server, &["DBSIZE"]), 0);
    // Who asks for none gets it at once.
    lock(&plain, "a").await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_replica_that_hangs_does_not_count() {
    let (server, _) = server().await;
    let replica = RedisServer::builder().replica_of(&server).start_or_panic();
    let keeper = open(&format!("{}?min_replicas=1", server.url())).await;
    granted(&keeper).await.release().await.unwrap();
    replica.stop();
    let error = soon("the refusal", keeper.mutex("a").try_lock()).await.unwrap_err();
    check(&error, ErrorKind::Unavailable, "0 of 1 replicas acknowledged it");
    assert_eq!(number(&server, &["DBSIZE"]), 0);
    replica.cont();
    granted(&keeper).await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}
