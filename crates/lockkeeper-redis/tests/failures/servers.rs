//! Servers that stop, restart, forget and are busy.

use lockkeeper_core::{ErrorKind, State};
use lockkeeper_testkit::history::History;
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{
    LONG, close, keeper, key, lock, millis, passing, secs, until_all_hear, until_empty,
    until_queued, waiting,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_hangs_costs_the_lease_in_time_and_nothing_after() {
    let server = RedisServer::start_or_panic();
    let keeper =
        keeper(&format!("{}?command_timeout=500ms&connect_timeout=500ms", server.url())).await;
    let short = lock(&keeper.mutex("a").ttl(millis(1500))).await;
    let long = lock(&keeper.mutex("b")).await;
    let waiter = waiting(keeper.mutex("b"));
    until_queued(&server, "b", 1).await;
    server.stop();
    soon("the loss is told", short.lost()).await;
    assert!(!short.is_held() && long.is_held());
    let error = soon("an error", keeper.mutex("c").lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    server.cont();
    let next = soon("it can be had again", lock(&keeper.mutex("a"))).await;
    assert!(next.fence() > short.fence());
    eventually("the long lease is well", async || long.extend(LONG).await.is_ok()).await;
    assert_eq!(long.state(), State::Held);
    drop((short, next, long));
    drop(soon("the waiter", waiter).await.unwrap());
    close(&keeper).await;
    until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_that_a_stopped_server_has_not_read_leaves_nothing() {
    let server = RedisServer::start_or_panic();
    let keeper =
        keeper(&format!("{}?command_timeout=500ms&connect_timeout=500ms", server.url())).await;
    server.stop();
    let error = soon("an error", keeper.mutex("a").lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    server.cont();
    close(&keeper).await;
    until_empty(&server).await;
    // Nothing that it had not read comes after that.
    tokio::time::sleep(millis(500)).await;
    assert_eq!(server.command(&["DBSIZE"]), "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_busy_for_longer_than_the_command_timeout_loses_no_waiter() {
    let server = RedisServer::start_or_panic();
    let keeper =
        keeper(&format!("{}?command_timeout=300ms&connect_timeout=300ms", server.url())).await;
    let guard = lock(&keeper.mutex("a")).await;
    let waiter = waiting(keeper.mutex("a"));
    until_queued(&server, "a", 1).await;
    server.command(&["DEBUG", "SLEEP", "1.5"]);
    until_all_hear(&server, "a", 1).await;
    eventually("it can extend", async || guard.extend(LONG).await.is_ok()).await;
    assert_eq!(guard.state(), State::Held);
    drop(guard);
    drop(soon("the waiter", waiter).await.unwrap());
    close(&keeper).await;
    until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_restarts_empty_is_noticed_and_no_claim_hangs() {
    let mut server = RedisServer::start_or_panic();
    let (one, other) = (keeper(&server.url()).await, keeper(&server.url()).await);
    let guard = one.mutex("a").lock().await.unwrap();
    let reader = one.rw_lock("b").read().await.unwrap();
    let history = History::new();
    let waiters: Vec<_> = (0..4)
        .map(|i| passing(if i % 2 == 0 { &one } else { &other }.mutex("a"), &history))
        .collect();
    until_queued(&server, "a", 4).await;
    server.kill9();
    server.restart().unwrap();
    soon("the holder is told", guard.lost()).await;
    soon("the reader is told", reader.lost()).await;
    for waiter in waiters {
        soon("a waiter", waiter).await.unwrap();
    }
    assert_eq!(history.assert_clean().holds, 4);
    let lowest = history.holds().iter().filter_map(|hold| hold.fence).min();
    assert!(lowest > guard.fence(), "{lowest:?} after {:?}", guard.fence());
    drop((guard, reader));
    close(&one).await;
    close(&other).await;
    until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_flushed_is_noticed_and_no_claim_hangs() {
    let server = RedisServer::start_or_panic();
    let keeper = keeper(&server.url()).await.ttl(secs(6));
    let guard = keeper.mutex("a").lock().await.unwrap();
    let history = History::new();
    let waiters: Vec<_> = (0..4).map(|_| passing(keeper.mutex("a"), &history)).collect();
    until_queued(&server, "a", 4).await;
    server.command(&["FLUSHALL"]);
    soon("the holder is told", guard.lost()).await;
    for waiter in waiters {
        soon("a waiter", waiter).await.unwrap();
    }
    assert_eq!(history.assert_clean().holds, 4);
    let lowest = history.holds().iter().filter_map(|hold| hold.fence).min();
    assert!(lowest > guard.fence(), "{lowest:?} after {:?}", guard.fence());
    drop(guard);
    close(&keeper).await;
    until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_forgets_its_scripts_is_taught_them_again() {
    let server = RedisServer::start_or_panic();
    let keeper = keeper(&server.url()).await;
    let forget = || server.command(&["SCRIPT", "FLUSH"]);
    forget();
    let guard = keeper.mutex("a").lock().await.unwrap();
    forget();
    let waiter = waiting(keeper.mutex("a"));
    until_queued(&server, "a", 1).await;
    forget();
    guard.extend(LONG).await.unwrap();
    forget();
    guard.release().await.unwrap();
    let next = soon("the waiter", waiter).await.unwrap();
    forget();
    next.downgrade().await.unwrap();
    forget();
    assert_eq!(keeper.inspect().unwrap().list("").await.unwrap().len(), 1);
    forget();
    assert_eq!(keeper.inspect().unwrap().break_lock("a").await.unwrap(), 1);
    soon("it is told", next.lost()).await;
    assert_eq!(server.command(&["EXISTS", &key("a")]), "0");
    drop(next);
    close(&keeper).await;
    until_empty(&server).await;
}
