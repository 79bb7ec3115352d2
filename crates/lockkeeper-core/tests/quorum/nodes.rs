//! Grants, renewals and fences on a majority of five nodes.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{
    Backend, ErrorKind, Fence, Fences, Keeper, Memory, Quorum, ReleaseOutcome, State,
};
use lockkeeper_testkit::{Fault, Faults, Faulty, Op};
use tokio::time::{Instant, sleep};

use crate::common::{Forgetful, memories, millis, poll_times, secs, spec};

struct Five {
    keeper: Keeper,
    memories: Vec<Memory>,
    faults: Vec<Faults>,
}

fn five() -> Five {
    let memories = memories(5);
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
    /// Returns the number of locks on all nodes.
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
async fn a_quorum_lock_is_exclusive_and_leaves_no_state_on_any_node() {
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
async fn two_of_five_nodes_that_hang_or_are_down_cause_no_delay() {
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
async fn a_held_lock_is_contended_while_two_of_five_nodes_are_down() {
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
async fn with_three_of_five_nodes_down_an_acquire_fails_and_releases_its_grants() {
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
    // Four other owners hold one node each.
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
async fn a_late_grant_of_a_slow_node_is_released() {
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
    assert_eq!(error.kind(), ErrorKind::Unavailable, "a grant that has run out is not a grant");
    five.keeper.close().await;
    drop(guard);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_needs_a_majority_and_a_failed_renewal_releases_no_node() {
    let five = five();
    let guard = five.keeper.mutex("a").lock().await.unwrap();
    for i in [0, 1, 2] {
        five.faults[i].always(Op::Renew, Fault::Refused);
    }
    sleep(secs(12)).await;
    assert_eq!(guard.state(), State::AtRisk);
    assert_eq!(five.left().await, 5, "no node was released");
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
    // Two nodes receive the attempt after the others have granted and after the first renewal.
    for faults in &five.faults[3..] {
        faults.once(Op::Attempt, Fault::SlowRequest(millis(100)));
    }
    let guard = five.keeper.mutex("a").lock().await.unwrap();
    guard.extend(secs(30)).await.unwrap();
    five.faults[0].everything(Fault::Refused);
    five.faults[1].everything(Fault::Refused);
    sleep(secs(300)).await;
    assert_eq!(guard.state(), State::Held, "three nodes respond");
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
    tokio::time::timeout(secs(11), guard.lost()).await.expect("the next renewal detects it");
}

#[tokio::test(start_paused = true)]
async fn fences_rise_regardless_of_which_majority_grants_them() {
    let five = five();
    let mut last = None;
    // The counters of the nodes differ widely.
    for (i, memory) in five.memories.iter().enumerate() {
        let keeper = Keeper::new(memory.clone());
        for _ in 0..i * 100 {
            keeper.mutex("warm-up").lock().await.unwrap().release().await.unwrap();
        }
    }
    for round in 0..50_usize {
        // A new keeper has no floor, so the fence comes from the nodes.
        let nodes = five.memories.iter().enumerate().map(|(i, memory)| {
            let (node, faults) = Faulty::new(memory.clone());
            // Two different nodes are down in each round.
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
    }
}

/// Another owner holds three nodes, so the try gets two.
#[tokio::test(start_paused = true)]
async fn a_failed_quorum_try_returns_after_its_grants_are_released() {
    let five = five();
    let other = spec("a", secs(30));
    for memory in &five.memories[2..] {
        memory.claim(other.clone()).unwrap().attempt(None).await.unwrap();
    }
    for faults in &five.faults {
        faults.always(Op::Release, Fault::SlowRequest(millis(20)));
    }
    let start = Instant::now();
    assert!(five.keeper.mutex("a").try_lock().await.unwrap().is_none());
    assert_eq!(five.left().await, 3, "the grants of the try are still held");
    // A node that does not respond delays the result only briefly.
    for faults in &five.faults[..2] {
        faults.always(Op::Release, Fault::Hangs);
    }
    assert!(five.keeper.mutex("a").try_lock().await.unwrap().is_none());
    assert!(start.elapsed() <= millis(150), "{:?}", start.elapsed());
}

/// The other nodes reject the fences of a node with a wrong clock or altered data, and decide without it.
#[tokio::test(start_paused = true)]
async fn a_node_whose_fences_are_implausible_is_outvoted() {
    let five = five();
    let far = Fence::new(1 << 62).unwrap();
    let mut claim = five.memories[0].claim(spec("a", secs(30))).unwrap();
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
    // Without that node there is no majority, and the error names the fence. The sleep lets the last release finish.
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
async fn a_fence_that_reaches_no_majority_is_not_granted() {
    let five = five();
    // Each node grants, and only one has the highest fence.
    let keeper = Keeper::new(five.memories[0].clone());
    for _ in 0..10 {
        keeper.mutex("warm-up").lock().await.unwrap().release().await.unwrap();
    }
    for faults in &five.faults {
        // The attempt gets a response, the write-back of the fence does not.
        faults.once(Op::Attempt, Fault::SlowAnswer(Duration::ZERO));
        faults.always(Op::Attempt, Fault::Hangs);
    }
    let error = five.keeper.mutex("a").try_lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    five.keeper.close().await;
    assert_eq!(five.left().await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_quorum_release_wakes_a_waiter_and_all_waiters_are_granted_the_lock() {
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
    assert_eq!(fences.len(), 10, "every hold has a different fence");
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
    let read =
        lock.try_read_for(secs(2)).await.unwrap().expect("a reader beside the downgraded writer");
    assert!(read.fence() >= write.fence());
    assert!(lock.try_write().await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_quorum_has_no_permits_and_needs_three_nodes() {
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
async fn a_dropped_quorum_acquire_leaves_no_state() {
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
                let mut lock = pin!(mutex.lock());
                poll_times(lock.as_mut(), n).await;
            }
            five.keeper.close().await;
            sleep(secs(1)).await;
            assert_eq!(five.left().await, 0, "{slow:?} after {n} polls");
        }
    }
}
