//! Semaphores that `Slots` builds from locks.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{WithoutPermits, millis, secs};
use lockkeeper_core::{ErrorKind, Guard, Inspector, Keeper, Kind, Memory, ReleaseOutcome, Slots};
use lockkeeper_testkit::{Fault, Faults, Faulty, Op};
use tokio::time::{Instant, sleep, timeout};

fn slots(store: &Memory) -> Keeper {
    Keeper::new(Slots::new(Arc::new(WithoutPermits(store.clone()))))
}

#[tokio::test(start_paused = true)]
async fn a_slot_whose_response_was_lost_is_not_held_together_with_another() {
    // The order of the slots is random, so one round could pass by chance.
    for round in 0..20 {
        let store = Memory::new();
        let (node, faults) = Faulty::new(WithoutPermits(store.clone()));
        let keeper = Keeper::new(Slots::new(Arc::new(node)));
        let both = slots(&store).semaphore("a", 2).acquire_many(2).await.unwrap();
        let waiter = tokio::spawn({
            let semaphore = keeper.semaphore("a", 2);
            async move { semaphore.acquire().await.unwrap() }
        });
        sleep(millis(600)).await;
        // The response of the gate arrives, that of the first slot is lost.
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
async fn a_semaphore_of_too_many_slots_is_rejected() {
    let keeper = slots(&Memory::new());
    assert!(keeper.semaphore("a", 1024).try_acquire().await.unwrap().is_some());
    for permits in [1025, 300_000, u32::MAX] {
        let error = keeper.semaphore("b", permits).try_acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{permits}: {error}");
    }
}

/// A semaphore of three permits: a holder has one, and a waiter for all three has the other two.
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
    let guard = timeout(secs(5), waiter).await.expect("a grant").unwrap();
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

#[tokio::test(start_paused = true)]
async fn a_semaphore_of_slots_grants_at_most_its_permits() {
    let keeper = slots(&Memory::new());
    let gpus = keeper.semaphore("gpu", 4);
    let _mutex = keeper.mutex("gpu").lock().await.unwrap();
    let three = gpus.acquire_many(3).await.unwrap();
    assert_eq!(gpus.available().await.unwrap(), 1);
    assert!(gpus.try_acquire_many(2).await.unwrap().is_none());
    assert_eq!(gpus.available().await.unwrap(), 1, "a failed try holds no slot");
    let one = gpus.try_acquire().await.unwrap().unwrap();
    assert!(gpus.try_acquire().await.unwrap().is_none());
    sleep(secs(100)).await;
    assert!(three.is_held() && one.is_held());
    let shown = keeper.inspect().unwrap().show("gpu").await.unwrap();
    assert_eq!(shown.len(), 2);
    assert_eq!(shown[1].kind, Kind::Semaphore);
    assert_eq!(shown[1].holders.len(), 2);
    assert_eq!(three.release().await.unwrap(), ReleaseOutcome::Released);
    assert_eq!(gpus.available().await.unwrap(), 3);
}

#[tokio::test(start_paused = true)]
async fn waiters_for_slots_are_granted_in_order_and_only_one_of_them_polls() {
    let (store, faults) = Faulty::new(WithoutPermits::default());
    let keeper = Keeper::new(Slots::new(Arc::new(store)));
    let gpus = keeper.semaphore("gpu", 2);
    let both = gpus.acquire_many(2).await.unwrap();
    let (entered, mut order) = tokio::sync::mpsc::unbounded_channel();
    for i in 0..10 {
        let (gpus, entered) = (gpus.clone(), entered.clone());
        tokio::spawn(async move {
            let guard = gpus.acquire().await.unwrap();
            entered.send(i).unwrap();
            sleep(secs(1)).await;
            guard.release().await.unwrap();
        });
        while keeper.inspect().unwrap().show("gpu").await.unwrap()[0].waiters.len() != i + 1 {
            tokio::task::yield_now().await;
        }
    }
    let before = faults.asked(Op::Attempt);
    sleep(secs(60)).await;
    let attempts = faults.asked(Op::Attempt) - before;
    assert!(attempts < 60 * 4 * 8, "{attempts} attempts in a minute: several waiters poll");
    drop(both);
    for i in 0..10 {
        assert_eq!(order.recv().await.unwrap(), i);
    }
    keeper.close().await;
    while !keeper.inspect().unwrap().list("").await.unwrap().is_empty() {
        sleep(millis(10)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn requests_for_several_slots_do_not_deadlock() {
    let keeper = slots(&Memory::new());
    let gpus = keeper.semaphore("gpu", 5);
    let tasks: Vec<_> = (0..20)
        .map(|i| {
            let gpus = gpus.clone();
            tokio::spawn(async move {
                let guard = gpus.acquire_many(i % 5 + 1).await.unwrap();
                sleep(millis(100)).await;
                guard.release().await.unwrap()
            })
        })
        .collect();
    for task in tasks {
        assert_eq!(task.await.unwrap(), ReleaseOutcome::Released);
    }
    assert!(keeper.inspect().unwrap().list("").await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn breaking_one_slot_loses_the_whole_hold() {
    let keeper = slots(&Memory::new());
    let guard = keeper.semaphore("gpu", 3).acquire_many(2).await.unwrap();
    sleep(secs(1)).await;
    assert_eq!(keeper.inspect().unwrap().break_lock("gpu").await.unwrap(), 1);
    guard.lost().await;
    assert_eq!(keeper.semaphore("gpu", 3).available().await.unwrap(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_ticket_for_slots_can_be_adopted() {
    let keeper = slots(&Memory::new());
    let gpus = keeper.semaphore("gpu", 3);
    let ticket = gpus.acquire_many(2).await.unwrap().detach().unwrap();
    let guard = keeper.adopt(ticket).await.unwrap();
    sleep(secs(100)).await;
    assert!(guard.is_held());
    assert_eq!(gpus.available().await.unwrap(), 1);
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    assert_eq!(gpus.available().await.unwrap(), 3);
}

/// Returns the keepers of two processes on one store, and the faults that count their requests.
fn two_processes() -> [(Keeper, Faults); 2] {
    let store = Memory::new();
    [(); 2].map(|()| {
        let (counted, faults) = Faulty::new(WithoutPermits(store.clone()));
        (Keeper::new(Slots::new(Arc::new(counted))), faults)
    })
}

#[tokio::test(start_paused = true)]
async fn the_number_of_requests_per_permit_is_independent_of_held_permits() {
    const PERMITS: u32 = 512;
    let [(keeper, faults), _] = two_processes();
    let semaphore = keeper.semaphore("gpu", PERMITS);
    let mut held = Vec::new();
    for i in 0..PERMITS {
        let before = faults.asked(Op::Attempt);
        held.push(semaphore.acquire().await.unwrap());
        let attempts = faults.asked(Op::Attempt) - before;
        assert!(attempts <= 2, "{attempts} attempts with {i} permits held: the gate and one slot");
    }
    let before = faults.asked(Op::Attempt);
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    assert_eq!(faults.asked(Op::Attempt), before, "the process knows that it holds all slots");
    held.pop().unwrap().release().await.unwrap();
    let before = faults.asked(Op::Attempt);
    let _one = semaphore.try_acquire().await.unwrap().expect("one is free");
    assert_eq!(faults.asked(Op::Attempt) - before, 1, "the slot that was released");
}

#[tokio::test(start_paused = true)]
async fn a_slot_held_by_another_process_is_attempted_once_and_not_per_permit() {
    const PERMITS: u32 = 512;
    let [(one, _), (other, faults)] = two_processes();
    let mut held = Vec::new();
    for _ in 0..PERMITS / 2 {
        held.push(one.semaphore("gpu", PERMITS).try_acquire().await.unwrap().unwrap());
    }
    for _ in 0..PERMITS / 2 {
        held.push(other.semaphore("gpu", PERMITS).try_acquire().await.unwrap().unwrap());
    }
    let attempts = faults.asked(Op::Attempt);
    assert!(attempts <= PERMITS as usize, "{attempts} attempts for {} permits", PERMITS / 2);
}

/// A process only has hints about the slots of other processes; the store decides.
#[tokio::test(start_paused = true)]
async fn a_try_is_refused_only_if_no_permit_is_free() {
    const PERMITS: u32 = 16;
    let [(one, _), (other, _)] = two_processes();
    let mut held = Vec::new();
    for _ in 0..PERMITS {
        held.push(one.semaphore("gpu", PERMITS).try_acquire().await.unwrap().unwrap());
    }
    let semaphore = other.semaphore("gpu", PERMITS);
    for _ in 0..PERMITS {
        assert!(semaphore.try_acquire().await.unwrap().is_none());
        held.remove(0).release().await.unwrap();
        let found = semaphore.try_acquire().await.unwrap().expect("one is free");
        assert!(semaphore.try_acquire().await.unwrap().is_none());
        found.release().await.unwrap();
        held.push(one.semaphore("gpu", PERMITS).acquire().await.unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_notified_of_a_slot_released_by_its_own_process() {
    let [(keeper, _), _] = two_processes();
    let semaphore = keeper.semaphore("gpu", 4);
    let all = semaphore.acquire_many(4).await.unwrap();
    let waiter = tokio::spawn(async move { semaphore.acquire().await.unwrap() });
    sleep(secs(1)).await;
    let start = Instant::now();
    all.release().await.unwrap();
    let _permit = waiter.await.unwrap();
    assert!(start.elapsed() <= millis(5), "found by polling after {:?}", start.elapsed());
}
