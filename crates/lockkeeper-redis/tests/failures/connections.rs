//! Connections that are cut, frozen, slow, or closed by the server.

use std::time::Duration;

use lockkeeper_core::{ErrorKind, Keeper, ReleaseOutcome, State};
use lockkeeper_testkit::history::History;
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{
    LONG, close, keeper, key, lock, millis, passing, secs, until_all_hear, until_empty,
    until_queued, until_subscribers, waiting,
};

/// A server with a directly connected keeper (`near`), and a keeper behind a proxy (`far`).
struct Setup {
    server: RedisServer,
    near: Keeper,
    proxy: Proxy,
    far: Keeper,
}

/// `options` are those of the keeper behind the proxy, such as `?protocol=resp2`.
async fn set_up(options: &str) -> Setup {
    let server = RedisServer::start_or_panic();
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let near = keeper(&server.url()).await;
    let far = keeper(&format!("redis://{}/{options}", proxy.addr())).await;
    Setup { server, near, proxy, far }
}

/// Closes a connection to a silent server after a second.
const SHORT_TIMEOUTS: &str = "?command_timeout=1s&connect_timeout=1s";

impl Setup {
    async fn done(self) {
        close(&self.near).await;
        close(&self.far).await;
        until_empty(&self.server).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_gets_a_grant_that_was_published_while_its_network_was_down() {
    for protocol in ["resp3", "resp2"] {
        for cut in [false, true] {
            let all = set_up(&format!("?protocol={protocol}")).await;
            let guard = all.near.mutex("a").lock().await.unwrap();
            let waiter = waiting(all.far.mutex("a"));
            until_queued(&all.server, "a", 1).await;
            all.proxy.freeze();
            guard.release().await.unwrap();
            let exists = all.server.command(&["EXISTS", &key("a")]);
            assert_eq!(exists, "1", "the server believes that the waiter is connected");
            if cut {
                all.proxy.cut();
            }
            all.proxy.heal();
            let next = soon("the waiter", waiter).await.unwrap();
            next.release().await.unwrap();
            all.done().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_replaces_a_dead_connection_and_gets_the_grant_it_missed() {
    let all = set_up(SHORT_TIMEOUTS).await;
    let guard = all.near.mutex("a").lock().await.unwrap();
    let waiter = waiting(all.far.mutex("a"));
    until_queued(&all.server, "a", 1).await;
    all.proxy.freeze();
    guard.release().await.unwrap();
    // Longer than the command timeout.
    tokio::time::sleep(millis(2500)).await;
    all.proxy.heal();
    // Dropped: a release that fails on a broken connection is retried in the background.
    drop(soon("the waiter", waiter).await.unwrap());
    all.done().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_reconnects_keeps_its_position() {
    for options in ["", "?protocol=resp2"] {
        let all = set_up(options).await;
        let guard = all.near.mutex("a").lock().await.unwrap();
        let first = waiting(all.far.mutex("a"));
        until_queued(&all.server, "a", 1).await;
        // The reply to this arrives after the reply to the waiter's attempt: the client knows that it is queued.
        // Otherwise it would repeat the attempt after the cut.
        all.far.inspect().unwrap().show("a").await.unwrap();
        let second = waiting(all.near.mutex("a"));
        until_queued(&all.server, "a", 2).await;
        for _ in 0..3 {
            all.proxy.cut();
            // Until the server notices the cut, it considers the old connection alive.
            until_subscribers(&all.server, 1).await;
            all.proxy.heal();
            until_all_hear(&all.server, "a", 2).await;
        }
        guard.release().await.unwrap();
        let guard = soon("the waiter that was cut off", first).await.unwrap();
        assert!(!second.is_finished());
        guard.release().await.unwrap();
        soon("the second waiter", second).await.unwrap().release().await.unwrap();
        all.done().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_disconnected_for_less_than_its_lease_is_at_risk_and_recovers() {
    for frozen in [false, true] {
        let all = set_up(SHORT_TIMEOUTS).await;
        let guard = lock(&all.far.mutex("a")).await;
        if frozen {
            all.proxy.freeze();
        } else {
            all.proxy.cut();
        }
        let error = soon("an error", guard.extend(LONG)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert_eq!(guard.state(), State::AtRisk);
        assert!(guard.is_held());
        all.proxy.heal();
        eventually("the state Held", async || guard.state() == State::Held).await;
        drop(guard);
        all.done().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_disconnected_for_longer_than_its_lease_is_lost_before_the_next_grant() {
    for frozen in [false, true] {
        let all = set_up(SHORT_TIMEOUTS).await;
        let guard = lock(&all.far.mutex("a").ttl(millis(1500))).await;
        if frozen {
            all.proxy.freeze();
        } else {
            all.proxy.cut();
        }
        let next = soon("the next holder", all.near.mutex("a").lock()).await.unwrap();
        assert!(!guard.is_held(), "two holders");
        assert!(next.fence() > guard.fence());
        soon("the loss", guard.lost()).await;
        assert_eq!(guard.state(), State::Lost);
        all.proxy.heal();
        drop(guard);
        close(&all.far).await;
        assert!(next.is_held());
        next.extend(LONG).await.unwrap();
        assert_eq!(next.release().await.unwrap(), ReleaseOutcome::Released);
        all.done().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_and_queue_entries_survive_connections_that_the_server_closes() {
    for options in ["", "?protocol=resp2"] {
        let server = RedisServer::start_or_panic();
        let one = keeper(&format!("{}{options}", server.url())).await;
        let other = keeper(&format!("{}{options}", server.url())).await;
        let history = History::new();
        let guard = one.mutex("a").lock().await.unwrap();
        let open = history.begin(guard.name(), guard.owner(), guard.mode(), guard.fence());
        let waiters: Vec<_> = (0..6)
            .map(|i| passing(if i % 2 == 0 { &one } else { &other }.mutex("a"), &history))
            .collect();
        until_queued(&server, "a", 6).await;
        for round in 0..5 {
            for kind in ["normal", "pubsub"] {
                server.command(&["CLIENT", "KILL", "TYPE", kind]);
            }
            if round % 2 == 0 {
                // In the other rounds, connections are killed again before all clients have reconnected.
                until_all_hear(&server, "a", 6).await;
            }
        }
        eventually("the state Held", async || guard.state() == State::Held).await;
        eventually("an extension", async || guard.extend(LONG).await.is_ok()).await;
        until_all_hear(&server, "a", 6).await;
        open.end();
        guard.release().await.unwrap();
        for waiter in waiters {
            soon("a waiter", waiter).await.unwrap();
        }
        assert_eq!(history.assert_clean().holds, 7);
        close(&one).await;
        close(&other).await;
        until_empty(&server).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_whose_reply_is_lost_leaves_no_key() {
    let all = set_up("").await;
    all.proxy.delay(secs(1));
    let attempt = tokio::spawn({
        let mutex = all.far.mutex("a");
        async move { mutex.lock().await }
    });
    eventually("a grant", async || all.server.command(&["EXISTS", &key("a")]) == "1").await;
    // The reply is still in flight.
    all.proxy.cut();
    let result = soon("an error", attempt).await.unwrap();
    // On a machine that was busy for a second, the reply may have arrived.
    if let Err(error) = &result {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    drop(result);
    all.proxy.delay(Duration::ZERO);
    all.proxy.heal();
    until_empty(&all.server).await;
    all.done().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delayed_attempt_on_an_abandoned_connection_has_no_effect() {
    let all = set_up(SHORT_TIMEOUTS).await;
    // This connection is so slow that the client abandons it. The next one is not slow.
    all.proxy.delay(secs(6));
    let sent = tokio::time::Instant::now();
    let attempt = tokio::spawn({
        let mutex = all.far.mutex("a");
        async move { mutex.lock().await }
    });
    tokio::time::sleep(millis(200)).await;
    all.proxy.delay(Duration::ZERO);
    let result = soon("a result", attempt).await.unwrap();
    if let Err(error) = &result {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    drop(result);
    close(&all.far).await;
    until_empty(&all.server).await;
    tokio::time::sleep_until(sent + secs(7)).await;
    assert_eq!(all.server.command(&["DBSIZE"]), "0", "the attempt took effect after its release");
}
