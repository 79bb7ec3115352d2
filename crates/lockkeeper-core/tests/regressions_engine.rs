//! What reviewers of the engine once found broken, and how it must be.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use common::{Forgetful, Pair, millis, pair, secs};
use lockkeeper_core::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Error, ErrorKind, Fence,
    Grant, Guard, Inspector, Keeper, Memory, Release, ReleaseOutcome, Renewal, Result, State,
    blocking,
};
use lockkeeper_testkit::{Fault, Faulty, Op};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

type Renew = dyn for<'a> Fn(&'a mut dyn Claim, &ClaimSpec, Duration) -> BoxFuture<'a, Result<Renewal>>
    + Send
    + Sync;

/// A memory store that renews in its own way, and sends no notices.
struct Renews {
    memory: Memory,
    leases: bool,
    renew: Arc<Renew>,
}

impl Renews {
    fn new(
        memory: Memory,
        renew: impl for<'a> Fn(
            &'a mut dyn Claim,
            &ClaimSpec,
            Duration,
        ) -> BoxFuture<'a, Result<Renewal>>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self { memory, leases: true, renew: Arc::new(renew) }
    }

    /// A store whose holds last for as long as a session does.
    fn sessions() -> Self {
        let renew = Self::new(Memory::new(), |claim, spec, _| {
            let renewal = claim.renew(spec.ttl);
            Box::pin(async move {
                Ok(match renewal.await? {
                    lost @ Renewal::Lost(_) => lost,
                    _ => Renewal::Held,
                })
            })
        });
        Self { leases: false, ..renew }
    }
}

impl fmt::Debug for Renews {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Renews").field(&self.memory).finish()
    }
}

impl Backend for Renews {
    fn name(&self) -> &'static str {
        "renews"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { leases: self.leases, ..self.memory.capabilities() }
    }

    fn claim(&self, mut spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        if !self.leases {
            spec.ttl = secs(1_000_000);
        }
        let claim = self.memory.claim(spec.clone())?;
        let (leases, renew) = (self.leases, self.renew.clone());
        Ok(Box::new(RenewsClaim { claim, spec, leases, renew }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.memory.inspector()
    }
}

struct RenewsClaim {
    claim: Box<dyn Claim>,
    spec: ClaimSpec,
    leases: bool,
    renew: Arc<Renew>,
}

impl Claim for RenewsClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        let leases = self.leases;
        let attempt = self.claim.attempt(floor);
        Box::pin(async move {
            Ok(match attempt.await? {
                Attempt::Granted(grant) if !leases => {
                    Attempt::Granted(Grant { valid_for: None, ..grant })
                }
                other => other,
            })
        })
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(std::future::pending())
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        (self.renew)(&mut *self.claim, &self.spec, ttl)
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        self.claim.downgrade(ttl)
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        self.claim.release()
    }
}

fn threads(count: usize) -> Runtime {
    Builder::new_multi_thread().worker_threads(count).enable_all().build().unwrap()
}

/// A keeper that lives on a runtime.
fn keeper_on(runtime: &Runtime, store: impl Backend) -> Keeper {
    let _entered = runtime.enter();
    Keeper::new(store)
}

/// Waits in real time until somebody waits for a name.
async fn until_somebody_waits(memory: &Memory, name: &str) {
    let inspect = Keeper::new(memory.clone()).inspect().unwrap();
    while inspect.show(name).await.unwrap().iter().all(|info| info.waiters.is_empty()) {
        sleep(millis(1)).await;
    }
}

// Closing.

#[tokio::test(start_paused = true)]
async fn when_close_returns_waiters_have_left_the_queue() {
    let pair = pair();
    let _holder = pair.healthy.mutex("a").lock().await.unwrap();
    let waiter = tokio::spawn({
        let mutex = pair.faulty.mutex("a");
        async move { mutex.lock().await }
    });
    pair.until_queued("a", 1).await;
    pair.faulty.close().await;
    assert_eq!(pair.waiters("a").await, 0, "still queued when close returned");
    assert_eq!(waiter.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn nothing_is_handed_to_a_waiter_whose_keeper_closed_before_its_runtime_ended() {
    let memory = Memory::new();
    let own = Builder::new_current_thread().enable_all().build().unwrap();
    let other = Builder::new_current_thread().enable_all().build().unwrap();
    let healthy = keeper_on(&other, memory.clone());
    let holder = other.block_on(healthy.mutex("a").lock()).unwrap();
    own.block_on(async {
        let keeper = Keeper::new(memory.clone());
        let mutex = keeper.mutex("a");
        tokio::spawn(async move { mutex.lock().await });
        until_somebody_waits(&memory, "a").await;
        keeper.close().await;
    });
    drop(own);
    other.block_on(async {
        holder.release().await.unwrap();
        assert!(healthy.mutex("a").try_lock().await.unwrap().is_some());
    });
}

#[tokio::test(start_paused = true)]
async fn one_whose_ask_is_not_answered_is_told_that_the_keeper_closed() {
    let pair = pair();
    pair.faults.always(Op::Attempt, Fault::SlowAnswer(secs(20)));
    let asking = tokio::spawn({
        let mutex = pair.faulty.mutex("a");
        async move { mutex.lock().await }
    });
    sleep(secs(1)).await;
    pair.faulty.close().await;
    assert_eq!(asking.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(pair.left().await, []);
}

// Waiting.

#[tokio::test(start_paused = true)]
async fn a_waiter_bears_a_refresh_that_gets_no_answer() {
    for fault in [Fault::NoAnswer, Fault::Hangs] {
        let pair = pair();
        let holder = pair.healthy.mutex("a").lock().await.unwrap();
        let waiter = tokio::spawn({
            let mutex = pair.faulty.mutex("a");
            async move { mutex.lock().await }
        });
        pair.until_queued("a", 1).await;
        pair.faults.once(Op::Attempt, fault);
        sleep(secs(11)).await;
        assert_eq!(pair.faults.asked(Op::Attempt), 2, "the refresh is under way");
        holder.release().await.unwrap();
        let got = waiter.await.unwrap();
        assert!(got.is_ok(), "{fault:?}: {got:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn not_in_time_is_none_in_time_even_if_a_refresh_hangs() {
    let pair = pair();
    let _holder = pair.healthy.mutex("a").lock().await.unwrap();
    let start = Instant::now();
    let mutex = pair.faulty.mutex("a");
    let waiting = tokio::spawn(async move { mutex.try_lock_for(millis(10_500)).await });
    pair.until_queued("a", 1).await;
    pair.faults.always(Op::Attempt, Fault::Hangs);
    let got = waiting.await.unwrap();
    assert!(matches!(got, Ok(None)), "{got:?}");
    // The answer to the refresh is awaited for 100 ms past the end.
    assert!(start.elapsed() <= millis(10_610), "told after {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn lock_all_gives_up_in_time_even_if_releases_hang() {
    let pair = pair();
    let _held = pair.healthy.mutex("d").lock().await.unwrap();
    pair.faults.always(Op::Release, Fault::Hangs);
    let start = Instant::now();
    let got = pair.faulty.lock_all(["a", "b", "c", "d"]).try_lock_for(secs(1)).await.unwrap();
    assert!(got.is_none());
    assert!(start.elapsed() < secs(3), "after {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_handed_over_fence_is_above_all_that_its_keeper_has_seen() {
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
    let waiter = tokio::spawn({
        let mutex = one.mutex("a");
        async move { mutex.lock().await.unwrap() }
    });
    until_somebody_waits(&store.memory(), "a").await;
    holder.release().await.unwrap();
    let guard = waiter.await.unwrap();
    assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
}

// Leases.

#[tokio::test(start_paused = true)]
async fn after_a_shorter_extend_a_failed_renewal_is_borne() {
    // Pauses are random: once may be luck.
    for round in 0..20 {
        let Pair { faulty, faults, .. } = pair();
        let guard = faulty.mutex("a").ttl(secs(3600)).lock().await.unwrap();
        guard.extend(secs(1)).await.unwrap();
        faults.once(Op::Renew, Fault::Refused);
        sleep(secs(10)).await;
        assert_eq!(guard.state(), State::Held, "round {round}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_shorter_extend_whose_answer_is_lost_is_repaired() {
    for round in 0..20 {
        let Pair { faulty, faults, .. } = pair();
        let guard = faulty.mutex("a").ttl(secs(3600)).lock().await.unwrap();
        faults.once(Op::Renew, Fault::LostAnswer);
        guard.extend(secs(1)).await.unwrap_err();
        sleep(secs(10)).await;
        assert_eq!(guard.state(), State::Held, "round {round}");
    }
}

#[tokio::test(start_paused = true)]
async fn renewals_that_take_a_fifth_of_the_ttl_keep_the_lock() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").ttl(secs(1)).lock().await.unwrap();
    faults.always(Op::Renew, Fault::SlowAnswer(millis(200)));
    sleep(secs(10)).await;
    assert!(guard.is_held(), "lost after {} renewals", faults.asked(Op::Renew));
}

#[tokio::test(start_paused = true)]
async fn a_ttl_is_either_refused_or_can_be_kept() {
    for ttl in 1..10 {
        let mutex = Keeper::new(Memory::new()).mutex("a").ttl(millis(ttl));
        assert_eq!(mutex.lock().await.unwrap_err().kind(), ErrorKind::InvalidOption, "{ttl} ms");
    }
    for ttl in 10..30 {
        let keeper = Keeper::new(Memory::new());
        let guard = keeper.mutex("a").ttl(millis(ttl)).lock().await.unwrap();
        sleep(secs(1)).await;
        assert!(guard.is_held(), "{ttl} ms, on a perfect store");
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_bears_failed_renewals_with_and_without_max_hold() {
    for max_hold in [None, Some(secs(3600))] {
        let (store, faults) = Faulty::new(Renews::sessions());
        let mut mutex = Keeper::new(store).mutex("a");
        if let Some(max_hold) = max_hold {
            mutex = mutex.max_hold(max_hold);
        }
        let guard = mutex.lock().await.unwrap();
        faults.always(Op::Renew, Fault::Refused);
        sleep(secs(60)).await;
        assert_eq!(guard.state(), State::AtRisk, "max_hold {max_hold:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn renewals_that_the_store_does_not_support_are_not_asked_in_a_loop() {
    let asked = Arc::new(AtomicUsize::new(0));
    let store = Renews::new(Memory::new(), {
        let asked = asked.clone();
        move |_, _, _| {
            let asked = asked.fetch_add(1, Ordering::SeqCst);
            // Paused time does not pass in a loop.
            assert!(asked < 1000, "asked in a loop");
            Box::pin(async { Err(Error::new(ErrorKind::Unsupported, "on purpose")) })
        }
    });
    let guard = Keeper::new(store).mutex("a").ttl(secs(1)).lock().await.unwrap();
    timeout(millis(1001), guard.lost()).await.expect("told when the lease ends");
    let asked = asked.load(Ordering::SeqCst);
    assert!(asked < 100, "{asked} renewals in a second");
}

#[tokio::test(start_paused = true)]
async fn a_shorter_renewal_that_arrives_late_does_not_make_two_holders() {
    let memory = Memory::new();
    let late = Arc::new(AtomicBool::new(false));
    let store = Renews::new(memory.clone(), {
        let (memory, late) = (memory.clone(), late.clone());
        move |claim, spec, ttl| {
            if !late.swap(false, Ordering::SeqCst) {
                return claim.renew(ttl);
            }
            let mut claim = memory.claim(spec.clone()).unwrap();
            tokio::spawn(async move {
                sleep(secs(3)).await;
                let _ = claim.renew(ttl).await;
            });
            Box::pin(std::future::pending())
        }
    });
    let guard = Keeper::new(store).mutex("a").lock().await.unwrap();
    late.store(true, Ordering::SeqCst);
    guard.extend(secs(1)).await.unwrap_err();
    let other = Keeper::new(memory).mutex("a");
    for _ in 0..100 {
        let both = other.try_lock().await.unwrap();
        assert!(
            both.is_none() || !guard.is_held(),
            "two holders: the first believes in {:?} more",
            guard.remaining()
        );
        sleep(millis(100)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn adopt_checks_max_hold() {
    let keeper = Keeper::new(Memory::new());
    let ticket = keeper.mutex("a").lock().await.unwrap().detach().unwrap();
    let error = keeper.clone().max_hold(Duration::ZERO).adopt(ticket).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
}

// Surroundings.

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_is_named_and_what_is_left_expires_with_its_lease() {
    let memory = Memory::new();
    let keeper = Keeper::new(Renews::new(memory.clone(), |_, _, _| panic!("on purpose")));
    let guard = keeper.mutex("a").ttl(secs(600)).lock().await.unwrap();
    let error = guard.extend(secs(1200)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(error.to_string().contains("the store panicked"), "{error}");
    assert_eq!(guard.state(), State::Lost);
    timeout(secs(100), keeper.close()).await.expect("closes");
    sleep(secs(600)).await;
    assert!(Keeper::new(memory).mutex("a").try_lock().await.unwrap().is_some());
}

#[tokio::test]
async fn locks_dropped_in_a_loop_are_given_back_meanwhile_and_others_run() {
    let keeper = Keeper::new(Memory::new());
    let other = tokio::spawn(async {});
    for i in 0..10_000 {
        drop(keeper.mutex(format!("{i}")).lock().await.unwrap());
    }
    assert!(other.is_finished(), "the other task never ran");
    let left = keeper.inspect().unwrap().list("").await.unwrap().len();
    assert!(left < 5_000, "{left} dropped locks are still held");
}

#[test]
fn a_waiter_is_told_when_the_runtime_of_its_keeper_goes() {
    let memory = Memory::new();
    let (own, other) = (threads(1), threads(1));
    let keeper = keeper_on(&own, memory.clone());
    let _held = own.block_on(keeper.mutex("b").lock()).unwrap();
    let _blocks = other.block_on(keeper_on(&other, memory.clone()).mutex("a").lock()).unwrap();
    let mutex = keeper.mutex("a");
    let waiter = other.spawn(async move { mutex.lock().await });
    other.block_on(until_somebody_waits(&memory, "a"));
    drop(own);
    let got = other.block_on(async { timeout(secs(30), waiter).await });
    let error = got.expect("told").expect("does not panic").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

#[test]
fn a_keeper_that_never_held_anything_goes_on_after_its_runtime_is_gone() {
    let memory = Memory::new();
    let (own, other) = (threads(1), threads(1));
    let keeper = keeper_on(&own, memory.clone());
    let held = other.block_on(keeper_on(&other, memory.clone()).mutex("a").lock()).unwrap();
    drop(own);
    let mutex = keeper.mutex("a");
    let waiter = other.spawn(async move { mutex.lock().await });
    other.block_on(until_somebody_waits(&memory, "a"));
    drop(held);
    let got = other.block_on(async { timeout(secs(30), waiter).await });
    let guard = got.expect("woken").expect("does not panic").unwrap();
    assert_eq!(guard.blocking_release().unwrap(), ReleaseOutcome::Released);
}

#[test]
fn a_blocking_wait_inside_another_loses_no_wake_up() {
    for _ in 0..50 {
        let (wake_outer, outer) = oneshot::channel::<()>();
        let (wake_inner, inner) = oneshot::channel::<()>();
        let (inside, is_inside) = mpsc::channel();
        let (done, is_done) = mpsc::channel();
        std::thread::spawn(move || {
            blocking::block_on(async {
                tokio::select! {
                    biased;
                    _ = outer => {}
                    () = async {
                        inside.send(()).unwrap();
                        let _ = blocking::block_on(inner);
                        std::future::pending::<()>().await;
                    } => {}
                }
            });
            done.send(()).unwrap();
        });
        is_inside.recv().unwrap();
        wake_outer.send(()).unwrap();
        wake_inner.send(()).unwrap();
        is_done.recv_timeout(secs(30)).expect("woken");
    }
}

/// A waker that drops a guard right where it is woken.
struct Drops(Mutex<Option<Guard>>);

impl Wake for Drops {
    fn wake(self: Arc<Self>) {
        let guard = self.0.lock().unwrap().take();
        drop(guard);
    }
}

#[test]
fn a_guard_may_be_dropped_by_the_waker_that_is_told_of_its_loss() {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.unwrap().block_on(async {
            let Pair { faulty, faults, .. } = pair();
            let guard = faulty.mutex("a").lock().await.unwrap();
            faults.always(Op::Renew, Fault::Refused);
            let mut lost = Box::pin(guard.lost());
            let drops = Arc::new(Drops(Mutex::new(Some(guard))));
            let waker = Waker::from(drops.clone());
            assert!(lost.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            sleep(secs(100)).await;
            assert!(drops.0.lock().unwrap().is_none(), "the waker was woken");
        });
        done.send(()).unwrap();
    });
    is_done.recv_timeout(secs(30)).expect("neither a panic nor a deadlock");
}

/// What the tasks of the stress test share.
#[derive(Default)]
struct Stress {
    inside: AtomicUsize,
    stop: AtomicBool,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
}

impl Stress {
    fn on_a_thread(&self, work: impl FnOnce() + Send + 'static) {
        self.threads.lock().unwrap().push(std::thread::spawn(work));
    }

    async fn give_back(&self, guard: Guard, random: &mut fastrand::Rng) {
        match random.u32(..5) {
            0 => drop(guard),
            1 => self.on_a_thread(move || drop(guard)),
            2 => {
                let within = Duration::from_micros(random.u64(..2000));
                let _ = timeout(within, guard.release()).await;
            }
            3 => self.on_a_thread(move || {
                guard.blocking_release().unwrap();
            }),
            _ => {
                guard.release().await.unwrap();
            }
        }
    }

    async fn run(&self, keeper: Keeper, mut random: fastrand::Rng) {
        while !self.stop.load(Ordering::SeqCst) {
            let name = if random.bool() { "a" } else { "b" };
            let mutex = keeper.mutex(name);
            let guard = if random.u32(..3) == 0 {
                let Ok(guard) = timeout(millis(random.u64(..8)), mutex.lock()).await else {
                    continue;
                };
                guard.unwrap()
            } else {
                mutex.lock().await.unwrap()
            };
            if name == "a" {
                assert_eq!(self.inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
            }
            match random.u32(..3) {
                0 => tokio::task::yield_now().await,
                1 => {
                    let _ = timeout(millis(1), guard.extend(secs(random.u64(4..7)))).await;
                }
                _ => {}
            }
            if name == "a" {
                self.inside.fetch_sub(1, Ordering::SeqCst);
            }
            self.give_back(guard, &mut random).await;
        }
    }
}

#[test]
fn many_tasks_on_many_threads_exclude_each_other_and_leave_nothing() {
    let runtime = threads(2);
    let memory = Memory::new();
    let (store, faults) = Faulty::new(memory.clone());
    let keeper = keeper_on(&runtime, store).ttl(secs(5));
    faults.always(Op::Attempt, Fault::SlowAnswer(millis(1)));
    faults.always(Op::Release, Fault::SlowAnswer(millis(1)));
    let stress = Arc::new(Stress::default());
    let tasks: Vec<_> = (0..24)
        .map(|seed| {
            let (stress, keeper) = (stress.clone(), keeper.clone());
            let random = fastrand::Rng::with_seed(seed);
            runtime.spawn(async move { stress.run(keeper, random).await })
        })
        .collect();
    std::thread::sleep(secs(3));
    stress.stop.store(true, Ordering::SeqCst);
    runtime.block_on(async {
        for task in tasks {
            timeout(secs(30), task).await.expect("no task hangs").unwrap();
        }
    });
    for thread in std::mem::take(&mut *stress.threads.lock().unwrap()) {
        thread.join().unwrap();
    }
    runtime.block_on(async {
        timeout(secs(30), keeper.close()).await.expect("closes");
        let left = Keeper::new(memory).inspect().unwrap().list("").await.unwrap();
        assert_eq!(left, []);
    });
}
