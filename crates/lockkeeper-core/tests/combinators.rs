//! Prefixed, Slots and Quorum, over memory stores.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Forgetful, Uncounting, millis, secs};
use lockkeeper_core::{
    Backend, Background, ClaimSpec, ErrorKind, Fence, Fences, Keeper, Kind, Memory, Name, Prefixed,
    Quorum, ReleaseOutcome, Slots, State,
};
use lockkeeper_testkit::{Fault, Faults, Faulty, Op};
use tokio::time::{Instant, sleep};

// Prefixed.

#[tokio::test(start_paused = true)]
async fn prefixes_are_independent_and_the_whole_store_lists_them_all() {
    let store = Arc::new(Memory::new());
    let whole = Keeper::from_backend(store.clone());
    let red = Keeper::new(Prefixed::new(store.clone(), "red").unwrap());
    let blue = Keeper::new(Prefixed::new(store.clone(), "blue").unwrap());
    let _red = red.mutex("a/b").lock().await.unwrap();
    let _blue = blue.mutex("a/b").lock().await.unwrap();
    assert!(red.mutex("a/b").try_lock().await.unwrap().is_none());
    let names = async |keeper: &Keeper| -> Vec<String> {
        let listed = keeper.inspect().unwrap().list("").await.unwrap();
        listed.iter().map(|info| info.name.to_string()).collect()
    };
    assert_eq!(names(&whole).await, ["blue/a/b", "red/a/b"]);
    assert_eq!(names(&red).await, ["a/b"]);
    assert_eq!(red.inspect().unwrap().show("a/b").await.unwrap().len(), 1);
    assert_eq!(red.inspect().unwrap().break_lock("a/b").await.unwrap(), 1);
    assert_eq!(names(&whole).await, ["blue/a/b"]);
    let longest = red.mutex("x".repeat(1024)).lock().await.unwrap();
    assert_eq!(longest.name().len(), 1024, "a prefix takes nothing from a name");
}

#[test]
fn a_prefix_that_could_collide_with_another_is_refused() {
    let store: Arc<dyn Backend> = Arc::new(Memory::new());
    for bad in ["", "a/b", "/", "a\0", &"x".repeat(257)] {
        let error = Prefixed::new(store.clone(), bad).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{bad:?}");
    }
}

// Slots.

fn slots() -> Keeper {
    Keeper::new(Slots::new(Arc::new(Uncounting::default())))
}

#[tokio::test(start_paused = true)]
async fn a_semaphore_of_slots_grants_as_many_permits_as_it_has() {
    let keeper = slots();
    let gpus = keeper.semaphore("gpu", 4);
    let _mutex = keeper.mutex("gpu").lock().await.unwrap();
    let three = gpus.acquire_many(3).await.unwrap();
    assert_eq!(gpus.available().await.unwrap(), 1);
    assert!(gpus.try_acquire_many(2).await.unwrap().is_none());
    assert_eq!(gpus.available().await.unwrap(), 1, "a failed try leaves nothing");
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
    let (store, faults) = Faulty::new(Uncounting::default());
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
    let asked = faults.asked(Op::Attempt) - before;
    assert!(asked < 60 * 4 * 8, "{asked} questions in a minute: everybody looks");
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
    let keeper = slots();
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
async fn a_broken_slot_loses_all_of_the_hold() {
    let keeper = slots();
    let guard = keeper.semaphore("gpu", 3).acquire_many(2).await.unwrap();
    sleep(secs(1)).await;
    assert_eq!(keeper.inspect().unwrap().break_lock("gpu").await.unwrap(), 1);
    guard.lost().await;
    assert_eq!(keeper.semaphore("gpu", 3).available().await.unwrap(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_ticket_for_slots_can_be_adopted() {
    let keeper = slots();
    let gpus = keeper.semaphore("gpu", 3);
    let ticket = gpus.acquire_many(2).await.unwrap().detach().unwrap();
    let guard = keeper.adopt(ticket).await.unwrap();
    sleep(secs(100)).await;
    assert!(guard.is_held());
    assert_eq!(gpus.available().await.unwrap(), 1);
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    assert_eq!(gpus.available().await.unwrap(), 3);
}

/// Stores of two processes, and how often each asks what they share.
fn two_processes() -> [(Keeper, Faults); 2] {
    let store = Memory::new();
    [(); 2].map(|()| {
        let (counted, faults) = Faulty::new(Uncounting(store.clone()));
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
        let asked = faults.asked(Op::Attempt) - before;
        assert!(asked <= 2, "{asked} questions with {i} permits held: the gate and one slot");
    }
    let before = faults.asked(Op::Attempt);
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    assert_eq!(faults.asked(Op::Attempt), before, "it is known who holds them all");
    held.pop().unwrap().release().await.unwrap();
    let before = faults.asked(Op::Attempt);
    let _one = semaphore.try_acquire().await.unwrap().expect("one is free");
    assert_eq!(faults.asked(Op::Attempt) - before, 1, "the one that was given back");
}

#[tokio::test(start_paused = true)]
async fn permits_of_other_processes_are_requested_once_and_not_per_permit() {
    const PERMITS: u32 = 512;
    let [(one, _), (other, faults)] = two_processes();
    let mut held = Vec::new();
    for _ in 0..PERMITS / 2 {
        held.push(one.semaphore("gpu", PERMITS).try_acquire().await.unwrap().unwrap());
    }
    for _ in 0..PERMITS / 2 {
        held.push(other.semaphore("gpu", PERMITS).try_acquire().await.unwrap().unwrap());
    }
    let asked = faults.asked(Op::Attempt);
    assert!(asked <= PERMITS as usize, "{asked} questions for {} permits", PERMITS / 2);
}

/// What a process knows of slots is a hint: the store has the last word.
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
    assert!(start.elapsed() <= millis(5), "found by a look after {:?}", start.elapsed());
}

// Quorum.

struct Five {
    keeper: Keeper,
    memories: Vec<Memory>,
    faults: Vec<Faults>,
}

fn five() -> Five {
    let memories: Vec<Memory> = (0..5).map(|_| Memory::new()).collect();
    let mut faults = Vec::new();
    let nodes = memories.iter().map(|memory| {
        let (node, fault) = Faulty::new(memory.clone());
        faults.push(fault);
        Arc::new(node) as Arc<dyn Backend>
    });
    let keeper = Keeper::new(Quorum::new(nodes.collect::<Vec<_>>()).unwrap());
    Five { keeper, memories, faults }
}

impl Five {
    /// How many nodes have something.
    async fn left(&self) -> usize {
        let mut left = 0;
        for memory in &self.memories {
            let keeper = Keeper::new(memory.clone());
            left += keeper.inspect().unwrap().list("").await.unwrap().len();
        }
        left
    }
}

#[tokio::test(start_paused = true)]
async fn a_quorum_lock_excludes_and_leaves_nothing_on_any_node() {
    let five = five();
    let mutex = five.keeper.mutex("a");
    for _ in 0..200 {
        let guard = mutex.lock().await.unwrap();
        assert!(mutex.try_lock().await.unwrap().is_none());
        assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    }
    five.keeper.close().await;
    assert_eq!(five.left().await, 0);
}

#[tokio::test(start_paused = true)]
async fn two_nodes_that_hang_or_are_down_cost_nothing() {
    for fault in [Fault::Hangs, Fault::Refused, Fault::NoAnswer, Fault::LostAnswer] {
        let five = five();
        five.faults[0].everything(fault);
        five.faults[3].everything(fault);
        let start = Instant::now();
        let guard = five.keeper.mutex("a").lock().await.unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO, "{fault:?}");
        sleep(secs(300)).await;
        assert_eq!(guard.state(), State::Held, "{fault:?}");
        let start = Instant::now();
        assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released, "{fault:?}");
        assert_eq!(start.elapsed(), Duration::ZERO, "{fault:?}");
        for faults in &five.faults {
            faults.none();
        }
        five.keeper.close().await;
        assert_eq!(five.left().await, 0, "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_contended_lock_is_contended_also_while_two_nodes_are_down() {
    for fault in [Fault::Hangs, Fault::Refused] {
        let five = five();
        let guard = five.keeper.mutex("a").lock().await.unwrap();
        while five.left().await < 5 {
            sleep(millis(1)).await;
        }
        five.faults[0].everything(fault);
        five.faults[1].everything(fault);
        let start = Instant::now();
        assert!(five.keeper.mutex("a").try_lock().await.unwrap().is_none(), "{fault:?}");
        assert_eq!(start.elapsed(), Duration::ZERO, "{fault:?}");
        guard.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn three_nodes_down_are_unavailable_and_grants_of_the_others_are_released() {
    for fault in [Fault::Hangs, Fault::Refused, Fault::NoAnswer, Fault::LostAnswer] {
        let five = five();
        for i in [0, 2, 4] {
            five.faults[i].always(Op::Attempt, fault);
        }
        let start = Instant::now();
        let error = five.keeper.mutex("a").try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{fault:?}");
        assert!(error.to_string().contains("only 2 of 5 nodes"), "{error}");
        assert!(start.elapsed() <= millis(502), "{fault:?}: {:?}", start.elapsed());
        five.keeper.close().await;
        assert_eq!(five.left().await, 0, "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_try_without_a_majority_releases_its_grants() {
    let five = five();
    // Two other owners hold two nodes each: there is no majority.
    let mut others = Vec::new();
    for memory in &five.memories[..4] {
        others.push(Keeper::new(memory.clone()).mutex("a").lock().await.unwrap());
    }
    let error = five.keeper.mutex("a").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Undecided, "{error}");
    assert_eq!(five.left().await, 4, "the fifth node is free again");
    five.keeper.close().await;
    assert_eq!(five.left().await, 4);
    drop(others);
}

#[tokio::test(start_paused = true)]
async fn a_late_grant_of_a_slow_node_is_released_too() {
    let five = five();
    five.faults[1].always(Op::Attempt, Fault::SlowRequest(millis(200)));
    let guard = five.keeper.mutex("a").lock().await.unwrap();
    guard.release().await.unwrap();
    five.keeper.close().await;
    sleep(millis(300)).await;
    assert_eq!(five.left().await, 0);
}

#[tokio::test(start_paused = true)]
async fn quorum_validity_counts_from_before_the_first_request() {
    let five = five();
    for faults in &five.faults {
        faults.once(Op::Attempt, Fault::SlowAnswer(millis(400)));
    }
    let guard = five.keeper.mutex("a").lock().await.unwrap();
    let left = guard.remaining().unwrap();
    assert!(left <= millis(30_000 - 302 - 400), "{left:?}");
    for faults in &five.faults {
        faults.once(Op::Attempt, Fault::SlowAnswer(millis(400)));
    }
    let error = five.keeper.mutex("b").ttl(millis(401)).try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "a grant with none left is no grant");
    five.keeper.close().await;
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn renewal_needs_a_true_majority_and_a_failed_one_releases_nothing() {
    let five = five();
    let guard = five.keeper.mutex("a").lock().await.unwrap();
    for i in [0, 1, 2] {
        five.faults[i].always(Op::Renew, Fault::Refused);
    }
    sleep(secs(12)).await;
    assert_eq!(guard.state(), State::AtRisk);
    assert_eq!(five.left().await, 5, "nothing was released");
    assert_eq!(guard.extend(secs(60)).await.unwrap_err().kind(), ErrorKind::Unavailable);
    five.faults[1].none();
    sleep(secs(5)).await;
    assert_eq!(guard.state(), State::Held);
    five.faults[1].always(Op::Renew, Fault::Hangs);
    guard.lost().await;
}

#[tokio::test(start_paused = true)]
async fn a_renewal_does_not_cancel_an_attempt_in_flight() {
    let five = five();
    // Two nodes hear of us only after the others have granted, and after the first renewal.
    for faults in &five.faults[3..] {
        faults.once(Op::Attempt, Fault::SlowRequest(millis(100)));
    }
    let guard = five.keeper.mutex("a").lock().await.unwrap();
    guard.extend(secs(30)).await.unwrap();
    five.faults[0].everything(Fault::Refused);
    five.faults[1].everything(Fault::Refused);
    sleep(secs(300)).await;
    assert_eq!(guard.state(), State::Held, "three nodes are well");
}

#[tokio::test(start_paused = true)]
async fn a_quorum_survives_the_data_loss_of_two_nodes_and_not_of_three() {
    let nodes: Vec<Forgetful> = (0..5).map(|_| Forgetful::default()).collect();
    let backends = nodes.iter().map(|node| Arc::new(node.clone()) as Arc<dyn Backend>);
    let keeper = Keeper::new(Quorum::new(backends).unwrap());
    let guard = keeper.mutex("a").lock().await.unwrap();
    nodes[0].forget();
    nodes[1].forget();
    sleep(secs(100)).await;
    assert_eq!(guard.state(), State::Held);
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
    nodes[2].forget();
    tokio::time::timeout(secs(11), guard.lost()).await.expect("told by the next renewal");
}

#[tokio::test(start_paused = true)]
async fn fences_rise_whichever_majority_gives_them() {
    let five = five();
    let mut last = None;
    // The nodes' own counters are far apart.
    for (i, memory) in five.memories.iter().enumerate() {
        let keeper = Keeper::new(memory.clone());
        for _ in 0..i * 100 {
            keeper.mutex("warm-up").lock().await.unwrap().release().await.unwrap();
        }
    }
    for round in 0..50_usize {
        for (i, faults) in five.faults.iter().enumerate() {
            faults.none();
            // Another two are down each time.
            if i == round % 5 || i == (round * 3 + 1) % 5 {
                faults.everything(Fault::Refused);
            }
        }
        // A new keeper remembers no fence: it must come from the nodes.
        let nodes = five.memories.iter().zip(&five.faults).enumerate().map(|(i, (memory, _))| {
            let (node, faults) = Faulty::new(memory.clone());
            if i == round % 5 || i == (round * 3 + 1) % 5 {
                faults.everything(Fault::Refused);
            }
            Arc::new(node) as Arc<dyn Backend>
        });
        let keeper = Keeper::new(Quorum::new(nodes.collect::<Vec<_>>()).unwrap());
        let guard = keeper.mutex("a").lock().await.unwrap();
        assert!(guard.fence() > last, "round {round}: {:?} after {last:?}", guard.fence());
        last = guard.fence();
        guard.release().await.unwrap();
        // The two that are down still have nothing: they were not granted.
    }
}

/// Three nodes are another's, so the try got two.
#[tokio::test(start_paused = true)]
async fn a_failed_try_of_a_quorum_has_released_its_grants() {
    let five = five();
    let background = Background::new(tokio::runtime::Handle::current());
    let other = ClaimSpec::new(Name::new("a").unwrap(), secs(30), background);
    for memory in &five.memories[2..] {
        memory.claim(other.clone()).unwrap().attempt(None).await.unwrap();
    }
    for faults in &five.faults {
        faults.always(Op::Release, Fault::SlowRequest(millis(20)));
    }
    let start = Instant::now();
    assert!(five.keeper.mutex("a").try_lock().await.unwrap().is_none());
    assert_eq!(five.left().await, 3, "what the try got is still there");
    // A node that does not answer holds up the answer for a moment only.
    for faults in &five.faults[..2] {
        faults.always(Op::Release, Fault::Hangs);
    }
    assert!(five.keeper.mutex("a").try_lock().await.unwrap().is_none());
    assert!(start.elapsed() <= millis(150), "{:?}", start.elapsed());
}

/// Its clock was set wrong, or its data tampered with: the others refuse its fences, and go on without it.
#[tokio::test(start_paused = true)]
async fn a_node_whose_fences_are_implausible_is_outvoted() {
    let five = five();
    let far = Fence::new(1 << 62).unwrap();
    let spec = || {
        let background = Background::new(tokio::runtime::Handle::current());
        ClaimSpec::new(Name::new("a").unwrap(), secs(30), background)
    };
    let mut claim = five.memories[0].claim(spec()).unwrap();
    claim.attempt(Some(far)).await.unwrap();
    claim.release().await.unwrap();
    let mut last = None;
    for round in 0..10 {
        let guard = five.keeper.mutex("a").lock().await.unwrap();
        assert!(guard.fence() > last, "round {round}: {:?} after {last:?}", guard.fence());
        assert!(guard.fence() < Some(far), "round {round}");
        last = guard.fence();
        guard.release().await.unwrap();
    }
    // If a majority cannot be had without it, the error says why. (The last release may still be under way.)
    sleep(secs(1)).await;
    for faults in &five.faults[3..] {
        faults.everything(Fault::Refused);
    }
    let error = five.keeper.mutex("a").lock().await.unwrap_err();
    assert!(error.to_string().contains(&(far.get() + 1).to_string()[..6]), "{error}");
    five.keeper.close().await;
    assert_eq!(five.left().await, 0);
}

#[tokio::test(start_paused = true)]
async fn without_a_majority_for_the_fence_there_is_no_grant() {
    let five = five();
    // Each node grants, but the one with the highest fence is alone with it.
    let keeper = Keeper::new(five.memories[0].clone());
    for _ in 0..10 {
        keeper.mutex("warm-up").lock().await.unwrap().release().await.unwrap();
    }
    for faults in &five.faults {
        // The first ask is answered, the write-back is not.
        faults.once(Op::Attempt, Fault::SlowAnswer(Duration::ZERO));
        faults.always(Op::Attempt, Fault::Hangs);
    }
    let error = five.keeper.mutex("a").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    five.keeper.close().await;
    assert_eq!(five.left().await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_release_wakes_a_waiter_and_all_contenders_are_served() {
    let five = five();
    let holder = five.keeper.mutex("a").lock().await.unwrap();
    let tasks: Vec<_> = (0..10)
        .map(|_| {
            let mutex = five.keeper.mutex("a");
            tokio::spawn(async move {
                let guard = mutex.lock().await.unwrap();
                let fence = guard.fence().unwrap();
                sleep(millis(20)).await;
                assert!(guard.is_held());
                guard.release().await.unwrap();
                fence
            })
        })
        .collect();
    sleep(secs(5)).await;
    holder.release().await.unwrap();
    let start = Instant::now();
    let mut fences = Vec::new();
    for task in tasks {
        fences.push(task.await.unwrap());
    }
    fences.sort_unstable();
    fences.dedup();
    assert_eq!(fences.len(), 10, "every hold has a fence of its own");
    assert!(start.elapsed() < secs(30), "{:?}", start.elapsed());
    five.keeper.close().await;
    assert_eq!(five.left().await, 0);
}

#[tokio::test(start_paused = true)]
async fn quorum_readers_share_and_a_writer_can_downgrade() {
    let five = five();
    let lock = five.keeper.rw_lock("a");
    let one = lock.read().await.unwrap();
    let two = lock.read().await.unwrap();
    assert!(lock.try_write().await.unwrap().is_none());
    drop((one, two));
    let write = lock.write().await.unwrap();
    assert!(lock.try_read().await.unwrap().is_none());
    write.downgrade().await.unwrap();
    let read = lock.try_read_for(secs(2)).await.unwrap().expect("readers enter");
    assert!(read.fence() >= write.fence());
    assert!(lock.try_write().await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_quorum_has_no_permits_and_needs_three_nodes_with_leases() {
    let five = five();
    let capabilities = five.keeper.capabilities();
    assert!(!capabilities.permits && !capabilities.fair && capabilities.leases);
    assert_eq!(capabilities.fences, Fences::Raisable);
    let error = five.keeper.semaphore("s", 2).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(five.keeper.inspect().unwrap_err().kind(), ErrorKind::Unsupported);
    for count in 0..3 {
        let nodes = (0..count).map(|_| Arc::new(Memory::new()) as Arc<dyn Backend>);
        assert_eq!(Quorum::new(nodes).unwrap_err().kind(), ErrorKind::Config);
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_quorum_acquire_leaves_nothing() {
    for slow in [Fault::SlowRequest(millis(100)), Fault::SlowAnswer(millis(100))] {
        for n in 0..8 {
            let five = five();
            for (i, faults) in five.faults.iter().enumerate() {
                if i % 2 == 0 {
                    faults.always(Op::Attempt, slow);
                }
            }
            let mutex = five.keeper.mutex("a");
            {
                let mut lock = std::pin::pin!(mutex.lock());
                let mut left = n;
                std::future::poll_fn(|cx| {
                    if left == 0 || lock.as_mut().poll(cx).is_ready() {
                        return std::task::Poll::Ready(());
                    }
                    left -= 1;
                    if left == 0 { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
                })
                .await;
            }
            five.keeper.close().await;
            sleep(secs(1)).await;
            assert_eq!(five.left().await, 0, "{slow:?} after {n} polls");
        }
    }
}
