//! How a holder learns that it has lost, and when.

use std::time::Duration;

use lockkeeper_core::{Keeper, ReleaseOutcome, State};
use lockkeeper_postgres::{Key, Postgres};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::PostgresServer;

use crate::kit::{
    client, crash_and_restart, eventually, holders_and_waiters, keeper, name, server, soon,
};

/// A keeper on the other end of a line that can be cut.
async fn through_proxy() -> (Proxy, Keeper) {
    let proxy = Proxy::start(server().addr()).await.unwrap();
    let url = format!("postgres://postgres@{}/postgres", proxy.addr());
    (proxy, Keeper::new(Postgres::new(&url).unwrap()))
}

#[tokio::test]
async fn a_terminated_session_is_told_at_once() {
    let name = name("terminated");
    let keeper = keeper("").ttl(Duration::from_secs(600));
    let guard = keeper.mutex(name.clone()).lock().await.unwrap();
    crate::kit::terminate_holders(Key::of(&name)).await;
    soon("to be told", guard.lost()).await;
    assert_eq!(guard.state(), State::Lost);
    soon("the next", keeper.mutex(name).lock()).await.unwrap().release().await.unwrap();
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
}

#[tokio::test]
async fn a_line_that_is_cut_is_told_at_once_and_the_lock_is_free() {
    let name = name("cut");
    let (proxy, far) = through_proxy().await;
    let guard = far.mutex(name.clone()).ttl(Duration::from_secs(600)).lock().await.unwrap();
    proxy.cut();
    soon("to be told", guard.lost()).await;
    let next = soon("the next", keeper("").mutex(name).lock()).await.unwrap();
    next.release().await.unwrap();
}

#[tokio::test]
async fn a_silent_line_is_told_before_another_has_the_lock() {
    let name = name("silent");
    let (proxy, far) = through_proxy().await;
    let guard = far.mutex(name.clone()).ttl(Duration::from_secs(8)).lock().await.unwrap();
    let near = keeper("");
    assert!(near.mutex(name.clone()).try_lock().await.unwrap().is_none());
    proxy.freeze();
    let next = soon("the next", near.mutex(name).lock()).await.unwrap();
    assert!(!guard.is_held(), "two hold it, the first for {:?} more", guard.remaining());
    next.release().await.unwrap();
    drop(proxy);
}

#[tokio::test]
async fn a_blip_is_a_risk_and_heals() {
    let name = name("blip");
    let (proxy, far) = through_proxy().await;
    let guard = far.mutex(name.clone()).ttl(Duration::from_secs(18)).lock().await.unwrap();
    proxy.freeze();
    eventually("at risk", async || guard.state() == State::AtRisk).await;
    assert!(guard.is_held());
    proxy.heal();
    eventually("held again", async || guard.state() == State::Held).await;
    assert!(keeper("").mutex(name).try_lock().await.unwrap().is_none());
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
}

#[tokio::test]
async fn a_session_lasts_as_long_as_the_longest_lease_on_it() {
    let (long, short) = (name("long"), name("short"));
    let (proxy, far) = through_proxy().await;
    let far = far.ttl(Duration::from_secs(5));
    let patient = far.mutex(long.clone()).lock().await.unwrap();
    let hasty = far.mutex(short.clone()).lock().await.unwrap();
    patient.extend(Duration::from_secs(40)).await.unwrap();
    // Another that shares the connection, and asks for less, does not take that away.
    let third = far.mutex(name("third")).lock().await.unwrap();
    proxy.freeze();
    soon("the short ones", async { tokio::join!(hasty.lost(), third.lost()) }).await;
    // If the server had a shorter lease in mind, it would end by now.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(patient.is_held());
    let client = client().await;
    assert_eq!(holders_and_waiters(&client, Key::of(&long)).await, (1, 0));
    proxy.heal();
    eventually("held again", async || patient.state() == State::Held).await;
    assert_eq!(patient.release().await.unwrap(), ReleaseOutcome::Released);
}

#[tokio::test]
async fn a_lease_that_is_shorter_than_the_session_is_believed() {
    let name = name("shortened");
    let keeper = keeper("").ttl(Duration::from_secs(600));
    let guard = keeper.mutex(name).lock().await.unwrap();
    guard.extend(Duration::from_secs(5)).await.unwrap();
    assert!(guard.remaining().unwrap() <= Duration::from_secs(5));
    guard.extend(Duration::from_secs(60 * 24 * 60 * 60)).await.unwrap();
    let remaining = guard.remaining().unwrap();
    let longest = Duration::from_millis(i32::MAX as u64);
    assert!(remaining <= longest, "longer than the server counts: {remaining:?}");
    assert!(remaining > longest / 2, "{remaining:?}");
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_rise_over_crashes_of_the_server_and_holders_are_told() {
    // Not the one that is shared, and one that keeps its promises over a crash.
    let mut server = PostgresServer::start_or_panic();
    let keeper = Keeper::new(Postgres::new(&server.url()).unwrap());
    let mutex = keeper.mutex("crash");
    let mut last = None;
    for _ in 0..4 {
        let guard = soon("lock", mutex.lock()).await.unwrap();
        assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
        last = guard.fence();
        // Right after the grant: nothing else has made it durable.
        server = crash_and_restart(server).await;
        soon("to be told", guard.lost()).await;
    }
    let guard = soon("lock", mutex.lock()).await.unwrap();
    assert!(guard.fence() > last);
    guard.release().await.unwrap();
}
