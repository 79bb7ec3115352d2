//! Batched requests: a request that is dropped, refused or not polled does not affect the others.

use futures_util::future::join_all;
use lockkeeper_core::{Attempt, Backend, Background, Claim, ClaimSpec, ErrorKind, Keeper, Name};
use lockkeeper_core::{Guard, Mode, ReleaseOutcome, Renewal};
use lockkeeper_redis::{Config, Redis};
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;
use tokio::runtime::{Builder, Handle, Runtime};

use crate::common::{key, lock, nothing_left, number, open, secs, server};
use crate::refusals::check;

async fn store(server: &RedisServer) -> Redis {
    Redis::connect(Config::from_url(&server.url()).unwrap()).await.unwrap()
}

fn claim(store: &Redis, name: &str) -> Box<dyn Claim> {
    let background = Background::new(Handle::current());
    store.claim(ClaimSpec::new(Name::new(name).unwrap(), secs(60), background)).unwrap()
}

/// A claim that uses a script for every attempt.
fn reader(store: &Redis, name: &str) -> Box<dyn Claim> {
    let background = Background::new(tokio::runtime::Handle::current());
    let mut spec = ClaimSpec::new(Name::new(name).unwrap(), secs(60), background);
    spec.mode = Mode::Shared;
    store.claim(spec).unwrap()
}

/// How many requests are sent by their callers; later ones go through the batch task.
const MAX_DIRECT: usize = 1;

/// Lets the other tasks of a single-threaded runtime run until they wait.
async fn others_run() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

/// Claims whose attempts are in flight while the server is stopped, each in a separate call.
macro_rules! in_flight {
    ($attempts:ident, $store:expr, $count:expr) => {
        in_flight!($attempts, $store, $count, claim);
    };
    ($attempts:ident, $store:expr, $count:expr, $claim:ident) => {
        let mut claims: Vec<_> =
            (0..$count).map(|number| $claim($store, &format!("in flight/{number}"))).collect();
        let mut $attempts: Vec<_> = claims.iter_mut().map(|claim| claim.attempt(None)).collect();
        for attempt in &mut $attempts {
            assert!(futures_util::poll!(attempt).is_pending());
            others_run().await;
        }
    };
}

#[tokio::test]
async fn an_attempt_that_is_dropped_before_it_is_sent_is_never_sent() {
    let (server, keeper) = server().await;
    let store = store(&server).await;
    server.stop();
    in_flight!(attempts, &store, MAX_DIRECT + 4);
    let mut dropped = claim(&store, "dropped");
    let mut attempt = dropped.attempt(None);
    assert!(futures_util::poll!(&mut attempt).is_pending());
    others_run().await;
    drop(attempt);
    server.cont();
    for answer in soon("the attempts in flight", join_all(attempts)).await {
        assert!(matches!(answer.unwrap(), Attempt::Granted(_)));
    }
    soon("another attempt", claim(&store, "after").attempt(None)).await.unwrap();
    assert_eq!(number(&server, &["EXISTS", &key("dropped")]), 0);
    lock(&keeper, "dropped").await.release().await.unwrap();
}

/// While few calls are in flight, a request does not wait for their replies.
#[tokio::test]
async fn an_attempt_is_sent_while_another_is_in_flight() {
    let (server, _) = server().await;
    let store = store(&server).await;
    server.stop();
    in_flight!(attempts, &store, MAX_DIRECT + 2);
    let mut sent = claim(&store, "sent");
    let mut attempt = sent.attempt(None);
    assert!(futures_util::poll!(&mut attempt).is_pending());
    others_run().await;
    // If it were still waiting, it would never be sent.
    drop(attempt);
    server.cont();
    soon("the attempts in flight", join_all(attempts)).await;
    soon("another attempt", claim(&store, "after").attempt(None)).await.unwrap();
    assert_eq!(number(&server, &["EXISTS", &key("sent")]), 1);
}

/// Its claim may have been released in the meantime, by a script that the server did know.
#[tokio::test]
async fn a_drops_is_not_resent_after_a_script_flush() {
    let (server, _) = server().await;
    let store = store(&server).await;
    server.command(&["SCRIPT", "FLUSH"]);
    server.stop();
    in_flight!(attempts, &store, MAX_DIRECT, reader);
    let (mut kept, mut dropped) = (reader(&store, "kept"), reader(&store, "dropped"));
    let (mut keeps, mut drops) = (kept.attempt(None), dropped.attempt(None));
    assert!(futures_util::poll!(&mut keeps).is_pending());
    assert!(futures_util::poll!(&mut drops).is_pending());
    others_run().await;
    drop(drops);
    server.cont();
    soon("the attempts in flight", join_all(attempts)).await;
    let answer = soon("the kept attempt", keeps).await.unwrap();
    assert!(matches!(answer, Attempt::Granted(_)));
    soon("another attempt", claim(&store, "after").attempt(None)).await.unwrap();
    assert_eq!(number(&server, &["EXISTS", &key("kept")]), 1);
    assert_eq!(number(&server, &["EXISTS", &key("dropped")]), 0);
}

/// Acquires locks, to release them concurrently with another request among them.
async fn held(keeper: &Keeper) -> Vec<Guard> {
    let attempts = (0..20).map(|number| {
        let mutex = keeper.mutex(format!("ok/{number}"));
        async move { mutex.lock().await.unwrap() }
    });
    soon("the locks", join_all(attempts)).await
}

async fn all_released(guards: Vec<Guard>) {
    for outcome in soon("the releases", join_all(guards.into_iter().map(Guard::release))).await {
        assert_eq!(outcome.unwrap(), ReleaseOutcome::Released);
    }
}

#[tokio::test]
async fn a_forbidden_name_fails_only_its_own_request() {
    let server = RedisServer::start_or_panic();
    let rules = ["on", ">secret", "~lockkeeper:{ok/*", "&*", "+@all"];
    server.command(&[&["ACL", "SETUSER", "ann"], &rules[..]].concat());
    let keeper = open(&format!("redis://ann:secret@127.0.0.1:{}/", server.port())).await;
    let mut guards = held(&keeper).await;
    let rest = guards.split_off(10);
    let forbidden = keeper.mutex("forbidden");
    let ((), refused, ()) =
        tokio::join!(all_released(guards), forbidden.try_lock(), all_released(rest));
    check(&refused.unwrap_err(), ErrorKind::Config, "lacks a permission");
    nothing_left(&keeper, &server).await;
}

/// Otherwise all locks whose renewals share a call with it would be lost.
#[tokio::test]
async fn a_name_that_becomes_forbidden_fails_only_its_own_renewal() {
    let server = RedisServer::start_or_panic();
    server.command(&["ACL", "SETUSER", "ann", "on", ">secret", "~*", "&*", "+@all"]);
    let url = format!("redis://ann:secret@127.0.0.1:{}/", server.port());
    let store = Redis::connect(Config::from_url(&url).unwrap()).await.unwrap();
    let names = (0..20).map(|number| format!("ok/{number}"));
    let mut claims: Vec<_> = names.map(|name| claim(&store, &name)).collect();
    claims.insert(10, claim(&store, "forbidden"));
    for answer in join_all(claims.iter_mut().map(|claim| claim.attempt(None))).await {
        assert!(matches!(answer.unwrap(), Attempt::Granted(_)));
    }
    server.command(&["ACL", "SETUSER", "ann", "resetkeys", "~lockkeeper:{ok/*"]);
    let renewals = claims.iter_mut().map(|claim| claim.renew(secs(60)));
    let mut renewed = soon("the renewals", join_all(renewals)).await;
    let refused = renewed.remove(10);
    check(&refused.unwrap_err(), ErrorKind::Config, "lacks a permission");
    for renewal in renewed {
        assert_eq!(renewal.unwrap(), Renewal::Renewed { valid_for: secs(60) });
    }
}

#[tokio::test]
async fn a_key_of_a_wrong_type_fails_only_the_attempt_that_uses_it() {
    let (server, keeper) = server().await;
    server.command(&["RPUSH", &key("other"), "not", "a", "lock"]);
    let mut guards = held(&keeper).await;
    let rest = guards.split_off(10);
    let other = keeper.mutex("other");
    let ((), refused, ()) =
        tokio::join!(all_released(guards), other.try_lock(), all_released(rest));
    check(&refused.unwrap_err(), ErrorKind::Config, "used by another program");
    server.command(&["DEL", &key("other")]);
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn the_client_reconnects_if_a_replica_refuses_a_batched_request() {
    let (server, _) = server().await;
    let store = store(&server).await;
    // The master does not exist, so the replica does not start to load data.
    server.command(&["REPLICAOF", "127.0.0.1", "1"]);
    // The replies to direct requests are not read.
    in_flight!(_attempts, &store, MAX_DIRECT);
    let (mut one, mut two) = (claim(&store, "one"), claim(&store, "two"));
    let (one, two) =
        soon("the errors", async { tokio::join!(one.attempt(None), two.attempt(None)) }).await;
    for refused in [one, two] {
        check(&refused.unwrap_err(), ErrorKind::Unavailable, "read-only replica");
    }
    // The next one connects again, so its error names the address.
    let refused = soon("an error", claim(&store, "next").attempt(None)).await.unwrap_err();
    check(&refused, ErrorKind::Unavailable, &format!("127.0.0.1:{}: ", server.port()));
}

#[tokio::test]
async fn an_attempt_that_is_not_polled_while_it_connects_does_not_delay_others() {
    let (server, keeper) = server().await;
    lock(&keeper, "a").await.release().await.unwrap();
    server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    // By then the client has usually noticed. If not, the test passes without testing anything.
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    server.stop();
    let mutex = keeper.mutex("left");
    let mut left = Box::pin(mutex.lock());
    assert!(futures_util::poll!(&mut left).is_pending());
    others_run().await;
    server.cont();
    lock(&keeper, "other").await.release().await.unwrap();
    soon("the attempt that was not polled", left).await.unwrap().release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

/// A single-threaded runtime runs only inside `block_on`.
#[test]
fn a_suspended_runtime_does_not_delay_others_with_the_same_store() {
    let server = RedisServer::start_or_panic();
    let first = Runtime::new().unwrap();
    let store = first.block_on(store(&server));
    let suspended = Builder::new_current_thread().enable_all().build().unwrap();
    let entered = suspended.enter();
    let mut claims: Vec<_> = (0..8).map(|number| claim(&store, &format!("{number}"))).collect();
    drop(entered);
    let mut attempts: Vec<_> = claims.iter_mut().map(|claim| claim.attempt(None)).collect();
    server.stop();
    suspended.block_on(async {
        for attempt in &mut attempts {
            assert!(futures_util::poll!(attempt).is_pending());
        }
    });
    server.cont();
    first.block_on(async {
        let keeper = Keeper::new(store);
        lock(&keeper, "a").await.release().await.unwrap();
    });
    for answer in suspended.block_on(join_all(attempts)) {
        assert!(matches!(answer.unwrap(), Attempt::Granted(_)));
    }
}

#[test]
fn queued_attempts_fail_when_the_runtime_of_the_connection_ends() {
    let server = RedisServer::start_or_panic();
    let first = Runtime::new().unwrap();
    let store = first.block_on(store(&server));
    let second = Builder::new_current_thread().enable_all().build().unwrap();
    second.block_on(async {
        server.stop();
        let mut claims: Vec<_> =
            (0..20).map(|number| claim(&store, &format!("{number}"))).collect();
        let mut attempts: Vec<_> = claims.iter_mut().map(|claim| claim.attempt(None)).collect();
        for attempt in &mut attempts {
            assert!(futures_util::poll!(attempt).is_pending());
            // So that most are batched because calls are in flight.
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        first.shutdown_background();
        // The task that sends batches is gone: they fail or are sent again.
        server.cont();
        for answer in soon("the attempts", join_all(attempts)).await {
            if let Err(error) = answer {
                assert!(error.is_retryable(), "{error}");
            }
        }
        let again = claims.iter_mut().map(|claim| claim.attempt(None));
        for answer in soon("the repeated attempts", join_all(again)).await {
            assert!(matches!(answer.unwrap(), Attempt::Granted(_)));
        }
    });
}

/// Attempts that share a call share a check. The fence is ahead of the clock, so only a script may grant that lock.
#[tokio::test]
async fn a_remembered_fence_does_not_affect_the_other_attempts_of_a_call() {
    let (server, _) = server().await;
    let store = store(&server).await;
    let time = server.command(&["TIME"]);
    let seconds: u64 = time.lines().next().unwrap().parse().unwrap();
    let ahead = ((seconds + 600) * 1_000_000).to_string();
    let fence_key = format!("{}:f", key("7"));
    server.command(&["SET", &fence_key, &ahead, "PX", "600000"]);
    let scripts = || -> u64 {
        let calls = server.command(&["INFO", "commandstats"]);
        let calls = calls.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        calls.map_or(0, |calls| calls.split(',').next().unwrap().parse().unwrap())
    };
    let before = scripts();
    let mut claims: Vec<_> = (0..32).map(|number| claim(&store, &number.to_string())).collect();
    let answers = join_all(claims.iter_mut().map(|claim| claim.attempt(None)));
    let answers = soon("the attempts", answers).await;
    let fences: Vec<u64> = answers
        .into_iter()
        .map(|answer| match answer.unwrap() {
            Attempt::Granted(grant) => grant.fence.unwrap().get(),
            other => panic!("{other:?}"),
        })
        .collect();
    let is_ahead = |(name, fence): (usize, &u64)| (*fence > ahead.parse().unwrap()) == (name == 7);
    assert!(fences.iter().enumerate().all(is_ahead), "{fences:?}");
    assert_eq!(scripts() - before, 1);
}
