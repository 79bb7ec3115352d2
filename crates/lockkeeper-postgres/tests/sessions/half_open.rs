//! Connections that are dead in one direction or in both.

use std::time::{Duration, Instant};

use lockkeeper_core::{
    Attempt, Backend as _, Background, ClaimSpec, Guard, Keeper, Name, Release, Result,
};
use lockkeeper_postgres::{AdvisoryKey, Postgres};
use lockkeeper_testkit::proxy::{Proxy, Side};
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use crate::common::{
    client, eventually, holders_and_waiters, in_pg_locks, keeper, name, server, soon,
};

const TTL: Duration = Duration::from_secs(3);

/// A lock that a keeper with a direct connection holds, and a keeper behind a proxy to wait for it.
struct Scene {
    name: String,
    holder: Guard,
    proxy: Proxy,
    far: Keeper,
    client: Client,
}

impl Scene {
    async fn new(what: &str) -> Self {
        let name = name(what);
        let holder = keeper("").mutex(name.clone()).lock().await.unwrap();
        let proxy = Proxy::start(server().addr()).await.unwrap();
        let url = format!("postgres://postgres@{}/postgres", proxy.addr());
        let far = Keeper::new(Postgres::new(&url).unwrap()).ttl(TTL);
        Self { name, holder, proxy, far, client: client().await }
    }

    fn key(&self) -> AdvisoryKey {
        AdvisoryKey::of(&self.name)
    }

    /// Starts a waiter behind the proxy.
    fn wait(&self) -> JoinHandle<Result<Guard>> {
        let mutex = self.far.mutex(self.name.clone());
        tokio::spawn(async move { mutex.lock().await })
    }

    async fn until_one_waits(&self) {
        eventually("it waits", async || {
            holders_and_waiters(&self.client, self.key()).await == (1, 1)
        })
        .await;
    }

    /// Returns the process ids of the sessions that hold the lock, or of those that wait for it.
    async fn sessions(&self, granted: bool) -> Vec<i32> {
        let sql = format!(
            "SELECT pid FROM pg_locks WHERE granted = {granted} AND {}",
            in_pg_locks(self.key())
        );
        self.client.query(&sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
    }
}

/// Awaits a guard, and checks that it arrived within three TTLs after `start`.
async fn within_three_ttls(start: Instant, waiter: JoinHandle<Result<Guard>>) -> Guard {
    let guard = soon("the waiter", waiter).await.unwrap().unwrap();
    assert!(start.elapsed() < TTL * 3, "it took {:?}", start.elapsed());
    guard
}

#[tokio::test]
async fn a_waiter_whose_session_ended_unnoticed_waits_again() {
    let scene = Scene::new("unheard").await;
    let waiter = scene.wait();
    scene.until_one_waits().await;
    scene.proxy.lose_for_good(Side::Client);
    scene.proxy.lose_for_good(Side::Server);
    let [waits] = scene.sessions(false).await[..] else { panic!("one waits") };
    let sql = format!("SELECT pg_terminate_backend({waits}, 10000)");
    scene.client.batch_execute(&sql).await.unwrap();
    let start = Instant::now();
    scene.holder.release().await.unwrap();
    within_three_ttls(start, waiter).await.release().await.unwrap();
}

#[tokio::test]
async fn a_session_whose_grant_was_lost_is_terminated() {
    let scene = Scene::new("lost-grant").await;
    let waiter = scene.wait();
    scene.until_one_waits().await;
    let [waits] = scene.sessions(false).await[..] else { panic!("one waits") };
    scene.proxy.lose_for_good(Side::Server);
    let start = Instant::now();
    let Scene { name, holder, .. } = &scene;
    assert!(keeper("").mutex(name.clone()).try_lock().await.unwrap().is_none());
    assert!(holder.is_held());
    let Scene { holder, client, far, .. } = scene;
    holder.release().await.unwrap();
    let guard = within_three_ttls(start, waiter).await;
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1";
    let left: i64 = client.query_one(sql, &[&waits]).await.unwrap().get(0);
    assert_eq!(left, 0, "the session whose grant was lost still exists");
    guard.release().await.unwrap();
    far.close().await;
}

#[tokio::test]
async fn waiters_behind_a_dead_connection_are_granted_the_lock() {
    let scene = Scene::new("behind").await;
    let waiters = [scene.wait(), scene.wait(), scene.wait()];
    let inspect = scene.far.inspect().unwrap();
    eventually("all wait", async || {
        inspect.show(scene.name.clone()).await.unwrap()[0].waiters.len() == 3
    })
    .await;
    scene.until_one_waits().await;
    scene.proxy.lose_for_good(Side::Server);
    scene.holder.release().await.unwrap();
    for waiter in waiters {
        within_three_ttls(Instant::now(), waiter).await.release().await.unwrap();
    }
}

/// The wait is sent on a connection whose outgoing direction is dead, so it does not reach the server.
#[tokio::test]
async fn a_wait_that_the_server_never_received_is_sent_again() {
    let scene = Scene::new("unsent").await;
    // Gives the store an idle connection for the second waiter.
    let other = name("other");
    let blocked = keeper("").mutex(other.clone()).lock().await.unwrap();
    let mutex = scene.far.mutex(other.clone());
    let idle = tokio::spawn(async move { mutex.lock().await });
    eventually("it waits", async || {
        holders_and_waiters(&scene.client, AdvisoryKey::of(&other)).await == (1, 1)
    })
    .await;
    let first = scene.wait();
    scene.until_one_waits().await;
    let second = scene.wait();
    let inspect = scene.far.inspect().unwrap();
    eventually("both wait", async || {
        inspect.show(scene.name.clone()).await.unwrap()[0].waiters.len() == 2
    })
    .await;
    blocked.release().await.unwrap();
    soon("the other lock", idle).await.unwrap().unwrap().release().await.unwrap();
    scene.proxy.lose_for_good(Side::Client);
    scene.proxy.lose_for_good(Side::Server);
    let start = Instant::now();
    first.abort();
    scene.holder.release().await.unwrap();
    within_three_ttls(start, second).await.release().await.unwrap();
}

#[tokio::test]
async fn a_waiter_fails_when_the_server_has_not_answered_for_a_ttl() {
    let scene = Scene::new("silence").await;
    let waiter = scene.wait();
    scene.until_one_waits().await;
    scene.proxy.freeze();
    let error = soon("the waiter", waiter).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), lockkeeper_core::ErrorKind::Unavailable, "{error}");
    scene.proxy.heal();
    eventually("it has left", async || {
        holders_and_waiters(&scene.client, scene.key()).await == (1, 0)
    })
    .await;
    scene.holder.release().await.unwrap();
}

/// An unreachable session may have been granted the lock, and may take time to end. The other connections of the store are
/// unreachable, too.
#[tokio::test]
async fn closing_a_keeper_waits_until_the_session_of_an_unreachable_waiter_has_ended() {
    let signal = |signal: &str, pid: i32| {
        let kill = std::process::Command::new("kill").args([signal, &pid.to_string()]).status();
        assert!(kill.unwrap().success());
    };
    let mut scene = Scene::new("cut-off").await;
    // So long that the session does not end with its idle timeout.
    scene.far = scene.far.ttl(Duration::from_secs(60));
    let waiter = scene.wait();
    scene.until_one_waits().await;
    let [waits] = scene.sessions(false).await[..] else { panic!("one waits") };
    scene.proxy.lose_for_good(Side::Client);
    scene.proxy.lose_for_good(Side::Server);
    let key = scene.key();
    let Scene { holder, client, far, proxy: _proxy, .. } = scene;
    holder.release().await.unwrap();
    eventually("it is granted", async || holders_and_waiters(&client, key).await == (1, 0)).await;
    signal("-STOP", waits);
    waiter.abort();
    assert!(waiter.await.unwrap_err().is_cancelled());
    // The store first sends cancel requests for a second, and then terminates the session.
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(1800)).await;
        signal("-CONT", waits);
    });
    soon("close", far.close()).await;
    assert_eq!(holders_and_waiters(&client, key).await, (0, 0));
}

/// A connection whose first message was lost hangs until `connect_timeout`, which may be several TTLs.
#[tokio::test]
async fn a_hanging_connection_attempt_does_not_block_the_next_claims() {
    let scene = Scene::new("stuck").await;
    let mutex = scene.far.mutex(name("stuck-other"));
    scene.proxy.lose(Side::Server);
    let error = soon("the first", mutex.lock()).await.unwrap_err();
    assert_eq!(error.kind(), lockkeeper_core::ErrorKind::Unavailable, "{error}");
    scene.proxy.heal();
    let start = Instant::now();
    soon("the second", mutex.lock()).await.unwrap().release().await.unwrap();
    assert!(start.elapsed() < TTL, "it took {:?}", start.elapsed());
    scene.holder.release().await.unwrap();
}

/// The driver does not learn when a cancel request arrives. A late request would end the next statement of its session.
#[tokio::test]
async fn a_session_is_not_used_again_while_a_cancel_for_it_is_in_flight() {
    let name = name("late-cancel");
    let holder = keeper("").mutex(name.clone()).lock().await.unwrap();
    let proxy = Proxy::start(server().addr()).await.unwrap();
    // Without TLS the client waits for no answer before it sends a cancel.
    let url = format!("postgres://postgres@{}/postgres?sslmode=disable", proxy.addr());
    let (store, client, key) =
        (Postgres::new(&url).unwrap(), client().await, AdvisoryKey::of(&name));
    let background = Background::new(tokio::runtime::Handle::current());
    let mut spec = ClaimSpec::new(Name::new(name).unwrap(), Duration::from_secs(60), background);
    // A short limit, so that the server ends the wait while the cancel is in flight.
    (spec.queue, spec.max_wait) = (true, Some(Duration::from_millis(1)));
    let mut claim = store.claim(spec).unwrap();
    let answer = soon("an answer", claim.attempt(None)).await.unwrap();
    assert!(matches!(answer, Attempt::Contended { .. }), "{answer:?}");
    let sql = format!("SELECT pid FROM pg_locks WHERE NOT granted AND {}", in_pg_locks(key));
    let waits: i32 = soon("it waits", async {
        loop {
            // The lock timeout is sent first, and the wait after its answer.
            let _ = tokio::time::timeout(Duration::from_millis(5), claim.changed()).await;
            if let Some(row) = client.query_opt(&sql, &[]).await.unwrap() {
                return row.get(0);
            }
        }
    })
    .await;
    // The wait ends soon after the first cancel, and before a second.
    let _ = tokio::time::timeout(Duration::from_millis(80), claim.changed()).await;
    proxy.freeze_new();
    assert_eq!(soon("release", claim.release()).await.unwrap(), Release::WasNotHeld);
    eventually("its session has ended", async || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1";
        client.query_one(sql, &[&waits]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
    proxy.heal();
    holder.release().await.unwrap();
}

#[tokio::test]
async fn a_keeper_closes_within_seconds_if_its_releases_are_not_answered() {
    let scene = Scene::new("close").await;
    // Opens a connection that has answered a release.
    scene.far.mutex(name("warm")).lock().await.unwrap().release().await.unwrap();
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(scene.far.mutex(name("held")).lock().await.unwrap());
    }
    scene.proxy.freeze();
    let start = Instant::now();
    drop(held);
    soon("close", scene.far.close()).await;
    assert!(start.elapsed() < Duration::from_secs(10), "it took {:?}", start.elapsed());
}

#[tokio::test]
async fn a_keeper_closes_within_seconds_if_its_waiters_cannot_be_cancelled() {
    let scene = Scene::new("close-waiting").await;
    let waiter = scene.wait();
    scene.until_one_waits().await;
    scene.proxy.freeze();
    let start = Instant::now();
    soon("close", scene.far.close()).await;
    assert!(start.elapsed() < Duration::from_secs(10), "it took {:?}", start.elapsed());
    let error = soon("the waiter", waiter).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), lockkeeper_core::ErrorKind::Closed, "{error}");
    scene.holder.release().await.unwrap();
}

/// Bytes are lost in one direction, and then the network heals. Answers may then belong to other statements. Every call must
/// still return, with or without an error, and the lock can be acquired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_returns_after_a_network_that_lost_one_direction_has_healed() {
    const TASKS: usize = 6;
    let (shared, extra) = (name("lossy"), name("lossy-extra"));
    let stop = tokio_util::sync::CancellationToken::new();
    let (mut proxies, mut keepers, mut tasks) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..2 {
        let proxy = Proxy::start(server().addr()).await.unwrap();
        let url = format!("postgres://postgres@{}/postgres?connect_timeout=2", proxy.addr());
        // Shorter than the loss, so that the server ends sessions without the client noticing.
        let keeper = Keeper::new(Postgres::new(&url).unwrap()).ttl(Duration::from_secs(1));
        for task in 0..TASKS {
            let (keeper, stop) = (keeper.clone(), stop.clone());
            let (shared, extra) = (shared.clone(), extra.clone());
            tasks.push(tokio::spawn(async move {
                while !stop.is_cancelled() {
                    // The call must return. Its result does not matter.
                    match task % 3 {
                        0 => drop(keeper.mutex(shared.clone()).lock().await),
                        1 => drop(keeper.lock_all([shared.clone(), extra.clone()]).lock().await),
                        _ => {
                            let mutex = keeper.mutex(shared.clone());
                            drop(mutex.try_lock_for(Duration::from_millis(300)).await);
                        }
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }));
        }
        keepers.push(keeper);
        proxies.push(proxy);
    }
    for (side, proxy) in [(Side::Server, &proxies[0]), (Side::Client, &proxies[1])] {
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxy.lose(side);
        tokio::time::sleep(Duration::from_millis(1500)).await;
        proxy.heal();
    }
    stop.cancel();
    for task in tasks {
        soon("a call", task).await.unwrap();
    }
    for keeper in keepers {
        soon("close", keeper.close()).await;
    }
    let near = keeper("");
    soon("the lock", near.mutex(shared).lock()).await.unwrap().release().await.unwrap();
}
