//! Tries that share a statement and its fence.

use std::collections::{BTreeMap, BTreeSet};
use std::task::{Context, Waker};
use std::time::Duration;

use lockkeeper_core::{Fence, Guard, Keeper, Mode};
use lockkeeper_postgres::{AdvisoryKey, Postgres};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::PostgresServer;

use crate::common::{
    client, crash_and_restart, holders_and_waiters, keeper, name, server, soon, url,
};

/// Locks all names concurrently, every fourth as a reader.
async fn lock_all(keeper: &Keeper, names: &[String]) -> Vec<Guard> {
    let tries = names.iter().enumerate().map(|(place, name)| {
        let lock = keeper.rw_lock(name.clone());
        tokio::spawn(
            async move { if place % 4 == 0 { lock.read().await } else { lock.write().await } },
        )
    });
    let mut guards = Vec::new();
    for tried in tries.collect::<Vec<_>>() {
        guards.push(soon("a lock", tried).await.unwrap().unwrap());
    }
    guards
}

/// Returns how many writers have the fence of another one.
fn shared(guards: &[Guard]) -> usize {
    let writers = guards.iter().filter(|guard| guard.mode() == Mode::Exclusive);
    let fences: Vec<Fence> = writers.map(|guard| guard.fence().unwrap()).collect();
    fences.len() - fences.iter().collect::<BTreeSet<_>>().len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_tries_share_fences_that_rise_for_each_name() {
    let names: Vec<String> = (0..32).map(|_| name("together")).collect();
    let keepers = [keeper(""), keeper("")];
    let mut last: BTreeMap<String, Fence> = BTreeMap::new();
    let mut count = 0;
    for round in 0..10 {
        // In a different order each time, so that different names are sent directly.
        let mut names = names.clone();
        names.rotate_left(round * 3);
        let guards = lock_all(&keepers[round % 2], &names).await;
        count += shared(&guards);
        for (guard, name) in guards.into_iter().zip(names) {
            let fence = guard.fence().unwrap();
            let before = last.insert(name, fence);
            // A reader may have the fence of the last writer.
            let is_reader = guard.mode() == Mode::Shared;
            let rises = Some(fence) > before || is_reader && Some(fence) == before;
            assert!(rises, "{fence:?} after {before:?}");
            guard.release().await.unwrap();
        }
    }
    assert!(count > 0, "no fence was shared, so the test has no effect");
    let client = client().await;
    for name in names {
        assert_eq!(holders_and_waiters(&client, AdvisoryKey::of(&name)).await, (0, 0));
    }
}

/// On one thread, so that all tries are queued before one is answered.
#[tokio::test]
async fn shared_fences_rise_over_crashes_of_the_server() {
    let mut server = PostgresServer::start_or_panic();
    let keeper = Keeper::new(Postgres::new(&server.url()).unwrap());
    let names: Vec<String> = (0..16).map(|_| name("crash")).collect();
    let mut last: Option<Fence> = None;
    let mut count = 0;
    for _ in 0..4 {
        let guards = lock_all(&keeper, &names).await;
        count += shared(&guards);
        let lowest = guards.iter().map(|guard| guard.fence().unwrap()).min();
        assert!(lowest > last, "{lowest:?} after {last:?}");
        last = guards.iter().map(|guard| guard.fence().unwrap()).max();
        // Right after the grants, so that no other flush makes the fences durable.
        server = crash_and_restart(server).await;
        for guard in guards {
            soon("the loss", guard.lost()).await;
        }
    }
    assert!(count > 0, "no fence was shared, so the test has no effect");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_try_leaves_no_lock_and_does_not_affect_tries_in_the_same_statement() {
    let proxy = Proxy::start(server().addr()).await.unwrap();
    let url = url().replace(&server().addr().to_string(), &proxy.addr().to_string());
    let keeper = Keeper::new(Postgres::new(&url).unwrap());
    keeper.mutex(name("warm")).lock().await.unwrap().release().await.unwrap();
    let names: Vec<String> = (0..16).map(|_| name("gone")).collect();
    proxy.freeze();
    let mut tries = Vec::new();
    for (place, name) in names.iter().enumerate() {
        if place == 10 {
            // The earlier tries are in flight then, and the later ones wait for their answer.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let mutex = keeper.mutex(name.clone());
        let mut lock = Box::pin(async move { mutex.lock().await });
        let polled = lock.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending(), "the try has ended");
        tries.push((place, lock));
    }
    let (dropped, kept): (Vec<_>, Vec<_>) =
        tries.into_iter().partition(|(place, _)| place % 2 == 0);
    drop(dropped);
    proxy.heal();
    let mut guards = Vec::new();
    for (place, lock) in kept {
        guards.push((place, soon("a try", lock).await.unwrap()));
    }
    let client = client().await;
    for (place, guard) in guards {
        assert_eq!(holders_and_waiters(&client, AdvisoryKey::of(&names[place])).await, (1, 0));
        guard.release().await.unwrap();
    }
    soon("close", keeper.close()).await;
    for name in names {
        assert_eq!(holders_and_waiters(&client, AdvisoryKey::of(&name)).await, (0, 0));
    }
}
