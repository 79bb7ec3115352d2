//! Which claims share a connection, and how claims behave when the connection limit is reached.

use std::time::Duration;

use lockkeeper_core::{ErrorKind, Guard, Keeper};
use lockkeeper_testkit::history::History;

use crate::common::{client, eventually, keeper, name, sessions, soon};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_locks_share_a_few_connections() {
    let (application, name) = (name("two-hundred"), name("lock"));
    let keeper = keeper(&format!("application_name={application}"));
    let locks = (0..200).map(|i| {
        let mutex = keeper.mutex(format!("{name}/{i}"));
        tokio::spawn(async move { mutex.lock().await.unwrap() })
    });
    let mut guards = Vec::new();
    for lock in locks.collect::<Vec<_>>() {
        guards.push(soon("a lock", lock).await.unwrap());
    }
    let count = sessions(&client().await, &application).await;
    assert!((1..=8).contains(&count), "{count} connections");
    assert!(guards.iter().all(Guard::is_held));
    drop(guards);
    keeper.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_one_name_share_one_waiting_connection() {
    let (application, name) = (name("waiters"), name("lock"));
    let keeper = keeper(&format!("application_name={application}"));
    let mutex = keeper.mutex(name.clone());
    let guard = mutex.lock().await.unwrap();
    let waiters: Vec<_> = (0..30)
        .map(|_| {
            let mutex = mutex.clone();
            tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
        })
        .collect();
    let inspect = keeper.inspect().unwrap();
    eventually("all wait", async || {
        inspect.show(name.clone()).await.unwrap()[0].waiters.len() == 30
    })
    .await;
    let count = sessions(&client().await, &application).await;
    assert!((2..=4).contains(&count), "{count} connections");
    guard.release().await.unwrap();
    for waiter in waiters {
        soon("a waiter", waiter).await.unwrap();
    }
    keeper.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_connection_is_enough_and_does_not_deadlock() {
    let name = name("one");
    let keepers = [keeper("max_connections=1"), keeper("max_connections=1")];
    let history = History::new();
    let tasks: Vec<_> = (0..8)
        .map(|i| {
            let lock = if i % 4 < 2 { "a" } else { "b" };
            let mutex = keepers[i % 2].mutex(format!("{name}/{lock}"));
            let history = history.clone();
            tokio::spawn(async move {
                for _ in 0..5 {
                    let guard = mutex.lock().await.unwrap();
                    let open = history.begin(lock, guard.owner(), guard.mode(), guard.fence());
                    tokio::task::yield_now().await;
                    open.end();
                    guard.release().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        soon("five locks", task).await.unwrap();
    }
    assert_eq!(history.assert_clean().holds, 40);

    // A waiter does not block the releases of other claims in its process.
    let [one, other] = &keepers;
    let held = one.mutex(format!("{name}/held")).lock().await.unwrap();
    let elsewhere = other.mutex(format!("{name}/elsewhere")).lock().await.unwrap();
    let mutex = one.mutex(format!("{name}/elsewhere"));
    let waiter = tokio::spawn(async move { mutex.lock().await.unwrap() });
    let mutex = other.mutex(format!("{name}/held"));
    let crossed = tokio::spawn(async move { mutex.lock().await.unwrap() });
    soon("a release", held.release()).await.unwrap();
    let crossed = soon("the released lock", crossed).await.unwrap();
    soon("a release", elsewhere.release()).await.unwrap();
    soon("the waiter", waiter).await.unwrap().release().await.unwrap();
    crossed.release().await.unwrap();
}

#[tokio::test]
async fn a_try_without_a_free_connection_fails_and_names_the_limit() {
    let name = name("readers");
    let keeper = keeper("max_connections=2");
    let lock = keeper.rw_lock(name.clone());
    // Two readers of one name never share a connection, because a session is granted a lock that it already holds.
    let readers = [lock.read().await.unwrap(), lock.read().await.unwrap()];
    let error = soon("a third", lock.try_read()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("raise max_connections"), "{error}");
    // Other names are not affected, and a claim that may wait waits.
    drop(keeper.mutex(format!("{name}/other")).try_lock().await.unwrap().unwrap());
    let third = tokio::spawn(async move { lock.read().await });
    let [one, two] = readers;
    one.release().await.unwrap();
    soon("the third", third).await.unwrap().unwrap().release().await.unwrap();
    two.release().await.unwrap();
}

/// The server cannot notify it, and its TTL is so long that the next attempt of the engine would be too late.
#[tokio::test]
async fn a_claim_without_a_connection_to_wait_on_polls() {
    let name = name("polls");
    let guard = keeper("").mutex(name.clone()).lock().await.unwrap();
    let mutex = keeper("max_connections=1").mutex(name).ttl(Duration::from_secs(600));
    let mut waiter = tokio::spawn(async move { mutex.lock().await });
    let early = tokio::time::timeout(Duration::from_millis(500), &mut waiter).await;
    assert!(early.is_err(), "two holders: {early:?}");
    guard.release().await.unwrap();
    soon("the waiter", waiter).await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_claim_that_finds_no_connection_fails_after_a_ttl() {
    let keeper = keeper("max_connections=1").ttl(Duration::from_secs(2));
    let lock = keeper.rw_lock(name("no-connection"));
    let reader = lock.read().await.unwrap();
    let start = std::time::Instant::now();
    let error = soon("an error", lock.read()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("raise max_connections"), "{error}");
    assert!(start.elapsed() >= Duration::from_secs(1), "it did not wait: {:?}", start.elapsed());
    assert!(reader.is_held());
    reader.release().await.unwrap();
    lock.write().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_leave_a_connection_for_claims_that_do_not_wait() {
    let name = name("crowd");
    let (holder, crowd) = (keeper(""), keeper("max_connections=3"));
    let mut guards = Vec::new();
    let mut waiters = Vec::new();
    for i in 0..6 {
        guards.push(holder.mutex(format!("{name}/{i}")).lock().await.unwrap());
        let mutex = crowd.mutex(format!("{name}/{i}"));
        waiters.push(tokio::spawn(async move { mutex.lock().await.unwrap() }));
    }
    let free = crowd.mutex(format!("{name}/free"));
    for _ in 0..3 {
        let guard = soon("a lock that is free", free.lock()).await.unwrap();
        guard.release().await.unwrap();
    }
    drop(guards);
    for waiter in waiters {
        soon("a waiter", waiter).await.unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn unused_connections_are_closed() {
    let application = name("idle");
    let keeper = keeper(&format!("application_name={application}"));
    let mutex = keeper.mutex(name("lock")).ttl(Duration::from_secs(4));
    mutex.lock().await.unwrap().release().await.unwrap();
    let client = client().await;
    eventually("none is left", async || sessions(&client, &application).await == 0).await;
    soon("lock", mutex.lock()).await.unwrap().release().await.unwrap();
}

/// The task of a connection ends with its runtime, and with it the locks on that connection.
#[test]
fn a_store_outlives_the_runtimes_that_use_it() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (name, store) = (name("runtimes"), crate::common::store(""));
    for _ in 0..3 {
        let (one, two) = (runtime(), runtime());
        let lock = |keeper: Keeper, name: String| async move { keeper.mutex(name).lock().await };
        let make = |store: &lockkeeper_postgres::Postgres| Keeper::new(store.clone());
        let first = one.block_on(async { lock(make(&store), format!("{name}/1")).await.unwrap() });
        let second = two.block_on(async { lock(make(&store), format!("{name}/2")).await.unwrap() });
        assert!(first.is_held());
        drop(one);
        assert!(second.is_held(), "lost with the other runtime");
        two.block_on(async {
            drop(soon("lock", make(&store).mutex(format!("{name}/1")).lock()).await.unwrap());
            assert!(second.is_held(), "lost with the other runtime");
            second.release().await.unwrap();
        });
    }
}

/// Connections belong to runtimes, and the limit applies to all runtimes together. So a runtime may have no second
/// connection to confirm a wait with.
#[test]
fn a_waiter_does_not_fail_while_another_runtime_has_the_second_connection() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (elsewhere, one, two) = (runtime(), runtime(), runtime());
    let (name, store) = (name("two-runtimes"), crate::common::store("max_connections=2"));
    let make = || Keeper::new(store.clone()).ttl(Duration::from_secs(2));
    let holder = elsewhere.block_on(keeper("").mutex(name.clone()).lock()).unwrap();
    let busy = one.block_on(make().mutex(format!("{name}/busy")).lock()).unwrap();
    two.block_on(async {
        let mutex = make().mutex(name);
        let waiter = tokio::spawn(async move { mutex.lock().await });
        // Longer than the TTL, after which a waiter without an answer fails.
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(!waiter.is_finished(), "{:?}", soon("its error", waiter).await);
        elsewhere.spawn(holder.release());
        soon("the waiter", waiter).await.unwrap().unwrap().release().await.unwrap();
    });
    one.block_on(busy.release()).unwrap();
}
