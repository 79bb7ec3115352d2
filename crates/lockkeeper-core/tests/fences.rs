//! Fences rise, and the floors that keep them rising are kept per name.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]
#![allow(clippy::unchecked_time_subtraction, reason = "the operands are constants")]

mod common;

use common::{Forgetful, secs, spawn_lock, spec, until_a_waiter_is_queued};
use lockkeeper_core::{Backend as _, Fence, Keeper, Memory};
use tokio::time::sleep;

#[tokio::test(start_paused = true)]
async fn fences_rise_even_if_the_store_loses_its_data() {
    let store = Forgetful::default();
    let keeper = Keeper::new(store.clone());
    let mut last = None;
    for _ in 0..10 {
        let guard = keeper.mutex("a").lock().await.unwrap();
        assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
        last = guard.fence();
        store.forget();
    }
}

#[tokio::test(start_paused = true)]
async fn fences_of_one_name_set_no_floor_for_another_name() {
    let store = Forgetful::default();
    let keeper = Keeper::new(store.clone());
    let next = async |name: &str| {
        let guard = keeper.mutex(name).lock().await.unwrap();
        let fence = guard.fence().unwrap().get();
        guard.release().await.unwrap();
        fence
    };
    for _ in 0..100 {
        next("a").await;
    }
    // Nor do the fences of a semaphore with the same name.
    let permit = keeper.semaphore("b", 1).acquire().await.unwrap();
    assert!(permit.fence().unwrap().get() >= 100);
    drop(permit);
    store.forget();
    assert!(next("b").await < 10, "the floor of `a` applies to `b`");
    assert!(next("a").await > 100, "the floor of `a` is lost");
}

#[tokio::test(start_paused = true)]
async fn a_floor_that_follows_from_the_stores_own_grants_is_never_rejected() {
    let store = Memory::new();
    let mut claim = store.claim(spec("a", secs(30))).unwrap();
    // The highest floor that the store accepts.
    claim.attempt(Fence::new(1 << 62)).await.unwrap();
    claim.release().await.unwrap();
    let keeper = Keeper::new(store);
    let mut last = None;
    for _ in 0..3 {
        let guard = keeper.mutex("a").lock().await.unwrap();
        assert!(guard.fence() > last);
        last = guard.fence();
        guard.release().await.unwrap();
    }
}

/// Returns the fence of the tenth lock of "a".
async fn tenth_fence(keeper: &Keeper) -> Option<Fence> {
    let mut last = None;
    for _ in 0..10 {
        let guard = keeper.mutex("a").lock().await.unwrap();
        last = guard.fence();
        guard.release().await.unwrap();
    }
    last
}

#[tokio::test(start_paused = true)]
async fn a_floor_is_dropped_an_hour_after_the_last_grant() {
    let store = Forgetful::default();
    let keeper = Keeper::new(store.clone());
    let last = tenth_fence(&keeper).await;
    store.forget();
    sleep(Fence::MAX_AHEAD - secs(1)).await;
    let guard = keeper.mutex("a").lock().await.unwrap();
    assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
    guard.release().await.unwrap();
    store.forget();
    sleep(Fence::MAX_AHEAD + secs(1)).await;
    let guard = keeper.mutex("a").lock().await.unwrap();
    assert!(guard.fence() < last, "{:?} after {last:?}", guard.fence());
}

#[tokio::test(start_paused = true)]
async fn async_and_blocking_locks_of_a_keeper_share_their_floors() {
    let store = Forgetful::default();
    let keeper = Keeper::new(store.clone());
    let last = tenth_fence(&keeper).await;
    store.forget();
    let guard = keeper.mutex("a").blocking_lock().unwrap();
    assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
    guard.blocking_release().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_handed_off_fence_is_above_all_earlier_fences_of_its_keeper() {
    let store = Forgetful::default();
    let (one, two) = (Keeper::new(store.clone()), Keeper::new(store.clone()));
    let mut last = None;
    for _ in 0..10 {
        let guard = one.mutex("a").lock().await.unwrap();
        last = guard.fence();
        guard.release().await.unwrap();
    }
    store.forget();
    let holder = two.mutex("a").lock().await.unwrap();
    let waiter = spawn_lock(one.mutex("a"));
    until_a_waiter_is_queued(&store.memory(), "a").await;
    holder.release().await.unwrap();
    let guard = waiter.await.unwrap().unwrap();
    assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
}
