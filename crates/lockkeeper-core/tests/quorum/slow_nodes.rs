//! A quorum whose nodes respond late, hang or lose a hold.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Error, ErrorKind, Fence,
    Inspector, Keeper, Memory, Name, Quorum, Release, ReleaseOutcome, Renewal, Result,
};
use lockkeeper_testkit::{Fault, Faults, Faulty, Op};
use tokio::time::{Instant, sleep, timeout};

use crate::common::{memories, millis, secs};

fn quorum(stores: &[Memory]) -> Keeper {
    let nodes = stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn Backend>);
    Keeper::new(Quorum::new(nodes).unwrap())
}

fn faulty_nodes(stores: &[Memory]) -> (Vec<Arc<dyn Backend>>, Vec<Faults>) {
    let nodes = stores.iter().map(|store| {
        let (node, faults) = Faulty::new(store.clone());
        (Arc::new(node) as Arc<dyn Backend>, faults)
    });
    nodes.unzip()
}

/// A store behind a network: a request arrives even if its sender no longer waits for the response.
#[derive(Debug, Clone, Default)]
struct Net {
    store: Memory,
    delays: Arc<Mutex<VecDeque<(Op, Duration)>>>,
    down: Arc<AtomicBool>,
}

impl Net {
    fn to(store: &Memory) -> Self {
        Self { store: store.clone(), ..Self::default() }
    }

    /// Returns the delay of the next request.
    fn delay(&self, op: Op) -> Duration {
        let mut delays = self.delays.lock().unwrap();
        let next = delays.front().is_some_and(|(next, _)| *next == op);
        if next { delays.pop_front().unwrap().1 } else { Duration::ZERO }
    }
}

impl Backend for Net {
    fn name(&self) -> &'static str {
        "net"
    }

    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        let claim = Arc::new(tokio::sync::Mutex::new(self.store.claim(spec)?));
        Ok(Box::new(NetClaim { net: self.clone(), claim, fence: None }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.store.inspector()
    }
}

struct NetClaim {
    net: Net,
    fence: Option<Fence>,
    claim: Arc<tokio::sync::Mutex<Box<dyn Claim>>>,
}

impl NetClaim {
    fn send<T: Send + 'static>(
        &self,
        op: Op,
        request: impl for<'a> FnOnce(&'a mut dyn Claim) -> BoxFuture<'a, Result<T>> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        if self.net.down.load(Ordering::SeqCst) {
            return Box::pin(async { Err(Error::new(ErrorKind::Unavailable, "down")) });
        }
        let (delay, claim) = (self.net.delay(op), self.claim.clone());
        Box::pin(async move {
            let sent = tokio::spawn(async move {
                sleep(delay).await;
                let mut claim = claim.lock().await;
                request(&mut **claim).await
            });
            sent.await.unwrap()
        })
    }
}

impl Claim for NetClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        self.send(Op::Attempt, move |claim| claim.attempt(floor))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(std::future::pending())
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        self.send(Op::Renew, move |claim| claim.renew(ttl))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        let fence = self.fence;
        self.send(Op::Downgrade, move |claim| {
            if let Some(fence) = fence {
                claim.set_fence(fence);
            }
            claim.downgrade(ttl)
        })
    }

    fn set_fence(&mut self, fence: Fence) {
        self.fence = Some(fence);
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        let fence = self.fence;
        self.send(Op::Release, move |claim| {
            if let Some(fence) = fence {
                claim.set_fence(fence);
            }
            claim.release()
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_release_does_not_free_the_grant_of_the_next_attempt() {
    let stores = memories(3);
    let (down, slow) = (Net::to(&stores[1]), Net::to(&stores[2]));
    let nodes: [Arc<dyn Backend>; 3] =
        [Arc::new(stores[0].clone()), Arc::new(down.clone()), Arc::new(slow.clone())];
    let (one, two) = (Keeper::new(Quorum::new(nodes).unwrap()), quorum(&stores));
    let held = two.mutex("a").lock().await.unwrap();
    slow.delays.lock().unwrap().push_back((Op::Release, secs(3)));
    let waiter = tokio::spawn(async move { one.mutex("a").lock().await.unwrap() });
    // The waiter was refused and its release to the slow node is in flight. Then only two nodes are left.
    sleep(millis(20)).await;
    down.down.store(true, Ordering::SeqCst);
    held.release().await.unwrap();
    let guard = waiter.await.unwrap();
    sleep(secs(4)).await;
    let other = two.mutex("a").try_lock().await.unwrap();
    assert!(!(guard.is_held() && other.is_some()), "two holders: {guard:?} and {other:?}");
}

#[tokio::test(start_paused = true)]
async fn close_returns_soon_after_the_ttl_if_a_majority_hangs() {
    let (nodes, faults) = faulty_nodes(&memories(3));
    let keeper = Keeper::new(Quorum::new(nodes).unwrap()).ttl(secs(30));
    let guard = keeper.mutex("a").lock().await.unwrap();
    for faults in &faults[..2] {
        faults.everything(Fault::Hangs);
    }
    drop(guard);
    timeout(secs(60), keeper.close()).await.expect("the keeper closes");
}

#[tokio::test(start_paused = true)]
async fn locks_released_while_a_node_hangs_are_freed_on_the_others_and_close_returns() {
    let stores = memories(3);
    let (nodes, faults) = faulty_nodes(&stores);
    let keeper = Keeper::new(Quorum::new(nodes).unwrap()).ttl(secs(30));
    faults[2].everything(Fault::Hangs);
    for i in 0..1000 {
        keeper.mutex(format!("{i}")).lock().await.unwrap().release().await.unwrap();
    }
    timeout(secs(60), keeper.close()).await.expect("the keeper closes");
    for store in &stores {
        assert_eq!(store.list("").await.unwrap(), []);
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_of_a_quorum_is_granted_the_lock_as_soon_as_it_is_released() {
    for _ in 0..20 {
        let mutex = quorum(&memories(3)).mutex("a");
        let holder = mutex.lock().await.unwrap();
        let waiter = tokio::spawn(async move { mutex.lock().await.unwrap() });
        sleep(secs(5)).await;
        let start = Instant::now();
        holder.release().await.unwrap();
        let _guard = waiter.await.unwrap();
        assert!(start.elapsed() < millis(20), "{:?} after the release", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_granted_the_lock_although_a_node_hangs() {
    let stores = memories(3);
    let (nodes, faults) = faulty_nodes(&stores);
    let quorum_of_faulty = Quorum::new(nodes).unwrap().node_timeout(secs(20));
    let mutex = Keeper::new(quorum_of_faulty).mutex("a");
    let held = quorum(&stores).mutex("a").lock().await.unwrap();
    faults[2].everything(Fault::Hangs);
    let waiter = tokio::spawn(async move { mutex.lock().await.unwrap() });
    sleep(secs(1800)).await;
    assert!(!waiter.is_finished());
    held.release().await.unwrap();
    let _guard = timeout(secs(60), waiter).await.expect("a grant").unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_quorum_rejects_a_node_that_is_listed_more_than_once() {
    let node: Arc<dyn Backend> = Arc::new(Memory::new());
    let error = Quorum::new([node.clone(), node.clone(), node]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_ticket_transfers_a_hold_to_another_keeper_of_the_quorum() {
    let stores = memories(3);
    let ticket = quorum(&stores).mutex("a").lock().await.unwrap().detach().unwrap();
    let guard = quorum(&stores).adopt(ticket).await.unwrap();
    sleep(secs(100)).await;
    assert!(guard.is_held());
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    for store in &stores {
        assert_eq!(store.list("").await.unwrap(), []);
    }
}

#[tokio::test(start_paused = true)]
async fn a_holder_is_notified_at_once_when_its_lock_is_broken_on_a_majority() {
    let stores = memories(3);
    let guard = quorum(&stores).mutex("a").lock().await.unwrap();
    sleep(secs(1)).await;
    for store in &stores[..2] {
        store.break_lock(&Name::new("a").unwrap()).await.unwrap();
    }
    timeout(secs(1), guard.lost()).await.expect("a notification");
}
