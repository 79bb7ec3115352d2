//! Connections that are cut, dead without a word, slow, or ended by the server.

use std::time::Duration;

use lockkeeper_core::{ErrorKind, Keeper, ReleaseOutcome, State};
use lockkeeper_testkit::history::History;
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{
    LONG, close, keeper, key, lock, millis, passing, secs, until_all_hear, until_empty,
    until_listening, until_queued, waiting,
};

/// A server, a keeper that is near it, and one behind a cable.
struct Cable {
    server: RedisServer,
    near: Keeper,
    proxy: Proxy,
    far: Keeper,
}

/// `options` are for the one behind the cable, such as `?protocol=resp2`.
async fn cable(options: &str) -> Cable {
    let server = RedisServer::start_or_panic();
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let near = keeper(&server.url()).await;
    let far = keeper(&format!("redis://{}/{options}", proxy.addr())).await;
    Cable { server, near, proxy, far }
}

/// Gives up a silent server after a second.
const HASTY: &str = "?command_timeout=1s&connect_timeout=1s";

impl Cable {
    async fn done(self) {
        close(&self.near).await;
        close(&self.far).await;
        until_empty(&self.server).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_finds_what_it_was_handed_while_nothing_reached_it() {
    for protocol in ["resp3", "resp2"] {
        for cut in [false, true] {
            let all = cable(&format!("?protocol={protocol}")).await;
            let guard = all.near.mutex("a").lock().await.unwrap();
            let waiter = waiting(all.far.mutex("a"));
            until_queued(&all.server, "a", 1).await;
            all.proxy.freeze();
            guard.release().await.unwrap();
            let exists = all.server.command(&["EXISTS", &key("a")]);
            assert_eq!(exists, "1", "the server does not know that nobody hears");
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
async fn a_waiter_gives_up_a_dead_connection_and_finds_what_it_was_handed() {
    let all = cable(HASTY).await;
    let guard = all.near.mutex("a").lock().await.unwrap();
    let waiter = waiting(all.far.mutex("a"));
    until_queued(&all.server, "a", 1).await;
    all.proxy.freeze();
    guard.release().await.unwrap();
    // Longer than it bears the silence.
    tokio::time::sleep(millis(2500)).await;
    all.proxy.heal();
    // A release that meets a connection on its way is sent again in the background.
    drop(soon("the waiter", waiter).await.unwrap());
    all.done().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_was_cut_off_for_a_moment_keeps_its_place() {
    for options in ["", "?protocol=resp2"] {
        let all = cable(options).await;
        let guard = all.near.mutex("a").lock().await.unwrap();
        let first = waiting(all.far.mutex("a"));
        until_queued(&all.server, "a", 1).await;
        // An answer behind its own: one that does not know that it waits would ask anew when cut off.
        all.far.inspect().unwrap().show("a").await.unwrap();
        let second = waiting(all.near.mutex("a"));
        until_queued(&all.server, "a", 2).await;
        for _ in 0..3 {
            all.proxy.cut();
            // Until the server has noticed, it takes the old connection for alive.
            until_listening(&all.server, 1).await;
            all.proxy.heal();
            until_all_hear(&all.server, "a", 2).await;
        }
        guard.release().await.unwrap();
        let guard = soon("the one that was cut off", first).await.unwrap();
        assert!(!second.is_finished());
        guard.release().await.unwrap();
        soon("the second", second).await.unwrap().release().await.unwrap();
        all.done().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_is_cut_off_for_less_than_its_lease_is_at_risk_and_recovers() {
    for frozen in [false, true] {
        let all = cable(HASTY).await;
        let guard = lock(&all.far.mutex("a")).await;
        if frozen {
            all.proxy.freeze();
        } else {
            all.proxy.cut();
        }
        let error = soon("an answer", guard.extend(LONG)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert_eq!(guard.state(), State::AtRisk);
        assert!(guard.is_held());
        all.proxy.heal();
        eventually("it holds again", async || guard.state() == State::Held).await;
        drop(guard);
        all.done().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_is_cut_off_for_longer_than_its_lease_reports_the_loss_before_another_enters()
{
    for frozen in [false, true] {
        let all = cable(HASTY).await;
        let guard = lock(&all.far.mutex("a").ttl(millis(1500))).await;
        if frozen {
            all.proxy.freeze();
        } else {
            all.proxy.cut();
        }
        let next = soon("the next", all.near.mutex("a").lock()).await.unwrap();
        assert!(!guard.is_held(), "two hold");
        assert!(next.fence() > guard.fence());
        soon("it is told", guard.lost()).await;
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
async fn holders_and_waiters_outlive_connections_that_the_server_ends() {
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
                // Every other time they are ended once more before all have come back.
                until_all_hear(&server, "a", 6).await;
            }
        }
        eventually("it holds", async || guard.state() == State::Held).await;
        eventually("it can extend", async || guard.extend(LONG).await.is_ok()).await;
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
async fn an_attempt_whose_answer_was_lost_leaves_nothing() {
    let all = cable("").await;
    all.proxy.delay(secs(1));
    let attempt = tokio::spawn({
        let mutex = all.far.mutex("a");
        async move { mutex.lock().await }
    });
    eventually("it is granted", async || all.server.command(&["EXISTS", &key("a")]) == "1").await;
    // The answer is still on its way.
    all.proxy.cut();
    let answer = soon("an error", attempt).await.unwrap();
    // On a machine that was busy for a second, the answer was there before.
    if let Err(error) = &answer {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    drop(answer);
    all.proxy.delay(Duration::ZERO);
    all.proxy.heal();
    until_empty(&all.server).await;
    all.done().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_that_comes_late_on_a_connection_given_up_has_no_effect() {
    let all = cable(HASTY).await;
    // From now on the connection is slow, so slow that it is given up; the next one is not.
    all.proxy.delay(secs(6));
    let sent = tokio::time::Instant::now();
    let attempt = tokio::spawn({
        let mutex = all.far.mutex("a");
        async move { mutex.lock().await }
    });
    tokio::time::sleep(millis(200)).await;
    all.proxy.delay(Duration::ZERO);
    let answer = soon("an answer", attempt).await.unwrap();
    if let Err(error) = &answer {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    drop(answer);
    close(&all.far).await;
    until_empty(&all.server).await;
    tokio::time::sleep_until(sent + secs(7)).await;
    assert_eq!(all.server.command(&["DBSIZE"]), "0", "it came after its release");
}
