//! How and when a holder learns of a loss.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lockkeeper_core::{
    Attempt, Backend as _, Background, Change, ClaimSpec, Fence, Keeper, Name, ReleaseOutcome,
    State,
};
use lockkeeper_postgres::{AdvisoryKey, Postgres};
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::PostgresServer;

use crate::common::{
    client, crash_and_restart, eventually, holders_and_waiters, in_pg_locks, keeper, name, server,
    soon,
};

/// A keeper behind a connection that can be cut.
async fn through_proxy() -> (Proxy, Keeper) {
    let proxy = Proxy::start(server().addr()).await.unwrap();
    let url = format!("postgres://postgres@{}/postgres", proxy.addr());
    (proxy, Keeper::new(Postgres::new(&url).unwrap()))
}

#[tokio::test]
async fn the_end_of_a_session_is_reported_at_once() {
    let name = name("terminated");
    let keeper = keeper("").ttl(Duration::from_secs(600));
    let guard = keeper.mutex(name.clone()).lock().await.unwrap();
    crate::common::terminate_holders(AdvisoryKey::of(&name)).await;
    soon("the loss", guard.lost()).await;
    assert_eq!(guard.state(), State::Lost);
    soon("the next", keeper.mutex(name).lock()).await.unwrap().release().await.unwrap();
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
}

#[tokio::test]
async fn a_connection_that_is_cut_is_reported_at_once_and_the_lock_is_free() {
    let name = name("cut");
    let (proxy, far) = through_proxy().await;
    let guard = far.mutex(name.clone()).ttl(Duration::from_secs(600)).lock().await.unwrap();
    proxy.cut();
    soon("the loss", guard.lost()).await;
    let next = soon("the next", keeper("").mutex(name).lock()).await.unwrap();
    next.release().await.unwrap();
}

#[tokio::test]
async fn a_silent_connection_is_reported_before_another_holds_the_lock() {
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
    assert_eq!(holders_and_waiters(&client, AdvisoryKey::of(&long)).await, (1, 0));
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
async fn fences_rise_over_crashes_of_the_server_and_holders_learn_of_them() {
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
        soon("the loss", guard.lost()).await;
    }
    let guard = soon("lock", mutex.lock()).await.unwrap();
    assert!(guard.fence() > last);
    guard.release().await.unwrap();
}

/// The grant and the end of its session have both arrived when the waiter next looks.
#[tokio::test]
async fn a_grant_whose_session_has_already_ended_is_not_handed_out() {
    let name = name("granted-and-ended");
    let (store, client, key) = (crate::common::store(""), client().await, AdvisoryKey::of(&name));
    let holder = keeper("").mutex(name.clone()).lock().await.unwrap();
    let background = Background::new(tokio::runtime::Handle::current());
    let mut spec = ClaimSpec::new(Name::new(name).unwrap(), Duration::from_secs(60), background);
    spec.queue = true;
    let mut claim = store.claim(spec).unwrap();
    let answer = soon("an answer", claim.attempt(None)).await.unwrap();
    assert!(matches!(answer, Attempt::Contended { .. }), "{answer:?}");
    eventually("it waits", async || {
        // Polled for a moment: a new connection prepares the statement before it sends the wait.
        let _ = tokio::time::timeout(Duration::from_millis(5), claim.changed()).await;
        holders_and_waiters(&client, key).await == (1, 1)
    })
    .await;
    holder.release().await.unwrap();
    eventually("it is granted", async || holders_and_waiters(&client, key).await == (1, 0)).await;
    // The process of the session is gone when this returns, and its end has been sent before.
    crate::common::terminate_holders(key).await;
    assert_eq!(holders_and_waiters(&client, key).await, (0, 0));
    assert_eq!(soon("a change", claim.changed()).await, Change::LookAgain);
    let answer = soon("an answer", claim.attempt(None)).await.unwrap();
    assert!(matches!(answer, Attempt::Granted(_)), "{answer:?}");
    assert_eq!(holders_and_waiters(&client, key).await, (1, 0));
    claim.release().await.unwrap();
}

/// What a task saw of one hold.
#[derive(Debug, Clone, Copy)]
struct Seen {
    start: Instant,
    end: Instant,
    fence: Fence,
    /// It was released, and had not been lost before.
    whole: bool,
}

/// The server frees the lock first, and tells its holder later. So holds overlap by moments, and the fence of the
/// one that was lost is the lower.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_order_the_holds_of_sessions_that_are_terminated() {
    let name = name("terminated-often");
    let stop = Instant::now() + Duration::from_secs(2);
    let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
    let keepers = [keeper(""), keeper("")];
    let tasks: Vec<_> = (0..6)
        .map(|task| {
            let (mutex, seen) = (keepers[task % 2].mutex(name.clone()), seen.clone());
            tokio::spawn(async move {
                while Instant::now() < stop {
                    // A session that is terminated while it waits may fail the wait.
                    let Ok(guard) = mutex.lock().await else { continue };
                    let (start, fence) = (Instant::now(), guard.fence().unwrap());
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    let end = Instant::now();
                    let whole = matches!(guard.release().await, Ok(ReleaseOutcome::Released));
                    seen.lock().unwrap().push(Seen { start, end, fence, whole });
                }
            })
        })
        .collect();
    let (client, mut terminated) = (client().await, 0);
    let sql = format!(
        "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_locks WHERE granted AND {}",
        in_pg_locks(AdvisoryKey::of(&name))
    );
    while Instant::now() < stop {
        terminated += client.query_one(&sql, &[]).await.unwrap().get::<_, i64>(0);
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    for task in tasks {
        soon("a task", task).await.unwrap();
    }
    let mut seen = Arc::into_inner(seen).unwrap().into_inner().unwrap();
    assert!(terminated > 20 && seen.iter().any(|hold| hold.whole), "{terminated}, {}", seen.len());
    let fences: HashSet<Fence> = seen.iter().map(|hold| hold.fence).collect();
    assert_eq!(fences.len(), seen.len(), "a fence was granted twice");
    seen.sort_by_key(|hold| hold.fence);
    for (low, hold) in seen.iter().enumerate() {
        for later in &seen[low + 1..] {
            let overlap = hold.start < later.end && later.start < hold.end;
            assert!(!(overlap && hold.whole), "{hold:?} was not lost when {later:?} began");
            let ordered = hold.start < later.start || !hold.whole;
            assert!(ordered, "{hold:?} has the lower fence, and came after {later:?}");
        }
    }
}
