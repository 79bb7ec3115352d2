//! The memory store: expired queue positions, dead holders, and claims that change their mode or TTL.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::time::Duration;

use common::{millis, pair, poll_once, secs, spawn_lock, spec};
use lockkeeper_core::{
    Attempt, Backend, Claim, ClaimSpec, Inspector, Keeper, Memory, Mode, Name, Release,
};
use lockkeeper_testkit::{Fault, Op};
use tokio::time::{Instant, sleep, timeout};

fn name(name: &str) -> Name {
    Name::new(name).unwrap()
}

/// Returns a claim on "a" that no engine drives.
fn claim(store: &Memory, ttl: Duration, change: impl FnOnce(&mut ClaimSpec)) -> Box<dyn Claim> {
    let mut spec = spec("a", ttl);
    change(&mut spec);
    store.claim(spec).unwrap()
}

async fn is_granted(claim: &mut Box<dyn Claim>) -> bool {
    matches!(claim.attempt(None).await.unwrap(), Attempt::Granted(_))
}

async fn waiters(store: &Memory) -> usize {
    store.show(&name("a")).await.unwrap().iter().map(|info| info.waiters.len()).sum()
}

#[tokio::test(start_paused = true)]
async fn the_release_of_an_expired_waiter_keeps_other_queue_positions() {
    let store = Memory::new();
    let mut holder = claim(&store, secs(30), |_| {});
    assert!(is_granted(&mut holder).await);
    let mut stale = claim(&store, secs(1), |spec| spec.queue = true);
    assert!(!is_granted(&mut stale).await);
    sleep(secs(2)).await;
    holder.release().await.unwrap();

    let mut next = claim(&store, secs(30), |_| {});
    assert!(is_granted(&mut next).await);
    let mut waiter = claim(&store, secs(30), |spec| spec.queue = true);
    assert!(!is_granted(&mut waiter).await);
    assert_eq!(waiters(&store).await, 1);
    assert_eq!(stale.release().await.unwrap(), Release::WasNotHeld);
    assert_eq!(waiters(&store).await, 1, "removed from the queue by the release of another claim");
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_acquire_of_an_expired_waiter_keeps_other_queue_positions() {
    let store = Memory::new();
    let mutex = Keeper::new(store.clone()).mutex("a");
    let holder = mutex.lock().await.unwrap();
    // Polled only once, so its queue position is not refreshed.
    let mut stale = Box::pin(mutex.lock());
    assert!(poll_once(stale.as_mut()).await.is_pending());
    sleep(secs(31)).await;
    holder.release().await.unwrap();

    let next = mutex.lock().await.unwrap();
    let waiter = spawn_lock(mutex.clone());
    while waiters(&store).await != 1 {
        tokio::task::yield_now().await;
    }
    drop(stale);
    sleep(millis(10)).await;
    next.release().await.unwrap();
    let _guard = timeout(secs(1), waiter).await.expect("a hand-off").unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_granted_the_lock_of_a_dead_holder_after_the_head_of_the_queue_has_left() {
    let keeper = Keeper::new(Memory::new());
    let start = Instant::now();
    let _dead = keeper.mutex("a").ttl(secs(30)).lock().await.unwrap().detach().unwrap();
    let head = tokio::spawn({
        let mutex = keeper.mutex("a");
        async move { mutex.try_lock_for(secs(5)).await.unwrap() }
    });
    sleep(millis(10)).await;
    let waiter = spawn_lock(keeper.mutex("a").ttl(secs(600)));
    assert!(head.await.unwrap().is_none());
    let _guard = waiter.await.unwrap().unwrap();
    assert!(start.elapsed() < secs(32), "a lease of 30 s, granted after {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_granted_the_lock_after_two_consecutive_holders_have_died() {
    let keeper = Keeper::new(Memory::new());
    let start = Instant::now();
    let _dead = keeper.mutex("a").ttl(secs(3)).lock().await.unwrap().detach().unwrap();
    let dies = tokio::spawn({
        let mutex = keeper.mutex("a").ttl(secs(3));
        async move { mutex.lock().await.unwrap().detach().unwrap() }
    });
    sleep(millis(10)).await;
    let waiter = spawn_lock(keeper.mutex("a").ttl(secs(600)));
    let _dead = dies.await.unwrap();
    let _guard = waiter.await.unwrap().unwrap();
    assert!(start.elapsed() < secs(8), "two leases of 3 s, granted after {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_downgraded_hold_is_never_exclusive_again() {
    let pair = pair();
    let writer = pair.faulty.rw_lock("a").write().await.unwrap();
    pair.faults.once(Op::Downgrade, Fault::LostAnswer);
    writer.downgrade().await.unwrap_err();
    let reader = pair.healthy.rw_lock("a").try_read().await.unwrap().expect("downgraded");
    assert!(
        !writer.is_held() || writer.mode() != Mode::Exclusive,
        "the writer reports an exclusive hold beside a reader"
    );
    // An adoption that states the old mode does not restore it.
    let ticket = writer.detach().unwrap();
    let adopted = pair.healthy.adopt(ticket).await;
    let shown = pair.healthy.inspect().unwrap().show("a").await.unwrap();
    assert!(reader.is_held());
    assert!(
        shown[0].holders.iter().all(|holder| holder.mode == Mode::Shared),
        "{shown:?}, adopted {adopted:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_lease_shortened_by_a_repeated_attempt_expires_in_time() {
    let store = Memory::new();
    let mut holder = claim(&store, secs(1), |_| {});
    assert!(is_granted(&mut holder).await);
    holder.renew(secs(1000)).await.unwrap();
    sleep(secs(2)).await;
    holder.renew(secs(1000)).await.unwrap();
    assert!(is_granted(&mut holder).await, "valid for a second");
    sleep(secs(2)).await;
    assert!(is_granted(&mut claim(&store, secs(1), |_| {})).await);
}

#[tokio::test(start_paused = true)]
async fn locks_of_dead_holders_are_removed_while_other_names_are_used() {
    let store = Memory::new();
    let keeper = Keeper::new(store.clone());
    for i in 0..1000 {
        let guard = keeper.mutex(format!("orders/{i}")).lock().await.unwrap();
        let _dead = guard.detach().unwrap();
    }
    let kept = || format!("{store:?}").matches("orders/").count();
    assert_eq!(kept(), 1000);
    sleep(secs(3600)).await;
    for _ in 0..3500 {
        keeper.mutex("x").lock().await.unwrap().release().await.unwrap();
    }
    assert_eq!(kept(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_try_for_more_permits_than_exist_leaves_no_state() {
    let store = Memory::new();
    let too_many = |spec: &mut ClaimSpec| spec.mode = Mode::Permits { take: 4, of: 3 };
    assert!(!is_granted(&mut claim(&store, secs(30), too_many)).await);
    assert_eq!(format!("{store:?}").matches("\"a\"").count(), 0, "{store:?}");
}

#[tokio::test(start_paused = true)]
async fn a_downgrade_of_permits_releases_none() {
    let store = Memory::new();
    let only = |spec: &mut ClaimSpec| spec.mode = Mode::Permits { take: 1, of: 1 };
    let (mut one, mut two) = (claim(&store, secs(600), only), claim(&store, secs(600), only));
    assert!(is_granted(&mut one).await);
    assert!(!is_granted(&mut two).await);
    let downgraded = one.downgrade(secs(600)).await;
    assert!(!is_granted(&mut two).await, "two claims hold the only permit after {downgraded:?}");
}
