//! First attempts, which bypass the queue of an unfair store while it is empty.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fence, Inspector, Memory,
    Release, Renewal,
};
use lockkeeper_testkit::{Fault, Op};
use tokio::time::{Instant, timeout};

use crate::common::unordered::Unordered;
use crate::common::{millis, secs};
use crate::failures::polled;
use crate::scripted::Scripted;
use crate::{FRONT_GRACE, Listening, Setup, is_granted, is_handed_off, listen, poll_once};

type Hook = Box<dyn FnOnce() + Send>;

/// An unfair store without notifications, or another one. A hook runs inside an attempt, after the store has decided and
/// before the local queue sees the answer, as another thread would.
#[derive(Clone)]
struct Hooked {
    hooks: Arc<std::sync::Mutex<Vec<Hook>>>,
    inner: Arc<dyn Backend>,
    /// Whether an attempt with a hook is pending once.
    is_slow: bool,
}

struct HookedClaim {
    inner: Box<dyn Claim>,
    store: Hooked,
}

impl Hooked {
    fn new(is_slow: bool) -> Self {
        Self { hooks: Arc::default(), inner: Arc::new(Unordered::silent()), is_slow }
    }

    /// Runs `hook` inside the next attempt that has none yet.
    fn in_next_attempt(&self, hook: impl FnOnce() + Send + 'static) {
        self.hooks.lock().unwrap().insert(0, Box::new(hook));
    }
}

impl std::fmt::Debug for Hooked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hooked")
    }
}

impl Backend for Hooked {
    fn name(&self) -> &'static str {
        "hooked"
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn claim(&self, spec: ClaimSpec) -> lockkeeper_core::Result<Box<dyn Claim>> {
        Ok(Box::new(HookedClaim { inner: self.inner.claim(spec)?, store: self.clone() }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.inner.inspector()
    }
}

impl Claim for HookedClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, lockkeeper_core::Result<Attempt>> {
        Box::pin(async move {
            let answer = self.inner.attempt(floor).await;
            let hook = self.store.hooks.lock().unwrap().pop();
            if let Some(hook) = hook {
                hook();
                if self.store.is_slow {
                    tokio::task::yield_now().await;
                }
            }
            answer
        })
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        self.inner.changed()
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, lockkeeper_core::Result<Renewal>> {
        self.inner.renew(ttl)
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, lockkeeper_core::Result<Renewal>> {
        self.inner.downgrade(ttl)
    }

    fn set_fence(&mut self, fence: Fence) {
        self.inner.set_fence(fence);
    }

    fn release(&mut self) -> BoxFuture<'_, lockkeeper_core::Result<Release>> {
        self.inner.release()
    }
}

type SharedClaim = Arc<tokio::sync::Mutex<Box<dyn Claim>>>;

fn shared(claim: Box<dyn Claim>) -> SharedClaim {
    Arc::new(tokio::sync::Mutex::new(claim))
}

fn release(claim: &SharedClaim) {
    assert!(poll_once(claim.try_lock().unwrap().release().as_mut()).is_ready());
}

/// Makes the attempt of `claim`, which is refused without waiting, run inside the next attempt of the store.
fn refuse_during_next_attempt(store: &Hooked, claim: &SharedClaim) {
    let claim = claim.clone();
    store.in_next_attempt(move || {
        let mut claim = claim.try_lock().unwrap();
        let Poll::Ready(answer) = poll_once(claim.attempt(None).as_mut()) else { return };
        assert!(matches!(answer.unwrap(), Attempt::Contended { .. }));
    });
}

#[tokio::test(start_paused = true)]
async fn a_first_attempt_that_is_answered_at_once_creates_no_queue() {
    let store = Hooked::new(false);
    let setup = Arc::new(Setup::new(store.clone()));
    let during = setup.clone();
    store.in_next_attempt(move || during.assert_no_queue());
    let mut claim = setup.waiter();
    assert!(is_granted(&mut *claim).await);
    claim.release().await.unwrap();
}

/// Attempts of several threads reach a fair store in the order of the queue.
#[tokio::test(start_paused = true)]
async fn a_first_attempt_on_a_fair_store_joins_the_queue_before_it_is_sent() {
    let store = Hooked { inner: Arc::new(Memory::new()), ..Hooked::new(false) };
    let setup = Setup::new(store.clone());
    let (mut first, second) = (setup.waiter(), shared(setup.waiter()));
    refuse_during_next_attempt(&store, &second);
    assert!(is_granted(&mut *first).await);
    assert_eq!(setup.faults.asked(Op::Attempt), 1);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_arrives_during_a_first_attempt_sends_no_attempt() {
    for setup in Setup::both() {
        setup.faults.once(Op::Attempt, Fault::SlowRequest(secs(1)));
        let (mut first, mut second) = (setup.waiter(), setup.waiter());
        let mut in_flight = first.attempt(None);
        assert!(poll_once(in_flight.as_mut()).is_pending());
        for _ in 0..2 {
            assert!(!is_granted(&mut *second).await);
            assert_eq!(setup.faults.asked(Op::Attempt), 1, "{}", setup.store.name());
            tokio::time::advance(FRONT_GRACE * 2).await;
        }
        assert!(matches!(in_flight.await.unwrap(), Attempt::Granted(_)));
        first.release().await.unwrap();
        assert!(is_handed_off(listen(&mut *second)), "{}", setup.store.name());
    }
}

/// Otherwise new claims would wait behind the holder without having sent an attempt.
#[tokio::test(start_paused = true)]
async fn a_holder_that_repeats_its_attempt_does_not_join_the_queue() {
    for setup in Setup::both() {
        let (mut holder, mut waiter) = (setup.waiter(), setup.waiter());
        assert!(is_granted(&mut *holder).await);
        setup.faults.once(Op::Attempt, Fault::SlowRequest(secs(1)));
        let mut in_flight = holder.attempt(None);
        assert!(poll_once(in_flight.as_mut()).is_pending());
        assert!(!is_granted(&mut *waiter).await);
        assert_eq!(setup.faults.asked(Op::Attempt), 3, "{}", setup.store.name());
        assert!(matches!(in_flight.await.unwrap(), Attempt::Granted(_)));
    }
}

/// The release finds no queue, and the store sends no notifications.
#[tokio::test(start_paused = true)]
async fn a_release_before_a_refused_first_attempt_joins_the_queue_is_not_missed() {
    for is_slow in [false, true] {
        let store = Hooked::new(is_slow);
        let setup = Setup::new(store.clone());
        let holder = shared(setup.waiter());
        assert!(is_granted(&mut **holder.try_lock().unwrap()).await);
        let mut waiter = setup.waiter();
        store.in_next_attempt(move || release(&holder));
        assert!(!is_granted(&mut *waiter).await, "slow: {is_slow}");
        assert!(is_handed_off(listen(&mut *waiter)), "slow: {is_slow}");
        waiter.release().await.unwrap();
        setup.assert_no_queue();
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_joins_while_the_holder_is_granted_is_woken_by_the_release() {
    for is_slow in [false, true] {
        let store = Hooked::new(is_slow);
        let setup = Setup::new(store.clone());
        let (mut holder, waiter) = (setup.waiter(), shared(setup.waiter()));
        refuse_during_next_attempt(&store, &waiter);
        assert!(is_granted(&mut *holder).await);
        let mut waiter = waiter.try_lock().unwrap();
        let mut waiting = Listening::new(&mut **waiter);
        assert_eq!(waiting.poll(), None);
        holder.release().await.unwrap();
        assert!(waiting.is_woken(), "slow: {is_slow}");
        assert!(is_handed_off(waiting.poll()), "slow: {is_slow}");
    }
}

/// Three concurrent first attempts. The last to send its attempt is the first to join.
#[tokio::test(start_paused = true)]
async fn concurrent_first_attempts_queue_in_the_order_in_which_they_are_refused() {
    for is_slow in [false, true] {
        let store = Hooked::new(is_slow);
        let setup = Setup::new(store.clone());
        let mut holder = setup.waiter();
        assert!(is_granted(&mut *holder).await);
        let (first, second, mut third) =
            (shared(setup.waiter()), shared(setup.waiter()), setup.waiter());
        refuse_during_next_attempt(&store, &second);
        refuse_during_next_attempt(&store, &first);
        assert!(!is_granted(&mut *third).await);
        if is_slow {
            for claim in [&first, &second] {
                assert!(!is_granted(&mut **claim.try_lock().unwrap()).await);
            }
        }
        let before = setup.faults.asked(Op::Changed);
        assert_eq!(listen(&mut *third), None);
        assert_eq!(setup.faults.asked(Op::Changed), before, "only front and look-ahead listen");
        let (mut first, mut second) = (first.try_lock().unwrap(), second.try_lock().unwrap());
        holder.release().await.unwrap();
        assert!(!is_handed_off(listen(&mut *third)) && !is_handed_off(listen(&mut **second)));
        assert!(is_handed_off(listen(&mut **first)), "slow: {is_slow}");
        first.release().await.unwrap();
        assert!(is_handed_off(listen(&mut **second)), "slow: {is_slow}");
        second.release().await.unwrap();
        assert!(is_handed_off(listen(&mut *third)), "slow: {is_slow}");
        third.release().await.unwrap();
        setup.assert_no_queue();
    }
}

#[tokio::test(start_paused = true)]
async fn an_undecided_first_attempt_does_not_wait() {
    let (attempt, changed) = (Attempt::Undecided, Change::LookAgain);
    let setup = Setup::new(Scripted { fair: false, attempt, changed });
    let mut claim = setup.waiter();
    assert_eq!(claim.attempt(None).await.unwrap(), Attempt::Undecided);
    setup.assert_no_queue();
}

/// An uncontended acquire on a slow store is dropped after each poll.
#[tokio::test(start_paused = true)]
async fn a_first_attempt_dropped_after_any_poll_leaves_no_entry_and_blocks_no_waiter() {
    for fault in [Fault::SlowRequest(millis(10)), Fault::SlowAnswer(millis(10))] {
        let mut ended = [false; 2];
        for polls in 0..20 {
            for (setup, ended) in Setup::both().into_iter().zip(&mut ended) {
                setup.faults.always(Op::Attempt, fault);
                setup.faults.always(Op::Release, fault);
                let mutex = setup.keeper.mutex("a");
                let lock = async { mutex.lock().await.unwrap().release().await.unwrap() };
                let dropped = async { *ended = polled(lock, polls).await.is_some() };
                let next = async { setup.lock().await.release().await.unwrap() };
                let start = Instant::now();
                tokio::join!(dropped, next);
                assert!(start.elapsed() < secs(1), "{fault:?}, {polls} polls");
                setup.keeper.close().await;
                setup.assert_empty().await;
            }
        }
        assert_eq!(ended, [true; 2], "needs more polls: {fault:?}");
    }
}

/// Wake-ups come only from this process, so a lost one is a hang.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_wake_up_is_lost_between_threads() {
    let setup = Arc::new(Setup::new(Unordered::silent()));
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let setup = setup.clone();
            tokio::spawn(async move {
                for _ in 0..3_000 {
                    let mut claim = setup.waiter();
                    while !is_granted(&mut *claim).await {
                        if let Change::Granted(_) = claim.changed().await {
                            break;
                        }
                    }
                    claim.release().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        timeout(secs(60), task).await.expect("a wake-up was lost").unwrap();
    }
    setup.assert_no_queue();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claims_dropped_on_several_threads_leave_no_queue() {
    for setup in Setup::both() {
        let setup = Arc::new(setup);
        let tasks: Vec<_> = (0..4)
            .map(|task| {
                let setup = setup.clone();
                tokio::spawn(async move {
                    for round in 0..2_000 {
                        let mut claim = setup.waiter();
                        let _ = claim.attempt(None).await.unwrap();
                        if (round + task) % 3 != 0 {
                            let _ = claim.release().await.unwrap();
                        }
                        // Memory keeps the lease of a claim that is only dropped.
                        let _ = claim.release().await.unwrap();
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        setup.assert_no_queue();
    }
}
