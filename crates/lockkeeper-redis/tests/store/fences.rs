//! Fences rise, even if the server loses its data.

use lockkeeper_core::{Attempt, Backend as _, Background, ClaimSpec, Fence, Guard, Keeper, Name};
use lockkeeper_redis::{Config, Redis};
use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::eventually;

use crate::common::{got, lock, nothing_left, number, open, read, secs, server, waiter, write};

fn fence(guard: &Guard) -> Fence {
    guard.fence().unwrap()
}

async fn next(keeper: &Keeper) -> Fence {
    let guard = lock(keeper, "a").await;
    let fence = fence(&guard);
    guard.release().await.unwrap();
    fence
}

#[tokio::test]
async fn fences_rise_over_releases_and_hand_offs() {
    let (server, keeper) = server().await;
    let other = open(&server.url()).await;
    let mut last = next(&keeper).await;
    for _ in 0..20 {
        for keeper in [&keeper, &other] {
            let now = next(keeper).await;
            assert!(now > last);
            last = now;
        }
        let guard = lock(&keeper, "a").await;
        let waiting = waiter(&keeper, "a", 1, write(&other, "a")).await;
        let before = fence(&guard);
        guard.release().await.unwrap();
        let guard = got(waiting).await;
        assert!(before > last && fence(&guard) > before);
        last = fence(&guard);
        guard.release().await.unwrap();
    }
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn fences_rise_after_flushall() {
    let (server, keeper) = server().await;
    let before = next(&keeper).await;
    server.command(&["FLUSHALL"]);
    let other = open(&server.url()).await;
    let after = next(&other).await;
    assert!(after > before);
    // Also while a lock is held.
    let guard = lock(&keeper, "a").await;
    server.command(&["FLUSHALL"]);
    let second = lock(&other, "a").await;
    assert!(fence(&second) > fence(&guard));
}

#[tokio::test]
async fn every_request_works_after_a_script_flush() {
    let (server, keeper) = server().await;
    let before = next(&keeper).await;
    server.command(&["SCRIPT", "FLUSH"]);
    let guard = keeper.rw_lock("a").write().await.unwrap();
    assert!(fence(&guard) > before);
    server.command(&["SCRIPT", "FLUSH"]);
    guard.extend(secs(60)).await.unwrap();
    server.command(&["SCRIPT", "FLUSH"]);
    guard.downgrade().await.unwrap();
    server.command(&["SCRIPT", "FLUSH"]);
    assert_eq!(keeper.inspect().unwrap().show("a").await.unwrap()[0].holders.len(), 1);
    server.command(&["SCRIPT", "FLUSH"]);
    guard.release().await.unwrap();
    server.command(&["SCRIPT", "FLUSH"]);
    assert_eq!(keeper.inspect().unwrap().break_lock("a").await.unwrap(), 0);
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn fences_rise_after_a_restart_without_persistence() {
    let (mut server, keeper) = server().await;
    let before = next(&keeper).await;
    server.restart().unwrap();
    let other = open(&server.url()).await;
    let after = next(&other).await;
    assert!(after > before);
    // The first keeper reconnects.
    let mutex = keeper.mutex("a");
    eventually("a reconnect", async || match mutex.try_lock().await {
        Ok(Some(guard)) => {
            assert!(fence(&guard) > after);
            guard.release().await.is_ok()
        }
        _ => false,
    })
    .await;
    nothing_left(&keeper, &server).await;
}

/// Returns the server's clock, in microseconds.
fn clock(server: &RedisServer) -> u64 {
    let time = server.command(&["TIME"]);
    let (seconds, micros) = time.split_once('\n').unwrap();
    seconds.parse::<u64>().unwrap() * 1_000_000 + micros.parse::<u64>().unwrap()
}

#[tokio::test]
async fn a_fence_ahead_of_the_clock_is_stored_until_the_clock_has_passed_it() {
    let (server, _) = server().await;
    let store = Redis::connect(Config::from_url(&server.url()).unwrap()).await.unwrap();
    let ahead = Fence::new(clock(&server) + 6_000_000).unwrap();
    let spec = ClaimSpec::new(
        Name::new("a").unwrap(),
        secs(60),
        Background::new(tokio::runtime::Handle::current()),
    );
    let mut claim = store.claim(spec).unwrap();
    let Attempt::Granted(grant) = claim.attempt(Some(ahead)).await.unwrap() else { panic!() };
    assert_eq!(grant.fence, Some(ahead));
    claim.release().await.unwrap();
    let left = number(&server, &["PTTL", "lockkeeper:{a}:f"]);
    assert!((1..=6002).contains(&left), "{left}");

    // Fences of keepers that have not seen it are higher. On a busy machine the clock may have passed it already.
    let keeper = open(&server.url()).await;
    let mut last = ahead;
    for _ in 0..3 {
        let now = next(&keeper).await;
        assert!(now > last);
        last = now;
    }
    let guard = keeper.rw_lock("a").read().await.unwrap();
    assert!(fence(&guard) >= last);
    guard.release().await.unwrap();
    eventually("the expiry of the stored fence", async || {
        server.command(&["KEYS", "*"]).is_empty()
    })
    .await;
    assert!(next(&keeper).await > last);
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_keeper_sends_its_last_fence_as_a_floor() {
    let (server, keeper) = server().await;
    // As if the clock had been half an hour ahead and was corrected: the client's last fence is ahead of the clock.
    let ahead = Fence::new(clock(&server) + 1_800_000_000).unwrap();
    let store = Redis::connect(Config::from_url(&server.url()).unwrap()).await.unwrap();
    let spec = ClaimSpec::new(
        Name::new("b").unwrap(),
        secs(60),
        Background::new(tokio::runtime::Handle::current()),
    );
    let mut claim = store.claim(spec).unwrap();
    assert!(matches!(claim.attempt(Some(ahead)).await.unwrap(), Attempt::Granted(_)));
    claim.release().await.unwrap();
    let guard = lock(&keeper, "b").await;
    assert!(fence(&guard) > ahead);
    guard.release().await.unwrap();
    server.command(&["FLUSHALL"]);
    // The server has lost the fence. The keeper has it.
    let after = lock(&keeper, "b").await;
    assert!(fence(&after) > ahead);
    after.release().await.unwrap();
}

#[tokio::test]
async fn shared_fences_are_not_below_earlier_exclusive_ones() {
    let (server, keeper) = server().await;
    let other = open(&server.url()).await;
    for _ in 0..10 {
        let before = next(&keeper).await;
        let first = read(&other, "a").await.unwrap();
        let second = read(&keeper, "a").await.unwrap();
        assert!(fence(&first) >= before && fence(&second) >= before);
        let highest = fence(&first).max(fence(&second));
        let writer = waiter(&keeper, "a", 1, write(&keeper, "a")).await;
        first.release().await.unwrap();
        second.release().await.unwrap();
        let writer = got(writer).await;
        assert!(fence(&writer) > before && fence(&writer) >= highest);
        writer.downgrade().await.unwrap();
        assert!(fence(&writer) >= highest);
        writer.release().await.unwrap();
    }
    nothing_left(&keeper, &server).await;
}
