//! Processes that are killed while they hold or wait.

use std::time::{Duration, Instant};

use lockkeeper_core::Fence;
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{
    LONG, Process, close, keeper, key, millis, secs, until_all_hear, until_empty, until_queued,
    until_subscribers, waiting,
};

/// Returns the current holder, and the earliest end of its lease without a renewal.
fn lease(server: &RedisServer, name: &str) -> (String, Instant) {
    let before = Instant::now();
    let script = "return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}";
    let reply = server.command(&["EVAL", script, "1", &key(name)]);
    let (owner, left) = reply.split_once('\n').unwrap();
    (owner.to_owned(), before + millis(left.parse().unwrap_or(0)))
}

/// Kills a holder. The next waiter acquires the lock when the dead holder's lease has ended, and not before.
async fn a_waiter_takes_over_from_a_killed_holder(
    holder_ttl: Duration,
    waiter_ttl: Duration,
    dead_head: bool,
) {
    let server = RedisServer::start_or_panic();
    let near = keeper(&server.url()).await;
    let mut holder = Process::start(&server.url(), "a", holder_ttl, &["hold"]);
    let fence = Fence::new(holder.expect("held").await.parse().unwrap());
    let mut queued = 0;
    let mut head = dead_head.then(|| Process::start(&server.url(), "a", LONG, &["hold"]));
    if head.is_some() {
        queued += 1;
        until_queued(&server, "a", queued).await;
    }
    let mutex = near.mutex("a").ttl(waiter_ttl);
    let waiter = tokio::spawn(async move { (mutex.lock().await.unwrap(), Instant::now()) });
    let queue = format!("{}:q", key("a"));
    eventually("a waiter", async || {
        let waits = server.command(&["ZCARD", &queue]) == (queued + 1).to_string();
        // On a very busy machine the holder may have lost the lock already.
        waits || waiter.is_finished()
    })
    .await;
    if let Some(head) = &mut head {
        head.kill9().await;
    }
    holder.kill9().await;
    let (owner, ends) = lease(&server, "a");
    let (guard, acquired) = soon("the waiter", waiter).await.unwrap();
    assert!(guard.fence() > fence);
    // On a very busy machine the lease may have ended before it was read.
    if owner != guard.owner().to_string() {
        // The server counts in milliseconds, on a clock that may be adjusted a little.
        assert!(acquired + millis(50) >= ends, "acquired {:?} too early", ends - acquired);
        let late = acquired.saturating_duration_since(ends);
        eprintln!("TTL {holder_ttl:?}, waiter's {waiter_ttl:?}: {late:?} after the lease's end");
    }
    guard.release().await.unwrap();
    close(&near).await;
    until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_acquires_when_the_lease_of_a_killed_holder_ends() {
    a_waiter_takes_over_from_a_killed_holder(secs(2), secs(2), false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_with_a_long_ttl_follows_a_killed_holder_with_a_short_ttl() {
    a_waiter_takes_over_from_a_killed_holder(millis(1500), LONG, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_with_a_short_ttl_follows_a_killed_holder_with_a_longer_ttl() {
    a_waiter_takes_over_from_a_killed_holder(secs(3), secs(1), false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_waiter_at_the_head_of_the_queue_is_skipped_after_a_dead_holder() {
    a_waiter_takes_over_from_a_killed_holder(secs(5), LONG, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_waiters_are_skipped_by_the_next_release() {
    let server = RedisServer::start_or_panic();
    let near = keeper(&server.url()).await;
    let guard = near.mutex("a").lock().await.unwrap();
    let mut dead = Vec::new();
    for queued in 1..=3 {
        dead.push(Process::start(&server.url(), "a", LONG, &["hold"]));
        until_queued(&server, "a", queued).await;
    }
    let behind = waiting(near.mutex("a"));
    until_queued(&server, "a", 4).await;
    for process in &mut dead {
        process.kill9().await;
    }
    // Until the server has read the close of their connections, it considers them alive.
    until_subscribers(&server, 1).await;
    guard.release().await.unwrap();
    let next = soon("the next waiter", behind).await.unwrap();
    next.release().await.unwrap();
    close(&near).await;
    until_empty(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_connection_the_server_closed_is_skipped_and_queues_again() {
    for options in ["", "?protocol=resp2"] {
        let server = RedisServer::start_or_panic();
        let near = keeper(&server.url()).await;
        let guard = near.mutex("a").lock().await.unwrap();
        let before = clients(&server);
        let proxy = Proxy::start(server.addr()).await.unwrap();
        let far = keeper(&format!("redis://{}/{options}", proxy.addr())).await;
        let away = waiting(far.mutex("a"));
        until_queued(&server, "a", 1).await;
        let behind = waiting(near.mutex("a"));
        until_queued(&server, "a", 2).await;
        // It cannot reconnect before `heal`.
        proxy.freeze();
        for client in clients(&server).iter().filter(|client| !before.contains(client)) {
            server.command(&["CLIENT", "KILL", "ID", client]);
        }
        until_subscribers(&server, 1).await;
        guard.release().await.unwrap();
        let next = soon("the next waiter", behind).await.unwrap();
        proxy.heal();
        until_all_hear(&server, "a", 1).await;
        next.release().await.unwrap();
        let last = soon("the disconnected waiter", away).await.unwrap();
        last.release().await.unwrap();
        close(&near).await;
        close(&far).await;
        until_empty(&server).await;
    }
}

/// Returns the ids of all connections except that of this command.
fn clients(server: &RedisServer) -> Vec<String> {
    let list = server.command(&["CLIENT", "LIST"]);
    let clients = list.lines().filter(|line| !line.contains("cmd=client|list"));
    let id = |line: &str| line.split([' ', '=']).nth(1).map(str::to_owned);
    clients.filter_map(id).collect()
}
