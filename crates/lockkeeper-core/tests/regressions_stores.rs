//! What reviewers of the stores once found broken, and how it must be.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::collections::VecDeque;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Uncounting, millis, pair, secs};
use lockkeeper_core::{
    Attempt, Backend, Background, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Error,
    ErrorKind, Fence, Guard, Inspector, Keeper, Memory, Mode, Name, Quorum, Release,
    ReleaseOutcome, Renewal, Result, Slots,
};
use lockkeeper_testkit::{Fault, Faults, Faulty, Op};
use tokio::time::{Instant, sleep, timeout};

fn name(name: &str) -> Name {
    Name::new(name).unwrap()
}

/// A claim on "a", made by hand.
fn claim(store: &Memory, ttl: Duration, change: impl FnOnce(&mut ClaimSpec)) -> Box<dyn Claim> {
    let background = Background::new(tokio::runtime::Handle::current());
    let mut spec = ClaimSpec::new(name("a"), ttl, background);
    change(&mut spec);
    store.claim(spec).unwrap()
}

async fn is_granted(claim: &mut Box<dyn Claim>) -> bool {
    matches!(claim.attempt(None).await.unwrap(), Attempt::Granted(_))
}

async fn waiters(store: &Memory) -> usize {
    store.show(&name("a")).await.unwrap().iter().map(|info| info.waiters.len()).sum()
}

// Memory.

#[tokio::test(start_paused = true)]
async fn a_release_by_one_whose_place_ran_out_leaves_the_place_of_another() {
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
    assert_eq!(waiters(&store).await, 1, "thrown out of the queue by another's release");
}

#[tokio::test(start_paused = true)]
async fn an_acquire_dropped_after_its_place_ran_out_leaves_the_place_of_another() {
    let store = Memory::new();
    let mutex = Keeper::new(store.clone()).mutex("a");
    let holder = mutex.lock().await.unwrap();
    // Polled once and then no more: nobody refreshes its place.
    let mut stale = Box::pin(mutex.lock());
    std::future::poll_fn(|cx| {
        assert!(stale.as_mut().poll(cx).is_pending());
        std::task::Poll::Ready(())
    })
    .await;
    sleep(secs(31)).await;
    holder.release().await.unwrap();

    let next = mutex.lock().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await.unwrap() }
    });
    while waiters(&store).await != 1 {
        tokio::task::yield_now().await;
    }
    drop(stale);
    sleep(millis(10)).await;
    next.release().await.unwrap();
    let _guard = timeout(secs(1), waiter).await.expect("handed over").unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_waiter_follows_a_dead_holder_even_if_the_head_of_the_queue_has_left() {
    let keeper = Keeper::new(Memory::new());
    let start = Instant::now();
    let _dead = keeper.mutex("a").ttl(secs(30)).lock().await.unwrap().detach().unwrap();
    let head = tokio::spawn({
        let mutex = keeper.mutex("a");
        async move { mutex.try_lock_for(secs(5)).await.unwrap() }
    });
    sleep(millis(10)).await;
    let waiter = tokio::spawn({
        let mutex = keeper.mutex("a").ttl(secs(600));
        async move { mutex.lock().await.unwrap() }
    });
    assert!(head.await.unwrap().is_none());
    let _guard = waiter.await.unwrap();
    assert!(start.elapsed() < secs(32), "a lease of 30 s, entered after {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_follows_two_holders_that_die_one_after_the_other() {
    let keeper = Keeper::new(Memory::new());
    let start = Instant::now();
    let _dead = keeper.mutex("a").ttl(secs(3)).lock().await.unwrap().detach().unwrap();
    let dies = tokio::spawn({
        let mutex = keeper.mutex("a").ttl(secs(3));
        async move { mutex.lock().await.unwrap().detach().unwrap() }
    });
    sleep(millis(10)).await;
    let waiter = tokio::spawn({
        let mutex = keeper.mutex("a").ttl(secs(600));
        async move { mutex.lock().await.unwrap() }
    });
    let _dead = dies.await.unwrap();
    let _guard = waiter.await.unwrap();
    assert!(start.elapsed() < secs(8), "two leases of 3 s, entered after {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_was_downgraded_is_never_exclusive_again() {
    let pair = pair();
    let writer = pair.faulty.rw_lock("a").write().await.unwrap();
    pair.faults.once(Op::Downgrade, Fault::LostAnswer);
    writer.downgrade().await.unwrap_err();
    let reader = pair.healthy.rw_lock("a").try_read().await.unwrap().expect("downgraded");
    assert!(
        !writer.is_held() || writer.mode() != Mode::Exclusive,
        "says that it is exclusive beside a reader"
    );
    // Neither is it when a renewal or an adoption names the mode again.
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
async fn a_lease_that_asking_again_made_shorter_ends_in_time() {
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
async fn names_whose_holders_died_are_forgotten_while_others_are_asked_for() {
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
async fn a_try_that_can_never_enter_leaves_nothing() {
    let store = Memory::new();
    let too_many = |spec: &mut ClaimSpec| spec.mode = Mode::Permits { take: 4, of: 3 };
    assert!(!is_granted(&mut claim(&store, secs(30), too_many)).await);
    assert_eq!(format!("{store:?}").matches("\"a\"").count(), 0, "{store:?}");
}

#[tokio::test(start_paused = true)]
async fn a_store_asked_to_downgrade_permits_gives_none_away() {
    let store = Memory::new();
    let only = |spec: &mut ClaimSpec| spec.mode = Mode::Permits { take: 1, of: 1 };
    let (mut one, mut two) = (claim(&store, secs(600), only), claim(&store, secs(600), only));
    assert!(is_granted(&mut one).await);
    assert!(!is_granted(&mut two).await);
    let answer = one.downgrade(secs(600)).await;
    assert!(!is_granted(&mut two).await, "two have the only permit, after {answer:?}");
}

// Slots.

fn slots(store: &Memory) -> Keeper {
    Keeper::new(Slots::new(Arc::new(Uncounting(store.clone()))))
}

#[tokio::test(start_paused = true)]
async fn a_slot_whose_answer_was_lost_is_not_held_beside_another() {
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
async fn a_semaphore_of_more_slots_than_can_be_asked_is_refused() {
    let keeper = slots(&Memory::new());
    assert!(keeper.semaphore("a", 1024).try_acquire().await.unwrap().is_some());
    for permits in [1025, 300_000, u32::MAX] {
        let error = keeper.semaphore("b", permits).try_acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{permits}: {error}");
    }
}

/// A semaphore of three permits: one is held, and one waits for all three who has two already.
async fn one_in_and_one_half_in(keeper: &Keeper) -> (Guard, tokio::task::JoinHandle<Guard>) {
    let semaphore = keeper.semaphore("a", 3);
    let holder = semaphore.acquire().await.unwrap();
    let waiter = tokio::spawn(async move { semaphore.acquire_many(3).await.unwrap() });
    sleep(millis(100)).await;
    (holder, waiter)
}

#[tokio::test(start_paused = true)]
async fn breaking_a_semaphore_of_slots_takes_it_from_holders_and_not_from_waiters() {
    let keeper = slots(&Memory::new());
    let (holder, waiter) = one_in_and_one_half_in(&keeper).await;
    assert_eq!(keeper.inspect().unwrap().break_lock("a").await.unwrap(), 1);
    let guard = timeout(secs(5), waiter).await.expect("enters").unwrap();
    assert!(guard.is_held());
    assert!(!holder.is_held());
}

#[tokio::test(start_paused = true)]
async fn one_who_waits_with_some_of_its_slots_is_shown_as_a_waiter_only() {
    let keeper = slots(&Memory::new());
    let (_holder, _waiter) = one_in_and_one_half_in(&keeper).await;
    let shown = keeper.inspect().unwrap().show("a").await.unwrap();
    assert_eq!((shown[0].holders.len(), shown[0].waiters.len()), (1, 1), "{shown:?}");
}

// Quorum.

fn memories() -> Vec<Memory> {
    (0..3).map(|_| Memory::new()).collect()
}

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

/// A store behind a network: what was sent arrives, though its sender has stopped waiting.
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

    /// How late the next request of this kind arrives.
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
        Ok(Box::new(NetClaim { net: self.clone(), claim }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.store.inspector()
    }
}

struct NetClaim {
    net: Net,
    claim: Arc<tokio::sync::Mutex<Box<dyn Claim>>>,
}

impl NetClaim {
    fn send<T: Send + 'static>(
        &self,
        op: Op,
        ask: impl for<'a> FnOnce(&'a mut dyn Claim) -> BoxFuture<'a, Result<T>> + Send + 'static,
    ) -> BoxFuture<'static, Result<T>> {
        if self.net.down.load(Ordering::SeqCst) {
            return Box::pin(async { Err(Error::new(ErrorKind::Unavailable, "down")) });
        }
        let (delay, claim) = (self.net.delay(op), self.claim.clone());
        Box::pin(async move {
            let sent = tokio::spawn(async move {
                sleep(delay).await;
                let mut claim = claim.lock().await;
                ask(&mut **claim).await
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
        self.send(Op::Downgrade, move |claim| claim.downgrade(ttl))
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        self.send(Op::Release, |claim| claim.release())
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_that_arrives_late_does_not_free_what_the_next_attempt_got() {
    let stores = memories();
    let (down, slow) = (Net::to(&stores[1]), Net::to(&stores[2]));
    let nodes: [Arc<dyn Backend>; 3] =
        [Arc::new(stores[0].clone()), Arc::new(down.clone()), Arc::new(slow.clone())];
    let (one, two) = (Keeper::new(Quorum::new(nodes).unwrap()), quorum(&stores));
    let held = two.mutex("a").lock().await.unwrap();
    slow.delays.lock().unwrap().push_back((Op::Release, secs(3)));
    let waiter = tokio::spawn(async move { one.mutex("a").lock().await.unwrap() });
    // It was refused, and its release to the slow node is on its way. Then there are two nodes.
    sleep(millis(20)).await;
    down.down.store(true, Ordering::SeqCst);
    held.release().await.unwrap();
    let guard = waiter.await.unwrap();
    sleep(secs(4)).await;
    let other = two.mutex("a").try_lock().await.unwrap();
    assert!(!(guard.is_held() && other.is_some()), "two hold: {guard:?} and {other:?}");
}

#[tokio::test(start_paused = true)]
async fn close_ends_not_long_after_the_ttl_if_a_majority_hangs() {
    let (nodes, faults) = faulty_nodes(&memories());
    let keeper = Keeper::new(Quorum::new(nodes).unwrap()).ttl(secs(30));
    let guard = keeper.mutex("a").lock().await.unwrap();
    for faults in &faults[..2] {
        faults.everything(Fault::Hangs);
    }
    drop(guard);
    timeout(secs(60), keeper.close()).await.expect("closes");
}

#[tokio::test(start_paused = true)]
async fn locks_given_back_while_a_node_hangs_are_left_on_no_other_node_and_close_ends() {
    let stores = memories();
    let (nodes, faults) = faulty_nodes(&stores);
    let keeper = Keeper::new(Quorum::new(nodes).unwrap()).ttl(secs(30));
    faults[2].everything(Fault::Hangs);
    for i in 0..1000 {
        keeper.mutex(format!("{i}")).lock().await.unwrap().release().await.unwrap();
    }
    timeout(secs(60), keeper.close()).await.expect("closes");
    for store in &stores {
        assert_eq!(store.list("").await.unwrap(), []);
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_of_a_quorum_enters_as_soon_as_the_holder_leaves() {
    for _ in 0..20 {
        let mutex = quorum(&memories()).mutex("a");
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
async fn a_waiter_enters_though_a_node_has_hung_for_long() {
    let stores = memories();
    let (nodes, faults) = faulty_nodes(&stores);
    let quorum_of_faulty = Quorum::new(nodes).unwrap().node_timeout(secs(20));
    let mutex = Keeper::new(quorum_of_faulty).mutex("a");
    let held = quorum(&stores).mutex("a").lock().await.unwrap();
    faults[2].everything(Fault::Hangs);
    let waiter = tokio::spawn(async move { mutex.lock().await.unwrap() });
    sleep(secs(1800)).await;
    assert!(!waiter.is_finished());
    held.release().await.unwrap();
    let _guard = timeout(secs(60), waiter).await.expect("enters").unwrap();
}

#[tokio::test(start_paused = true)]
async fn one_node_named_three_times_is_no_quorum() {
    let node: Arc<dyn Backend> = Arc::new(Memory::new());
    let error = Quorum::new([node.clone(), node.clone(), node]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_ticket_carries_a_hold_to_another_keeper_of_the_quorum() {
    let stores = memories();
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
async fn a_hold_that_is_broken_on_a_majority_is_told_at_once() {
    let stores = memories();
    let guard = quorum(&stores).mutex("a").lock().await.unwrap();
    sleep(secs(1)).await;
    for store in &stores[..2] {
        store.break_lock(&name("a")).await.unwrap();
    }
    timeout(secs(1), guard.lost()).await.expect("told");
}
