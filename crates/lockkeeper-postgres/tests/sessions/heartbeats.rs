//! Renewals that share a heartbeat.

use std::fs;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use lockkeeper_core::{
    Attempt, Backend as _, Background, Claim, ClaimSpec, Guard, Keeper, Name, Renewal, State,
};
use lockkeeper_postgres::Postgres;
use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::PostgresServer;

use crate::common::{eventually, keeper, name, server, soon, store};

/// Returns how many heartbeats, which are empty statements, a server has logged.
fn heartbeats(server: &PostgresServer) -> usize {
    let log = fs::read_to_string(server.dir().join("server.log")).unwrap();
    log.lines().filter(|line| line.trim_end().ends_with("LOG:  statement:")).count()
}

/// Acquires locks over a third of the TTL, so that their renewals are due at different times, and returns the number of
/// heartbeats in the next TTL.
async fn heartbeats_within_a_ttl(locks: u32, sessions: u32, ttl: Duration) -> u32 {
    let args = ["-c", "log_statement=all", "-c", "max_connections=400", "-c", "fsync=off"];
    let server = PostgresServer::with_args(&args).unwrap_or_else(|error| panic!("{error}"));
    let url = format!("{}?fence=off&max_connections={sessions}", server.url());
    let keeper = Keeper::new(Postgres::new(&url).unwrap()).ttl(ttl);
    let started = tokio::time::Instant::now();
    let mut guards = Vec::new();
    for i in 0..locks {
        tokio::time::sleep_until(started + ttl / 3 * i / locks).await;
        guards.push(keeper.mutex(format!("heartbeat/{i}")).lock().await.unwrap());
    }
    // Long enough for every lock to be renewed.
    tokio::time::sleep(ttl / 2).await;
    let before = heartbeats(&server);
    tokio::time::sleep(ttl).await;
    let count = heartbeats(&server) - before;
    assert!(guards.iter().all(Guard::is_held));
    drop(guards);
    soon("close", keeper.close()).await;
    u32::try_from(count).unwrap()
}

/// One per session and third of a TTL, and one more at the edges. One per lock would be 600.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_sends_one_heartbeat_per_third_of_a_ttl_for_all_its_locks() {
    let (locks, sessions) = (200, 4);
    let count = heartbeats_within_a_ttl(locks, sessions, Duration::from_secs(9)).await;
    assert!(count >= sessions * 2, "{count} heartbeats: they are not counted");
    assert!(count <= sessions * 4, "{count} heartbeats for {locks} locks on {sessions} sessions");
}

fn spec(what: &str, ttl: Duration) -> ClaimSpec {
    let background = Background::new(tokio::runtime::Handle::current());
    ClaimSpec::new(Name::new(name(what)).unwrap(), ttl, background)
}

/// Two claims that hold locks on one session.
async fn two_claims(store: &Postgres, ttl: Duration) -> [Box<dyn Claim>; 2] {
    let mut claims = [(); 2].map(|()| store.claim(spec("shares", ttl)).unwrap());
    for claim in &mut claims {
        let answer = soon("an attempt", claim.attempt(None)).await.unwrap();
        assert!(matches!(answer, Attempt::Granted(_)), "{answer:?}");
    }
    claims
}

#[tokio::test]
async fn a_dropped_renewal_does_not_cancel_the_heartbeat_of_others() {
    let ttl = Duration::from_secs(6);
    let [mut dropped, mut other] = two_claims(&store("max_connections=1"), ttl).await;
    // Renewals that are due wait for each other.
    tokio::time::sleep(ttl / 3).await;
    let mut first = dropped.renew(ttl);
    assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let mut second = other.renew(ttl);
    assert!(second.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(first);
    let answer = soon("the renewal", second).await.unwrap();
    assert_eq!(answer, Renewal::Renewed { valid_for: ttl });
    dropped.release().await.unwrap();
    other.release().await.unwrap();
}

#[tokio::test]
async fn an_earlier_heartbeat_does_not_answer_a_renewal() {
    let args = ["-c", "log_statement=all", "-c", "fsync=off"];
    let server = PostgresServer::with_args(&args).unwrap_or_else(|error| panic!("{error}"));
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let url = format!("postgres://postgres@{}/postgres?max_connections=1", proxy.addr());
    let ttl = Duration::from_secs(600);
    let [mut first, mut second] = two_claims(&Postgres::new(&url).unwrap(), ttl).await;
    let before = heartbeats(&server);
    proxy.freeze();
    let mut sent = first.renew(ttl);
    let early = tokio::time::timeout(Duration::from_millis(100), &mut sent).await;
    assert!(early.is_err(), "{early:?}");
    let mut later = second.renew(ttl);
    assert!(later.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    proxy.heal();
    for renewal in [sent, later] {
        let answer = soon("a renewal", renewal).await.unwrap();
        assert_eq!(answer, Renewal::Renewed { valid_for: ttl });
    }
    assert_eq!(heartbeats(&server) - before, 2);
    first.release().await.unwrap();
    second.release().await.unwrap();
}

#[tokio::test]
async fn a_renewal_that_the_caller_waits_for_is_not_delayed() {
    // The linger, a sixtieth of it, is ten seconds.
    let keeper = keeper("max_connections=1").ttl(Duration::from_secs(600));
    let guards = [(); 3].map(|()| keeper.mutex(name("extended")));
    let mut held = Vec::new();
    for mutex in guards {
        held.push(mutex.lock().await.unwrap());
    }
    let start = Instant::now();
    for guard in &held {
        guard.extend(Duration::from_secs(600)).await.unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(5), "it took {:?}", start.elapsed());
}

/// After more than a sixth of the TTL, and before the next renewal is due.
#[tokio::test]
async fn an_extend_between_two_renewals_is_not_delayed() {
    let ttl = Duration::from_secs(30);
    let keeper = keeper("max_connections=1").ttl(ttl);
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(keeper.mutex(name("extended")).lock().await.unwrap());
    }
    tokio::time::sleep(ttl / 5).await;
    let start = Instant::now();
    held[0].extend(ttl).await.unwrap();
    assert!(start.elapsed() < ttl / 60, "it took {:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_heartbeat_that_hangs_puts_every_lock_of_its_session_at_risk() {
    let proxy = Proxy::start(server().addr()).await.unwrap();
    let url = format!("postgres://postgres@{}/postgres?max_connections=1", proxy.addr());
    let far = Keeper::new(Postgres::new(&url).unwrap()).ttl(Duration::from_secs(18));
    let names: Vec<String> = (0..8).map(|_| name("hangs")).collect();
    let mut guards = Vec::new();
    for name in &names {
        guards.push(far.mutex(name.clone()).lock().await.unwrap());
    }
    proxy.freeze();
    for guard in &guards {
        eventually("at risk", async || guard.state() == State::AtRisk).await;
    }
    assert!(guards.iter().all(Guard::is_held));
    proxy.heal();
    for guard in &guards {
        eventually("held again", async || guard.state() == State::Held).await;
    }
    // If the network does not heal, the loss is reported in time.
    proxy.freeze();
    let near = keeper("");
    for (guard, name) in guards.iter().zip(&names) {
        let next = soon("the next", near.mutex(name.clone()).lock()).await.unwrap();
        assert!(!guard.is_held(), "two holders, the first for {:?} more", guard.remaining());
        next.release().await.unwrap();
    }
    drop(proxy);
}
