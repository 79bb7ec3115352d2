//! When a holder is notified of a loss.

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
async fn the_end_of_a_session_is_reported_immediately() {
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
async fn a_cut_connection_is_reported_immediately_and_frees_the_lock() {
    let name = name("cut");
    let (proxy, far) = through_proxy().await;
    let guard = far.mutex(name.clone()).ttl(Duration::from_secs(600)).lock().await.unwrap();
    proxy.cut();
    soon("the loss", guard.lost()).await;
    let next = soon("the next", keeper("").mutex(name).lock()).await.unwrap();
    next.release().await.unwrap();
}

#[tokio::test]
async fn a_silent_connection_is_reported_before_the_lock_is_granted_again() {
    let name = name("silent");
    let (proxy, far) = through_proxy().await;
    let guard = far.mutex(name.clone()).ttl(Duration::from_secs(8)).lock().await.unwrap();
    let near = keeper("");
    assert!(near.mutex(name.clone()).try_lock().await.unwrap().is_none());
    proxy.freeze();
    let next = soon("the next", near.mutex(name).lock()).await.unwrap();
    assert!(!guard.is_held(), "two holders, the first for {:?} more", guard.remaining());
    next.release().await.unwrap();
    drop(proxy);
}

#[tokio::test]
async fn a_lock_is_at_risk_during_a_short_outage_and_held_afterwards() {
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
    let long_hold = far.mutex(long.clone()).lock().await.unwrap();
    let short_hold = far.mutex(short.clone()).lock().await.unwrap();
    long_hold.extend(Duration::from_secs(40)).await.unwrap();
    // A later claim with a shorter TTL on the same connection does not shorten the session.
    let third = far.mutex(name("third")).lock().await.unwrap();
    proxy.freeze();
    soon("the losses of the short holds", async { tokio::join!(short_hold.lost(), third.lost()) })
        .await;
    // With a shorter idle timeout, the server would end the session in this time.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(long_hold.is_held());
    let client = client().await;
    assert_eq!(holders_and_waiters(&client, AdvisoryKey::of(&long)).await, (1, 0));
    proxy.heal();
    eventually("held again", async || long_hold.state() == State::Held).await;
    assert_eq!(long_hold.release().await.unwrap(), ReleaseOutcome::Released);
}

#[tokio::test]
async fn a_lease_can_be_shorter_than_the_session_and_not_longer_than_the_server_allows() {
    let name = name("shortened");
    let keeper = keeper("").ttl(Duration::from_secs(600));
    let guard = keeper.mutex(name).lock().await.unwrap();
    guard.extend(Duration::from_secs(5)).await.unwrap();
    assert!(guard.remaining().unwrap() <= Duration::from_secs(5));
    guard.extend(Duration::from_secs(60 * 24 * 60 * 60)).await.unwrap();
    let remaining = guard.remaining().unwrap();
    let longest = Duration::from_millis(i32::MAX as u64);
    assert!(remaining <= longest, "longer than the longest idle timeout: {remaining:?}");
    assert!(remaining > longest / 2, "{remaining:?}");
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_ids_rise_over_crashes_of_the_server_and_holders_are_notified() {
    // Its own server, with fsync.
    let mut server = PostgresServer::start_or_panic();
    let url = format!("{}?fence=xid", server.url());
    let keeper = Keeper::new(Postgres::new(&url).unwrap());
    let mutex = keeper.mutex("crash");
    let mut last = None;
    for _ in 0..4 {
        let guard = soon("lock", mutex.lock()).await.unwrap();
        assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
        last = guard.fence();
        // Right after the grant, so that no other flush makes the fence durable.
        server = crash_and_restart(server).await;
        soon("the loss", guard.lost()).await;
    }
    let guard = soon("lock", mutex.lock()).await.unwrap();
    assert!(guard.fence() > last);
    guard.release().await.unwrap();
}

/// The grant and the end of its session have both arrived when the claim is polled again.
#[tokio::test]
async fn a_grant_whose_session_has_already_ended_is_not_returned() {
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
        // Polled, because a new connection prepares the statement before it sends the wait.
        let _ = tokio::time::timeout(Duration::from_millis(5), claim.changed()).await;
        holders_and_waiters(&client, key).await == (1, 1)
    })
    .await;
    holder.release().await.unwrap();
    eventually("it is granted", async || holders_and_waiters(&client, key).await == (1, 0)).await;
    // When this returns, the process of the session has ended, and has notified the client.
    crate::common::terminate_holders(key).await;
    assert_eq!(holders_and_waiters(&client, key).await, (0, 0));
    assert_eq!(soon("a change", claim.changed()).await, Change::LookAgain);
    let answer = soon("an answer", claim.attempt(None)).await.unwrap();
    assert!(matches!(answer, Attempt::Granted(_)), "{answer:?}");
    assert_eq!(holders_and_waiters(&client, key).await, (1, 0));
    claim.release().await.unwrap();
}

/// A hold as its task observed it.
#[derive(Debug, Clone, Copy)]
struct ObservedHold {
    start: Instant,
    end: Instant,
    fence: Fence,
    /// Whether it was released, and not lost before.
    released: bool,
}

/// The server frees the lock before it notifies the holder. So holds overlap briefly, and the lost hold has the lower fence.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_order_the_holds_of_sessions_that_are_terminated() {
    let name = name("terminated-often");
    let stop = Instant::now() + Duration::from_secs(2);
    let seen: Arc<Mutex<Vec<ObservedHold>>> = Arc::default();
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
                    let released = matches!(guard.release().await, Ok(ReleaseOutcome::Released));
                    seen.lock().unwrap().push(ObservedHold { start, end, fence, released });
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
    assert!(
        terminated > 20 && seen.iter().any(|hold| hold.released),
        "{terminated}, {}",
        seen.len()
    );
    let fences: HashSet<Fence> = seen.iter().map(|hold| hold.fence).collect();
    assert_eq!(fences.len(), seen.len(), "a fence was granted twice");
    seen.sort_by_key(|hold| hold.fence);
    for (low, hold) in seen.iter().enumerate() {
        for later in &seen[low + 1..] {
            let overlap = hold.start < later.end && later.start < hold.end;
            assert!(!(overlap && hold.released), "{hold:?} was not lost when {later:?} began");
            let ordered = hold.start < later.start || !hold.released;
            assert!(ordered, "{hold:?} has the lower fence, and began after {later:?}");
        }
    }
}
