//! Servers that hang, restart, lose data or are busy.

use lockkeeper_core::{ErrorKind, State};
use lockkeeper_testkit::history::History;
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{
    LONG, close, keeper, key, lock, millis, passing, secs, until_all_hear, until_empty,
    until_queued, waiting,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_server_hangs_short_leases_are_lost_and_long_ones_survive() {
    let server = RedisServer::start_or_panic();
    let keeper =
        keeper(&format!("{}?command_timeout=500ms&connect_timeout=500ms", server.url())).await;
    let short = lock(&keeper.mutex("a").ttl(millis(1500))).await;
    let long = lock(&keeper.mutex("b")).await;
    let waiter = waiting(keeper.mutex("b"));
    until_queued(&server, "b", 1).await;
    server.stop();
    soon("the loss", short.lost()).await;
    assert!(!short.is_held() && long.is_held());
    let error = soon("an error", keeper.mutex("c").lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    server.cont();
    let next = soon("the next holder", lock(&keeper.mutex("a"))).await;
    assert!(next.fence() > short.fence());
    eventually("an extension", async || long.extend(LONG).await.is_ok()).await;
    assert_eq!(long.state(), State::Held);
    drop((short, next, long));
    drop(soon("the waiter", waiter).await.unwrap());
    close(&keeper).await;
    until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_that_a_stopped_server_has_not_read_leaves_no_key() {
    let server = RedisServer::start_or_panic();
    let keeper =
        keeper(&format!("{}?command_timeout=500ms&connect_timeout=500ms", server.url())).await;
    server.stop();
    let error = soon("an error", keeper.mutex("a").lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    server.cont();
    close(&keeper).await;
    until_empty(&server).await;
    // No unread command takes effect after that.
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
    eventually("an extension", async || guard.extend(LONG).await.is_ok()).await;
    assert_eq!(guard.state(), State::Held);
    drop(guard);
    drop(soon("the waiter", waiter).await.unwrap());
    close(&keeper).await;
    until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_server_restarts_empty_holders_are_lost_and_waiters_acquire() {
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
    soon("the holder's loss", guard.lost()).await;
    soon("the reader's loss", reader.lost()).await;
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
async fn when_the_server_is_flushed_holders_are_lost_and_waiters_acquire() {
    let server = RedisServer::start_or_panic();
    let keeper = keeper(&server.url()).await.ttl(secs(6));
    let guard = keeper.mutex("a").lock().await.unwrap();
    let history = History::new();
    let waiters: Vec<_> = (0..4).map(|_| passing(keeper.mutex("a"), &history)).collect();
    until_queued(&server, "a", 4).await;
    server.command(&["FLUSHALL"]);
    soon("the holder's loss", guard.lost()).await;
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
async fn scripts_are_loaded_again_after_a_script_flush() {
    let server = RedisServer::start_or_panic();
    let keeper = keeper(&server.url()).await;
    let flush = || server.command(&["SCRIPT", "FLUSH"]);
    flush();
    let guard = keeper.mutex("a").lock().await.unwrap();
    flush();
    let waiter = waiting(keeper.mutex("a"));
    until_queued(&server, "a", 1).await;
    flush();
    guard.extend(LONG).await.unwrap();
    flush();
    guard.release().await.unwrap();
    let next = soon("the waiter", waiter).await.unwrap();
    flush();
    next.downgrade().await.unwrap();
    flush();
    assert_eq!(keeper.inspect().unwrap().list("").await.unwrap().len(), 1);
    flush();
    assert_eq!(keeper.inspect().unwrap().break_lock("a").await.unwrap(), 1);
    soon("the loss", next.lost()).await;
    assert_eq!(server.command(&["EXISTS", &key("a")]), "0");
    drop(next);
    close(&keeper).await;
    until_empty(&server).await;
}
