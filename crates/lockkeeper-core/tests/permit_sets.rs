//! Simultaneous tries for several permits, on a store whose semaphores are built from slots.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{WithoutPermits, millis, poll_once};
use lockkeeper_core::{
    Backend as _, Background, ClaimSpec, ErrorKind, Guard, Inspector, Keeper, Memory, Name, Slots,
};
use lockkeeper_testkit::{Fault, Faults, Faulty, Op};

/// Returns the keepers of processes that share a store, and the faults that count their requests.
fn processes(store: &Memory, count: usize) -> Vec<(Keeper, Faults)> {
    let process = |_| {
        let (node, faults) = Faulty::new(WithoutPermits(store.clone()));
        // A release must not overtake the attempts of other processes that are in flight.
        faults.always(Op::Release, Fault::SlowRequest(millis(1)));
        (Keeper::new(Slots::new(Arc::new(node))), faults)
    };
    (0..count).map(process).collect()
}

/// Delays the attempts on the slots, which are sent in the order of their numbers.
fn delay(faults: &Faults, delays: &[u64]) {
    for delay in delays {
        faults.once(Op::Attempt, Fault::SlowRequest(millis(*delay)));
    }
}

async fn assert_empty(store: &Memory, keepers: &[(Keeper, Faults)]) {
    for (keeper, _) in keepers {
        keeper.close().await;
    }
    assert_eq!(store.list("").await.unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn exactly_one_of_two_tries_that_each_get_one_slot_first_succeeds() {
    let store = Memory::new();
    let processes = processes(&store, 2);
    for round in 0..100 {
        let tries = processes.iter().zip([[0, 5], [5, 0]]).map(|((keeper, faults), delays)| {
            delay(faults, &delays);
            let semaphore = keeper.semaphore(format!("gpu{round}"), 2);
            tokio::spawn(async move { semaphore.try_acquire_many(2).await.unwrap() })
        });
        let mut got = Vec::new();
        for one in tries.collect::<Vec<_>>() {
            got.extend(one.await.unwrap());
        }
        assert_eq!(got.len(), 1, "round {round}");
        got.remove(0).release().await.unwrap();
    }
    assert_empty(&store, &processes).await;
}

/// Tries of one process know which slots the other requests.
#[tokio::test(start_paused = true)]
async fn exactly_one_of_two_tries_of_one_process_succeeds() {
    let store = Memory::new();
    let processes = processes(&store, 2);
    let [(other, _), (keeper, faults)] = &processes[..] else { unreachable!() };
    faults.always(Op::Attempt, Fault::SlowRequest(millis(1)));
    for round in 0..100 {
        let name = format!("gpu{round}");
        let _third = other.semaphore(name.clone(), 3).try_acquire().await.unwrap().unwrap();
        let semaphore = keeper.semaphore(name, 3);
        let (one, two) = tokio::join!(semaphore.try_acquire_many(2), semaphore.try_acquire_many(2));
        let got: Vec<Guard> = [one.unwrap(), two.unwrap()].into_iter().flatten().collect();
        assert_eq!(got.len(), 1, "round {round}");
    }
    assert_empty(&store, &processes).await;
}

#[tokio::test(start_paused = true)]
async fn exactly_one_of_several_tries_of_random_size_and_latency_succeeds() {
    const PERMITS: u32 = 5;
    let store = Memory::new();
    let processes = processes(&store, 4);
    for round in 0..200 {
        let tries = processes.iter().map(|(keeper, faults)| {
            for _ in 0..20 {
                delay(faults, &[fastrand::u64(..5)]);
            }
            let take = fastrand::u32(3..=PERMITS);
            let (semaphore, after) =
                (keeper.semaphore(format!("gpu{round}"), PERMITS), millis(fastrand::u64(..5)));
            tokio::spawn(async move {
                tokio::time::sleep(after).await;
                semaphore.try_acquire_many(take).await.unwrap()
            })
        });
        let mut got = Vec::new();
        for one in tries.collect::<Vec<_>>() {
            got.extend(one.await.unwrap());
        }
        assert_eq!(got.len(), 1, "round {round}: any two tries exceed the permits");
        got.remove(0).release().await.unwrap();
    }
    assert_empty(&store, &processes).await;
}

#[tokio::test(start_paused = true)]
async fn a_try_for_more_permits_than_are_free_is_refused_without_delay() {
    let store = Memory::new();
    let processes = processes(&store, 2);
    let [(one, _), (two, faults)] = &processes[..] else { unreachable!() };
    let held = one.semaphore("gpu", 2).try_acquire().await.unwrap().unwrap();
    let start = tokio::time::Instant::now();
    assert!(two.semaphore("gpu", 2).try_acquire_many(2).await.unwrap().is_none());
    assert!(start.elapsed() <= millis(20), "{:?}", start.elapsed());
    let attempts = faults.asked(Op::Attempt);
    assert!(attempts <= 5, "{attempts} attempts: both slots twice, and the turn");
    // The try has released its slot when it returns.
    assert!(one.semaphore("gpu", 2).try_acquire().await.unwrap().is_some());
    held.release().await.unwrap();
    assert_empty(&store, &processes).await;
}

#[tokio::test(start_paused = true)]
async fn a_try_for_free_permits_costs_one_request_per_slot() {
    let store = Memory::new();
    let processes = processes(&store, 1);
    let (keeper, faults) = &processes[0];
    let set = keeper.semaphore("gpu", 8).try_acquire_many(3).await.unwrap().unwrap();
    assert_eq!(faults.asked(Op::Attempt), 3);
    set.release().await.unwrap();
    assert_eq!(faults.asked(Op::Release), 3);
    assert_empty(&store, &processes).await;
}

#[tokio::test(start_paused = true)]
async fn the_turn_of_a_try_is_shown_neither_as_a_holder_nor_as_a_waiter() {
    let store = Memory::new();
    let processes = processes(&store, 1);
    let keeper = &processes[0].0;
    let background = Background::new(tokio::runtime::Handle::current());
    let turn = Name::derived("gpu\0turn".to_owned());
    let mut turn = store.claim(ClaimSpec::new(turn, millis(600), background)).unwrap();
    turn.attempt(None).await.unwrap();
    let inspect = keeper.inspect().unwrap();
    assert_eq!(inspect.list("").await.unwrap(), []);
    assert_eq!(inspect.show("gpu").await.unwrap(), []);
    // While another claim holds the turn, a try for both permits is undecided. A try for one free permit succeeds.
    let semaphore = keeper.semaphore("gpu", 2).ttl(millis(900));
    let one = semaphore.try_acquire().await.unwrap().unwrap();
    let error = semaphore.try_acquire_many(2).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Undecided, "{error}");
    one.release().await.unwrap();
    semaphore.try_acquire_many(2).await.unwrap().unwrap().release().await.unwrap();
}

/// Returns two processes. The first holds one of two permits, so a try of the second for both gets one and needs a
/// second round.
async fn half_taken(store: &Memory) -> (Vec<(Keeper, Faults)>, Guard) {
    let processes = processes(store, 2);
    let held = processes[0].0.semaphore("gpu", 2).try_acquire().await.unwrap().unwrap();
    (processes, held)
}

/// Asserts that only the slot of the other process is held.
async fn assert_only_one_left(store: &Memory, keeper: &Keeper, what: &str) {
    keeper.close().await;
    let left = store.list("").await.unwrap();
    assert_eq!(left.len(), 1, "{what}: {left:?}");
    assert!(left[0].name.contains("slot"), "{what}: {left:?}");
}

/// Dropped after each number of polls.
#[tokio::test(start_paused = true)]
async fn a_try_cancelled_during_its_second_round_leaves_no_state() {
    for polls in 0..60 {
        let store = Memory::new();
        let (processes, _held) = half_taken(&store).await;
        let (keeper, faults) = &processes[1];
        faults.always(Op::Attempt, Fault::SlowAnswer(millis(2)));
        let semaphore = keeper.semaphore("gpu", 2);
        let mut attempt = Box::pin(semaphore.try_acquire_many(2));
        for _ in 0..polls {
            if poll_once(attempt.as_mut()).await.is_ready() {
                break;
            }
            tokio::time::sleep(Duration::from_micros(300)).await;
        }
        drop(attempt);
        assert_only_one_left(&store, keeper, &format!("{polls} polls")).await;
    }
}

/// Injects each fault into each request: the slots, the turn, and the slots again.
#[tokio::test(start_paused = true)]
async fn a_try_whose_second_round_fails_leaves_no_state() {
    for fault in [Fault::Refused, Fault::LostAnswer, Fault::NoAnswer, Fault::Hangs] {
        for (op, number) in (0..6).flat_map(|number| [(Op::Attempt, number), (Op::Release, number)])
        {
            let store = Memory::new();
            let (processes, _held) = half_taken(&store).await;
            let (keeper, faults) = &processes[1];
            for _ in 0..number {
                faults.once(op, Fault::SlowRequest(millis(1)));
            }
            faults.once(op, fault);
            let got = keeper.semaphore("gpu", 2).try_acquire_many(2).await;
            assert!(!matches!(got, Ok(Some(_))), "only one permit is free");
            let what = format!("{fault:?} of {op:?} {number}");
            assert_only_one_left(&store, keeper, &what).await;
        }
    }
}
