//! `min_replicas`: grants that replicas must acknowledge.

use lockkeeper_core::{ErrorKind, Guard, Keeper};
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{
    got, key, lock, nothing_left, number, open, read, secs, server, waiter, write,
};
use crate::refusals::check;

/// Acquires a lock. Retries, since a replica may be slow on a busy machine.
async fn granted(keeper: &Keeper) -> Guard {
    let mutex = keeper.mutex("a");
    let mut granted = None;
    eventually("an acknowledged grant", async || {
        granted = mutex.try_lock().await.unwrap_or_default();
        granted.is_some()
    })
    .await;
    granted.unwrap()
}

#[tokio::test]
async fn a_grant_is_on_the_replica_when_it_is_acknowledged() {
    let (server, plain) = server().await;
    let replica = RedisServer::builder().replica_of(&server).start_or_panic();
    let keeper = open(&format!("{}?min_replicas=1", server.url())).await;
    let guard = granted(&keeper).await;
    // The replica has acknowledged the grant, so the key is there without a wait.
    assert!(replica.command(&["GET", &key("a")]).starts_with(&guard.owner().to_string()));
    let waiters = [
        waiter(&plain, "a", 1, read(&keeper, "a")).await,
        waiter(&plain, "a", 2, write(&keeper, "a")).await,
    ];
    guard.release().await.unwrap();
    for waiter in waiters {
        let guard = got(waiter).await;
        let holder = replica.command(&["GET", &key("a")]);
        assert!(
            holder.starts_with(&guard.owner().to_string()) || holder == "(readers)",
            "{holder}"
        );
        eventually("a renewal that counts", async || guard.extend(secs(40)).await.is_ok()).await;
        guard.release().await.unwrap();
    }
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn without_enough_replicas_attempts_fail_and_leave_no_key() {
    let (server, plain) = server().await;
    let keeper = open(&format!("{}?min_replicas=1", server.url())).await;
    let error = soon("the error", keeper.mutex("a").try_lock()).await.unwrap_err();
    check(&error, ErrorKind::Unavailable, "0 of 1 replicas acknowledged the write");
    assert_eq!(number(&server, &["DBSIZE"]), 0);
    let error = soon("the error", keeper.rw_lock("a").try_read()).await.unwrap_err();
    check(&error, ErrorKind::Unavailable, "0 of 1 replicas acknowledged the write");
    let error = soon("the error", keeper.semaphore("a", 2).try_acquire()).await.unwrap_err();
    check(&error, ErrorKind::Unavailable, "0 of 1 replicas acknowledged the write");
    assert_eq!(number(&server, &["DBSIZE"]), 0);
    // A keeper without min_replicas acquires at once.
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
    let error = soon("the error", keeper.mutex("a").try_lock()).await.unwrap_err();
    check(&error, ErrorKind::Unavailable, "0 of 1 replicas acknowledged the write");
    assert_eq!(number(&server, &["DBSIZE"]), 0);
    replica.cont();
    granted(&keeper).await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}
