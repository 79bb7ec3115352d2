//! Tries that share a statement, and the fence that it draws.

use std::collections::{BTreeMap, BTreeSet};
use std::task::{Context, Waker};
use std::time::Duration;

use lockkeeper_core::{Fence, Guard, Keeper};
use lockkeeper_postgres::{AdvisoryKey, Postgres};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::PostgresServer;

use crate::common::{
    client, crash_and_restart, holders_and_waiters, keeper, name, server, soon, url,
};

/// Locks all of them at the same time; every fourth is for a reader.
async fn lock_all(keeper: &Keeper, names: &[String]) -> Vec<Guard> {
    let asked = names.iter().enumerate().map(|(place, name)| {
        let lock = keeper.rw_lock(name.clone());
        tokio::spawn(
            async move { if place % 4 == 0 { lock.read().await } else { lock.write().await } },
        )
    });
    let mut guards = Vec::new();
    for asked in asked.collect::<Vec<_>>() {
        guards.push(soon("a lock", asked).await.unwrap().unwrap());
    }
    guards
}

/// How many different fences there are.
fn fences(guards: &[Guard]) -> usize {
    guards.iter().map(|guard| guard.fence().unwrap()).collect::<BTreeSet<_>>().len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tries_at_the_same_time_share_fences_which_rise_for_each_name() {
    let names: Vec<String> = (0..32).map(|_| name("together")).collect();
    let keepers = [keeper(""), keeper("")];
    let mut last: BTreeMap<String, Fence> = BTreeMap::new();
    let mut shared = 0;
    for round in 0..10 {
        // In another order each time, so that it is not always the same names that are sent directly.
        let mut names = names.clone();
        names.rotate_left(round * 3);
        let guards = lock_all(&keepers[round % 2], &names).await;
        shared += guards.len() - fences(&guards);
        for (guard, name) in guards.into_iter().zip(names) {
            let fence = guard.fence().unwrap();
            let before = last.insert(name, fence);
            assert!(Some(fence) > before, "{fence:?} after {before:?}");
            guard.release().await.unwrap();
        }
    }
    assert!(shared > 0, "no fence was shared: this tests nothing");
    let client = client().await;
    for name in names {
        assert_eq!(holders_and_waiters(&client, AdvisoryKey::of(&name)).await, (0, 0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_that_are_shared_rise_over_crashes_of_the_server() {
    let mut server = PostgresServer::start_or_panic();
    let keeper = Keeper::new(Postgres::new(&server.url()).unwrap());
    let names: Vec<String> = (0..16).map(|_| name("crash")).collect();
    let mut last: Option<Fence> = None;
    for _ in 0..4 {
        let guards = lock_all(&keeper, &names).await;
        assert!(fences(&guards) < guards.len(), "no fence was shared: this tests nothing");
        let lowest = guards.iter().map(|guard| guard.fence().unwrap()).min();
        assert!(lowest > last, "{lowest:?} after {last:?}");
        last = guards.iter().map(|guard| guard.fence().unwrap()).max();
        // Right after the grants: nothing else has made them durable.
        server = crash_and_restart(server).await;
        for guard in guards {
            soon("the loss", guard.lost()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_try_leaves_nothing_behind_and_those_that_share_its_statement_stay() {
    let proxy = Proxy::start(server().addr()).await.unwrap();
    let url = url().replace(&server().addr().to_string(), &proxy.addr().to_string());
    let keeper = Keeper::new(Postgres::new(&url).unwrap());
    keeper.mutex(name("warm")).lock().await.unwrap().release().await.unwrap();
    let names: Vec<String> = (0..16).map(|_| name("gone")).collect();
    proxy.freeze();
    let mut asked = Vec::new();
    for (place, name) in names.iter().enumerate() {
        if place == 10 {
            // The tries before are in flight then, and those after wait for their answer.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let mutex = keeper.mutex(name.clone());
        let mut lock = Box::pin(async move { mutex.lock().await });
        let polled = lock.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending(), "it has ended");
        asked.push((place, lock));
    }
    let (go, stay): (Vec<_>, Vec<_>) = asked.into_iter().partition(|(place, _)| place % 2 == 0);
    drop(go);
    proxy.heal();
    let mut guards = Vec::new();
    for (place, lock) in stay {
        guards.push((place, soon("a try that stays", lock).await.unwrap()));
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
