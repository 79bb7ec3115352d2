//! Waiting on the server, and abandoning a wait.

use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use lockkeeper_core::{Guard, Keeper, Result};
use lockkeeper_postgres::{AdvisoryKey, Postgres};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::PostgresServer;

use crate::common::{
    SERVER_ARGS, client, client_at, eventually, holders_and_waiters, keeper, name, server, soon,
};

#[tokio::test]
async fn a_waiter_that_times_out_leaves_the_servers_queue() {
    let name = name("gives-up");
    let (holder, waiter) = (keeper(""), keeper(""));
    let guard = holder.mutex(name.clone()).lock().await.unwrap();
    let mutex = waiter.mutex(name.clone());
    assert!(mutex.try_lock_for(Duration::from_secs(2)).await.unwrap().is_none());
    soon("close", waiter.close()).await;
    assert_eq!(holders_and_waiters(&client().await, AdvisoryKey::of(&name)).await, (1, 0));
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_dropped_waiter_leaves_the_servers_queue() {
    let name = name("dropped");
    let (holder, other) = (keeper(""), keeper(""));
    let guard = holder.mutex(name.clone()).lock().await.unwrap();
    let client = client().await;
    for _ in 0..3 {
        let mutex = other.mutex(name.clone());
        let waiter = tokio::spawn(async move { mutex.lock().await });
        let key = AdvisoryKey::of(&name);
        eventually("it waits", async || holders_and_waiters(&client, key).await == (1, 1)).await;
        waiter.abort();
        eventually("it has left", async || holders_and_waiters(&client, key).await == (1, 0)).await;
    }
    guard.release().await.unwrap();
    soon("lock", other.mutex(name).lock()).await.unwrap().release().await.unwrap();
}

/// The grant of the server races with the cancellation of the waiter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_granted_to_a_waiter_that_was_just_dropped_is_released() {
    let name = name("just-left");
    let (holder, other) = (keeper(""), keeper(""));
    for pause in 0..20 {
        let guard = holder.mutex(name.clone()).lock().await.unwrap();
        let mutex = other.mutex(name.clone());
        let waiter = tokio::spawn(async move { mutex.lock().await });
        let inspect = holder.inspect().unwrap();
        eventually("it waits", async || {
            inspect.show(name.clone()).await.unwrap()[0].waiters.len() == 1
        })
        .await;
        let release = tokio::spawn(async move { guard.release().await.unwrap() });
        tokio::time::sleep(Duration::from_micros(pause * 50)).await;
        waiter.abort();
        // If the task has the guard already, this drops it.
        drop(waiter);
        soon("the release", release).await.unwrap();
        let next = soon("the next", holder.mutex(name.clone()).lock()).await.unwrap();
        next.release().await.unwrap();
    }
    soon("close", other.close()).await;
    soon("close", holder.close()).await;
    assert_eq!(holders_and_waiters(&client().await, AdvisoryKey::of(&name)).await, (0, 0));
}

#[tokio::test]
async fn a_bounded_wait_ends_on_the_server_even_if_its_waiter_is_cut_off() {
    let name = name("cut-off");
    let guard = keeper("").mutex(name.clone()).lock().await.unwrap();
    let proxy = Proxy::start(server().addr()).await.unwrap();
    let url = format!("postgres://postgres@{}/postgres", proxy.addr());
    let far = Keeper::new(Postgres::new(&url).unwrap()).ttl(Duration::from_secs(600));
    let mutex = far.mutex(name.clone());
    let waiter = tokio::spawn(async move { mutex.try_lock_for(Duration::from_secs(12)).await });
    let (client, key) = (client().await, AdvisoryKey::of(&name));
    eventually("it waits", async || holders_and_waiters(&client, key).await == (1, 1)).await;
    proxy.freeze();
    eventually("it has left", async || holders_and_waiters(&client, key).await == (1, 0)).await;
    assert!(soon("the waiter", waiter).await.unwrap().unwrap().is_none());
    guard.release().await.unwrap();
}

#[tokio::test]
async fn attempts_within_one_round_trip_are_granted_in_order() {
    let keeper = keeper("");
    let mutex = keeper.mutex(name("order"));
    let order = std::sync::Mutex::new(Vec::new());
    let mut locks: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = Vec::new();
    for i in 0..10 {
        let (mutex, order) = (&mutex, &order);
        locks.push(Box::pin(async move {
            let guard = mutex.lock().await.unwrap();
            order.lock().unwrap().push(i);
            guard.release().await.unwrap();
        }));
    }
    // The first poll sends all attempts, one after the other.
    let all = std::future::poll_fn(|cx| {
        locks.retain_mut(|lock| lock.as_mut().poll(cx).is_pending());
        if locks.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    });
    soon("all of them", all).await;
    assert_eq!(*order.lock().unwrap(), (0..10).collect::<Vec<_>>());
}

/// Between processes, the server decides among the waiters that have reached it.
#[tokio::test]
async fn a_try_does_not_overtake_waiters_of_its_process() {
    let name = name("overtake");
    let keeper = keeper("");
    let mutex = keeper.mutex(name.clone());
    let guard = mutex.lock().await.unwrap();
    let waiting: Vec<tokio::task::JoinHandle<Result<Guard>>> = (0..2)
        .map(|_| {
            let mutex = mutex.clone();
            tokio::spawn(async move { mutex.lock().await })
        })
        .collect();
    let inspect = keeper.inspect().unwrap();
    eventually("both wait", async || {
        inspect.show(name.clone()).await.unwrap()[0].waiters.len() == 2
    })
    .await;
    guard.release().await.unwrap();
    assert!(mutex.try_lock().await.unwrap().is_none(), "a try overtook the waiters");
    for waiter in waiting {
        let guard = soon("the next", waiter).await.unwrap().unwrap();
        assert!(mutex.try_lock().await.unwrap().is_none());
        guard.release().await.unwrap();
    }
}

/// A wait is a transaction on the server. PostgreSQL 17 and newer can limit transactions, and a session whose transaction
/// reaches the limit is ended.
#[tokio::test]
async fn a_wait_outlives_the_transaction_timeout_of_the_database() {
    for major in [17, 18] {
        let server = PostgresServer::of_version(major, &SERVER_ARGS);
        let server = server.unwrap_or_else(|error| panic!("{error}"));
        let client = client_at(&server.url()).await;
        let limit = "ALTER DATABASE postgres SET transaction_timeout = '200ms'";
        client.batch_execute(limit).await.unwrap();
        let [one, other] = [(); 2].map(|()| Keeper::new(Postgres::new(&server.url()).unwrap()));
        let guard = one.mutex("a").lock().await.unwrap();
        let waiter = tokio::spawn(async move { other.mutex("a").lock().await.unwrap() });
        let long_wait = "SELECT FROM pg_locks WHERE locktype = 'advisory' \
                      AND clock_timestamp() - waitstart > interval '600 ms'";
        eventually("a wait three times as long as the limit", async || {
            !client.query(long_wait, &[]).await.unwrap().is_empty()
        })
        .await;
        guard.release().await.unwrap();
        soon("the waiter", waiter).await.unwrap().release().await.unwrap();
    }
}
