//! Semaphores made of slots: lost responses, limits, breaking and inspection.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Uncounting, millis, secs};
use lockkeeper_core::{ErrorKind, Guard, Inspector, Keeper, Memory, Slots};
use lockkeeper_testkit::{Fault, Faulty, Op};
use tokio::time::{sleep, timeout};

fn slots(store: &Memory) -> Keeper {
    Keeper::new(Slots::new(Arc::new(Uncounting(store.clone()))))
}

#[tokio::test(start_paused = true)]
async fn a_slot_whose_response_was_lost_is_not_held_together_with_another() {
    // Which slot is asked first is random: once may be luck.
    for round in 0..20 {
        let store = Memory::new();
        let (node, faults) = Faulty::new(Uncounting(store.clone()));
        let keeper = Keeper::new(Slots::new(Arc::new(node)));
        let both = slots(&store).semaphore("a", 2).acquire_many(2).await.unwrap();
        let waiter = tokio::spawn({
            let semaphore = keeper.semaphore("a", 2);
            async move { semaphore.acquire().await.unwrap() }
        });
        sleep(millis(600)).await;
        // The gate answers, the first slot does not.
        faults.once(Op::Attempt, Fault::SlowRequest(Duration::ZERO));
        faults.once(Op::Attempt, Fault::LostAnswer);
        both.release().await.unwrap();
        let guard = waiter.await.unwrap();
        sleep(secs(1)).await;
        let parts = store.list("a").await.unwrap();
        let held = parts.iter().filter(|part| part.name.contains("slot"));
        assert_eq!(held.map(|slot| slot.holders.len()).sum::<usize>(), 1, "round {round}");
        let adopted = keeper.adopt(guard.detach().unwrap()).await;
        assert!(adopted.is_ok(), "round {round}: {adopted:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_semaphore_of_too_many_slots_is_refused() {
    let keeper = slots(&Memory::new());
    assert!(keeper.semaphore("a", 1024).try_acquire().await.unwrap().is_some());
    for permits in [1025, 300_000, u32::MAX] {
        let error = keeper.semaphore("b", permits).try_acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{permits}: {error}");
    }
}

/// A semaphore of three permits: one is held, and one waits for all three who has two already.
async fn one_holder_and_one_waiter_with_some_slots(
    keeper: &Keeper,
) -> (Guard, tokio::task::JoinHandle<Guard>) {
    let semaphore = keeper.semaphore("a", 3);
    let holder = semaphore.acquire().await.unwrap();
    let waiter = tokio::spawn(async move { semaphore.acquire_many(3).await.unwrap() });
    sleep(millis(100)).await;
    (holder, waiter)
}

#[tokio::test(start_paused = true)]
async fn breaking_a_semaphore_of_slots_affects_holders_and_not_waiters() {
    let keeper = slots(&Memory::new());
    let (holder, waiter) = one_holder_and_one_waiter_with_some_slots(&keeper).await;
    assert_eq!(keeper.inspect().unwrap().break_lock("a").await.unwrap(), 1);
    let guard = timeout(secs(5), waiter).await.expect("enters").unwrap();
    assert!(guard.is_held());
    assert!(!holder.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_with_some_of_its_slots_is_shown_as_a_waiter_only() {
    let keeper = slots(&Memory::new());
    let (_holder, _waiter) = one_holder_and_one_waiter_with_some_slots(&keeper).await;
    let shown = keeper.inspect().unwrap().show("a").await.unwrap();
    assert_eq!((shown[0].holders.len(), shown[0].waiters.len()), (1, 1), "{shown:?}");
}
