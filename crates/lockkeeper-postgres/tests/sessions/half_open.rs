//! Connections on which one side, or both, no longer hear the other.

use std::time::{Duration, Instant};

use lockkeeper_core::{Guard, Keeper, Result};
use lockkeeper_postgres::{Key, Postgres};
use lockkeeper_testkit::proxy::{Proxy, Side};
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use crate::kit::{
    client, eventually, holders_and_waiters, in_pg_locks, keeper, name, server, soon,
};

const TTL: Duration = Duration::from_secs(3);

/// A lock that is held by a nearby keeper, and a keeper behind a proxy that waits for it.
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

    fn key(&self) -> Key {
        Key::of(&self.name)
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

    /// The sessions that hold or await the lock, apart from the first holder's.
    async fn sessions(&self, granted: bool) -> Vec<i32> {
        let sql = format!(
            "SELECT pid FROM pg_locks WHERE granted = {granted} AND {}",
            in_pg_locks(self.key())
        );
        self.client.query(&sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
    }
}

/// Waits for a guard, and expects it about a TTL after `start`, or two on a busy machine.
async fn within_about_a_ttl(start: Instant, waiter: JoinHandle<Result<Guard>>) -> Guard {
    let guard = soon("the waiter", waiter).await.unwrap().unwrap();
    assert!(start.elapsed() < TTL * 3, "it took {:?}", start.elapsed());
    guard
}

#[tokio::test]
async fn a_waiter_whose_session_ended_unheard_asks_again() {
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
    within_about_a_ttl(start, waiter).await.release().await.unwrap();
}

#[tokio::test]
async fn a_grant_that_was_lost_on_the_way_is_found_and_given_back() {
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
    let guard = within_about_a_ttl(start, waiter).await;
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1";
    let left: i64 = client.query_one(sql, &[&waits]).await.unwrap().get(0);
    assert_eq!(left, 0, "the session that was granted the lock unheard is still there");
    guard.release().await.unwrap();
    far.close().await;
}

#[tokio::test]
async fn those_who_wait_behind_a_dead_line_move_on() {
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
        within_about_a_ttl(Instant::now(), waiter).await.release().await.unwrap();
    }
}

/// The wait is sent on a connection whose outgoing direction is dead, so the server never hears of it.
#[tokio::test]
async fn a_wait_that_the_server_never_received_is_sent_again() {
    let scene = Scene::new("unsent").await;
    // A connection of the store that is idle, for the second waiter to wait on.
    let other = name("other");
    let blocked = keeper("").mutex(other.clone()).lock().await.unwrap();
    let mutex = scene.far.mutex(other.clone());
    let idle = tokio::spawn(async move { mutex.lock().await });
    eventually("it waits", async || {
        holders_and_waiters(&scene.client, Key::of(&other)).await == (1, 1)
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
    within_about_a_ttl(start, second).await.release().await.unwrap();
}

#[tokio::test]
async fn a_waiter_is_told_when_the_server_has_not_been_heard_for_a_ttl() {
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
