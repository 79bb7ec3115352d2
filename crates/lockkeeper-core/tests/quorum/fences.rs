//! When the fence of a quorum's hold reaches its nodes.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Attempt, Backend, Fence, Keeper, Memory, Quorum, Release};
use lockkeeper_testkit::{Fault, Faults, Faulty, Op};
use tokio::time::Instant;

use crate::common::{millis, secs, spec};

const TTL: Duration = Duration::from_secs(30);

/// Nodes whose clocks are this many milliseconds ahead of the slowest one.
fn nodes(ahead: &[u64]) -> (Quorum, Vec<Faults>) {
    let (mut nodes, mut faults) = (Vec::new(), Vec::new());
    for ahead in ahead {
        let (node, control) = Faulty::forgetting(Memory::new);
        control.clock(Instant::now() - secs(1) - millis(*ahead));
        nodes.push(Arc::new(node) as Arc<dyn Backend>);
        faults.push(control);
    }
    (Quorum::new(nodes).unwrap(), faults)
}

/// Returns the numbers of attempts and releases that each node got for one lock.
async fn requests(quorum: Quorum, faults: &[Faults]) -> Vec<(usize, usize)> {
    let keeper = Keeper::new(quorum).ttl(TTL);
    keeper.mutex("a").lock().await.unwrap().release().await.unwrap();
    keeper.close().await;
    faults.iter().map(|node| (node.asked(Op::Attempt), node.asked(Op::Release))).collect()
}

#[tokio::test(start_paused = true)]
async fn a_lock_and_its_release_are_two_requests_to_each_node_if_clocks_agree() {
    let (quorum, faults) = nodes(&[3, 0, 1, 4, 2]);
    assert_eq!(requests(quorum, &faults).await, [(1, 1); 5]);
    // The last one is a quarter of the TTL behind.
    let (quorum, faults) = nodes(&[7_500, 0, 0]);
    assert_eq!(requests(quorum, &faults).await, [(1, 1); 3]);
}

#[tokio::test(start_paused = true)]
async fn a_fence_that_is_further_ahead_is_written_back_to_a_majority_before_the_grant() {
    let (quorum, faults) = nodes(&[7_501, 0, 0]);
    assert_eq!(requests(quorum, &faults).await, [(1, 1), (2, 1), (1, 1)]);
}

/// A node may have read its clock at the end of the round, and started the lease at the beginning.
#[tokio::test(start_paused = true)]
async fn a_slow_round_leaves_less_room_for_a_difference_of_clocks() {
    let (quorum, faults) = nodes(&[7_200, 0, 0]);
    for node in &faults {
        node.once(Op::Attempt, Fault::SlowAnswer(millis(400)));
    }
    assert_eq!(requests(quorum, &faults).await, [(1, 1), (2, 1), (1, 1)]);
}

/// A node that grants a fence ahead of its clock would grant the next one above its own fence only.
#[tokio::test(start_paused = true)]
async fn a_fence_is_written_back_to_a_node_whose_own_fence_is_ahead_of_its_clock() {
    let (quorum, faults) = nodes(&[20_000, 0, 0]);
    let (one, two) = (Keeper::new(quorum.clone()).ttl(TTL), Keeper::new(quorum).ttl(TTL));
    one.mutex("a").lock().await.unwrap().release().await.unwrap();
    tokio::time::sleep(millis(10)).await;
    let before = faults[1].asked(Op::Attempt);
    let guard = two.mutex("a").lock().await.unwrap();
    assert_eq!(faults[1].asked(Op::Attempt) - before, 2);
    drop(guard);
}

async fn fence(claim: &mut dyn lockkeeper_core::Claim) -> Fence {
    match claim.attempt(None).await.unwrap() {
        Attempt::Granted(grant) => grant.fence.unwrap(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_repeated_attempt_has_no_lower_fence_although_the_node_that_drew_it_is_down() {
    let (quorum, faults) = nodes(&[5_000, 0, 0]);
    let mut claim = quorum.claim(spec("a", TTL)).unwrap();
    let first = fence(&mut *claim).await;
    faults[0].everything(Fault::Refused);
    assert_eq!(fence(&mut *claim).await, first);
    assert_eq!(claim.release().await.unwrap(), Release::Released);
    // The others know it from the release.
    let mut next = quorum.claim(spec("a", TTL)).unwrap();
    assert!(fence(&mut *next).await > first);
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_not_made_shorter_than_the_fence_is_ahead() {
    let (quorum, faults) = nodes(&[5_000, 0, 0]);
    let keeper = || Keeper::new(quorum.clone()).ttl(TTL);
    let guard = keeper().mutex("a").lock().await.unwrap();
    let first = guard.fence();
    guard.extend(secs(1)).await.unwrap();
    assert!(guard.remaining().unwrap() <= secs(1));
    // The client crashes, and the node that drew the fence is down.
    drop(guard.detach());
    faults[0].everything(Fault::Refused);
    let start = Instant::now();
    let next = keeper().mutex("a").lock().await.unwrap();
    assert!(next.fence() > first, "{:?} after {first:?}", next.fence());
    assert!(start.elapsed() > secs(5) && start.elapsed() < secs(12), "{:?}", start.elapsed());
}
