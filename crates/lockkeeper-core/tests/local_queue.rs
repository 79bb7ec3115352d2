//! Local queues, in front of a store that hands over by itself (the memory store) and of one that does not.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use common::unordered::Unordered;
use common::{millis, secs};
use lockkeeper_core::{
    Attempt, Backend, Background, BoxFuture, Capabilities, Change, Claim, ClaimSpec, ErrorKind,
    Fence, Grant, Guard, Holder, Inspector, Keeper, LocalQueue, LockInfo, Memory, Mode, Name,
    Owner, Release, Renewal, Retry, Slots,
};
use lockkeeper_testkit::{Fault, Faults, Faulty, Op};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

const TTL: Duration = Duration::from_secs(30);
/// How long the look-ahead leaves the lock to a front that was woken.
const TURN: Duration = Duration::from_millis(1);
const AFTER_A_TURN: Attempt =
    Attempt::Contended { retry: Retry::After(TURN), holder: Holder::Unknown };

/// A local queue in front of a store, and what goes on between them.
struct Setup {
    store: Arc<LocalQueue>,
    keeper: Keeper,
    faults: Faults,
}

impl Setup {
    fn new(inner: impl Backend) -> Self {
        Self::with(inner, LocalQueue::new)
    }

    fn with(inner: impl Backend, queue: fn(Arc<dyn Backend>) -> LocalQueue) -> Self {
        let (inner, faults) = Faulty::new(inner);
        let store = Arc::new(queue(Arc::new(inner)));
        let keeper = Keeper::from_backend(store.clone()).ttl(TTL);
        Self { store, keeper, faults }
    }

    /// One in front of a store that hands over by itself, and one in front of a store that does not.
    fn both() -> [Self; 2] {
        [Self::new(Memory::new()), Self::new(Unordered::default())]
    }

    fn claim(&self, change: impl FnOnce(&mut ClaimSpec)) -> Box<dyn Claim> {
        let background = Background::new(tokio::runtime::Handle::current());
        let mut spec = ClaimSpec::new(Name::new("a").unwrap(), TTL, background);
        change(&mut spec);
        self.store.claim(spec).unwrap()
    }

    fn waiter(&self) -> Box<dyn Claim> {
        self.claim(|spec| spec.queue = true)
    }

    async fn waiters(&self, name: &str) -> Vec<Option<Owner>> {
        let infos = self.keeper.inspect().unwrap().show(name).await.unwrap();
        infos.iter().flat_map(|info| &info.waiters).map(|waiter| waiter.owner).collect()
    }

    async fn until_queued(&self, name: &str, count: usize) {
        let start = std::time::Instant::now();
        while self.waiters(name).await.len() != count {
            assert!(start.elapsed() < secs(30), "not {count} in the queue of {name:?}");
            tokio::task::yield_now().await;
        }
    }

    /// Starts a task that takes the lock, says its number, and keeps it until it is aborted or the time is over.
    async fn enqueue(
        &self,
        mode: Mode,
        number: usize,
        entered: &mpsc::UnboundedSender<usize>,
        hold: Duration,
    ) -> JoinHandle<()> {
        let before = self.waiters("a").await.len();
        let (lock, entered) = (self.keeper.rw_lock("a"), entered.clone());
        let task = tokio::spawn(async move {
            let guard = match mode {
                Mode::Shared => lock.read().await.unwrap(),
                _ => lock.write().await.unwrap(),
            };
            entered.send(number).unwrap();
            sleep(hold).await;
            guard.release().await.unwrap();
        });
        self.until_queued("a", before + 1).await;
        task
    }

    async fn lock(&self) -> Guard {
        timeout(secs(600), self.keeper.mutex("a").lock()).await.expect("a lock").unwrap()
    }

    async fn left(&self) -> Vec<LockInfo> {
        self.keeper.inspect().unwrap().list("").await.unwrap()
    }

    /// Nothing is held, and no name is known any more.
    async fn assert_empty(&self) {
        sleep(secs(2)).await;
        assert_eq!(self.left().await, []);
        let shown = format!("{:?}", self.store);
        assert!(shown.contains("locks: {}, semaphores: {}"), "a queue is left: {shown}");
    }
}

fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Lets a claim listen for so many polls.
fn listen(claim: &mut dyn Claim, polls: usize) -> Option<Change> {
    let mut changed = claim.changed();
    (0..polls).find_map(|_| match poll_once(changed.as_mut()) {
        Poll::Ready(change) => Some(change),
        Poll::Pending => None,
    })
}

async fn is_granted(claim: &mut dyn Claim) -> bool {
    matches!(claim.attempt(None).await.unwrap(), Attempt::Granted(_))
}

fn is_handed_over(change: Option<Change>) -> bool {
    matches!(change, Some(Change::Granted(_)))
}

// Order.

#[tokio::test(start_paused = true)]
async fn waiters_enter_in_the_order_in_which_they_came() {
    for setup in Setup::both() {
        let (entered, mut order) = mpsc::unbounded_channel();
        let guard = setup.lock().await;
        for number in 0..10 {
            setup.enqueue(Mode::Exclusive, number, &entered, secs(1)).await;
        }
        guard.release().await.unwrap();
        let start = Instant::now();
        for number in 0..10 {
            assert_eq!(order.recv().await, Some(number), "{}", setup.store.name());
        }
        assert!(start.elapsed() < millis(9_100), "{:?} for nine seconds of holds", start.elapsed());
        setup.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn only_the_front_and_the_look_ahead_talk_to_the_store() {
    for (setup, attempts) in Setup::both().into_iter().zip([3, 2]) {
        let guard = setup.lock().await;
        let (entered, _order) = mpsc::unbounded_channel();
        let mut tasks = Vec::new();
        for number in 0..20 {
            tasks.push(setup.enqueue(Mode::Exclusive, number, &entered, secs(1)).await);
        }
        // Without an order of its own, the store is asked by the front alone; the look-ahead listens.
        assert_eq!(setup.faults.asked(Op::Attempt), attempts, "{}", setup.store.name());
        sleep(TURN * 10).await;
        let listening = setup.faults.asked(Op::Changed);
        assert!(listening <= 4, "{listening}: others listen to the store");
        sleep(TTL / 4).await;
        // The holder listens, too, after a moment.
        let others = setup.faults.asked(Op::Changed) - listening;
        assert!(others <= 1, "{others} others listen to the store");
        assert_eq!(setup.faults.asked(Op::Attempt), attempts);
        tasks.iter().for_each(JoinHandle::abort);
        guard.release().await.unwrap();
        setup.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn adjacent_readers_enter_together_and_writers_are_not_overtaken_by_readers() {
    for setup in Setup::both() {
        let (entered, mut order) = mpsc::unbounded_channel();
        let guard = setup.lock().await;
        let modes =
            [Mode::Shared, Mode::Shared, Mode::Shared, Mode::Exclusive, Mode::Shared, Mode::Shared];
        for (number, mode) in modes.into_iter().enumerate() {
            setup.enqueue(mode, number, &entered, secs(1)).await;
        }
        guard.release().await.unwrap();
        let start = Instant::now();
        let mut seen = Vec::new();
        for _ in 0..6 {
            let number = order.recv().await.unwrap();
            seen.push((number, start.elapsed().as_millis() / 500 * 500));
        }
        seen.sort_unstable();
        let expected = [(0, 0), (1, 0), (2, 0), (3, 1000), (4, 2000), (5, 2000)];
        assert_eq!(seen, expected, "{}", setup.store.name());
        setup.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_comes_while_a_writer_waits_waits_behind_it() {
    for setup in Setup::both() {
        let (entered, mut order) = mpsc::unbounded_channel();
        let reader = setup.keeper.rw_lock("a").read().await.unwrap();
        setup.enqueue(Mode::Exclusive, 0, &entered, secs(1)).await;
        setup.enqueue(Mode::Shared, 1, &entered, secs(1)).await;
        sleep(TTL).await;
        assert!(order.try_recv().is_err(), "{}", setup.store.name());
        reader.release().await.unwrap();
        assert_eq!(order.recv().await, Some(0));
        assert_eq!(order.recv().await, Some(1));
        setup.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_asks_again_after_a_release_goes_to_the_back() {
    for setup in Setup::both() {
        let mut holder = setup.waiter();
        assert!(is_granted(&mut *holder).await);
        let (mut first, mut second) = (setup.waiter(), setup.waiter());
        assert!(!is_granted(&mut *first).await && !is_granted(&mut *second).await);
        assert_eq!(holder.release().await.unwrap(), Release::Released);
        assert!(!is_granted(&mut *holder).await, "overtook two waiters on {}", setup.store.name());
        assert!(!is_granted(&mut *second).await, "overtook one waiter on {}", setup.store.name());
        assert!(is_handed_over(listen(&mut *first, 1)));
        first.release().await.unwrap();
        assert!(!is_granted(&mut *holder).await);
        assert!(is_handed_over(listen(&mut *second, 1)));
        second.release().await.unwrap();
        assert!(is_handed_over(listen(&mut *holder, 1)));
        drop((holder, first, second));
        setup.assert_empty_now();
    }
}

#[tokio::test(start_paused = true)]
async fn tasks_that_ask_again_and_again_take_turns() {
    for setup in Setup::both() {
        let turns: Vec<_> = (0..4).map(|_| Arc::new(AtomicUsize::new(0))).collect();
        let tasks: Vec<_> = turns
            .iter()
            .map(|turns| {
                let (mutex, turns) = (setup.keeper.mutex("a"), turns.clone());
                tokio::spawn(async move {
                    loop {
                        let guard = mutex.lock().await.unwrap();
                        tokio::task::yield_now().await;
                        turns.fetch_add(1, Ordering::Relaxed);
                        guard.release().await.unwrap();
                    }
                })
            })
            .collect();
        let counts = || turns.iter().map(|turns| turns.load(Ordering::Relaxed)).collect::<Vec<_>>();
        while counts()[0] < 200 {
            tokio::task::yield_now().await;
        }
        let counts = counts();
        let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
        assert!(most - least <= 1, "{counts:?} on {}", setup.store.name());
        tasks.iter().for_each(JoinHandle::abort);
        setup.assert_empty().await;
    }
}

// Tries.

#[tokio::test(start_paused = true)]
async fn a_try_is_refused_while_others_wait_if_the_store_is_fair_and_asks_the_store_if_not() {
    for (setup, is_fair) in Setup::both().into_iter().zip([true, false]) {
        let mut holder = setup.claim(|_| ());
        assert!(is_granted(&mut *holder).await);
        let mut waiter = setup.waiter();
        assert!(!is_granted(&mut *waiter).await);
        let asked = setup.faults.asked(Op::Attempt);
        assert!(!is_granted(&mut *setup.claim(|_| ())).await);
        assert_eq!(setup.faults.asked(Op::Attempt) - asked, usize::from(!is_fair));
        holder.release().await.unwrap();
        assert_eq!(is_granted(&mut *setup.claim(|_| ())).await, !is_fair);
        waiter.release().await.unwrap();
        assert!(is_granted(&mut *setup.claim(|_| ())).await);
    }
}

/// A claim whose first attempt is in flight neither holds nor waits: the store decides.
#[tokio::test(start_paused = true)]
async fn a_try_is_not_refused_because_of_a_first_attempt_in_flight() {
    let setup = Setup::new(Memory::new());
    setup.faults.once(Op::Attempt, Fault::Hangs);
    let mut first = setup.waiter();
    let mut hangs = first.attempt(None);
    assert!(poll_once(hangs.as_mut()).is_pending());
    assert!(is_granted(&mut *setup.claim(|_| ())).await);
}

// Waiters that are not polled.

/// A future that was polled once, and neither again nor dropped, as in a `select!` that has moved on.
fn unpolled(setup: &Setup) -> Pin<Box<dyn Future<Output = ()>>> {
    let mutex = setup.keeper.mutex("a");
    let mut future: Pin<Box<dyn Future<Output = ()>>> =
        Box::pin(async move { drop(mutex.lock().await) });
    assert!(poll_once(future.as_mut()).is_pending());
    future
}

#[tokio::test(start_paused = true)]
async fn an_unpolled_waiter_at_the_head_does_not_stop_the_next_one() {
    for setup in Setup::both() {
        let (entered, mut order) = mpsc::unbounded_channel();
        let guard = setup.lock().await;
        // On a fair store, the store itself knows the first two and would hand over to them.
        setup.enqueue(Mode::Exclusive, 0, &entered, Duration::ZERO).await;
        setup.enqueue(Mode::Exclusive, 1, &entered, Duration::ZERO).await;
        let unpolled = unpolled(&setup);
        setup.enqueue(Mode::Exclusive, 2, &entered, Duration::ZERO).await;
        setup.enqueue(Mode::Exclusive, 3, &entered, Duration::ZERO).await;
        let start = Instant::now();
        guard.release().await.unwrap();
        for number in 0..4 {
            assert_eq!(timeout(TTL * 3, order.recv()).await, Ok(Some(number)));
        }
        assert!(start.elapsed() < millis(20), "{:?} on {}", start.elapsed(), setup.store.name());
        drop(unpolled);
        setup.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn two_unpolled_waiters_are_passed_over_when_the_next_one_refreshes_its_place() {
    for setup in Setup::both() {
        let (entered, mut order) = mpsc::unbounded_channel();
        let guard = setup.lock().await;
        setup.enqueue(Mode::Exclusive, 0, &entered, Duration::ZERO).await;
        setup.enqueue(Mode::Exclusive, 1, &entered, Duration::ZERO).await;
        let unpolled = [unpolled(&setup), unpolled(&setup)];
        setup.enqueue(Mode::Exclusive, 2, &entered, Duration::ZERO).await;
        let start = Instant::now();
        guard.release().await.unwrap();
        for number in 0..3 {
            assert_eq!(timeout(TTL * 3, order.recv()).await, Ok(Some(number)));
        }
        assert!(
            start.elapsed() <= TTL / 3 + millis(20),
            "{:?} on {}",
            start.elapsed(),
            setup.store.name()
        );
        drop(unpolled);
        setup.assert_empty().await;
    }
}

/// Its place is kept: polled again, it is the first.
#[tokio::test(start_paused = true)]
async fn an_unpolled_waiter_that_is_polled_again_enters() {
    for setup in Setup::both() {
        let guard = setup.lock().await;
        let mut left = setup.waiter();
        assert!(!is_granted(&mut *left).await);
        guard.release().await.unwrap();
        sleep(TTL).await;
        assert!(is_granted(&mut *left).await, "{}", setup.store.name());
        left.release().await.unwrap();
        drop(left);
        setup.assert_empty().await;
    }
}

// Cancellation.

/// Polls a future so many times, whenever it is woken, and drops it.
async fn polled<F: Future>(future: F, times: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = times;
    std::future::poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        future.as_mut().poll(cx).map(Some)
    })
    .await
}

/// A waiter that is dropped after any number of polls, at any place in the queue, while the store is slow.
#[tokio::test(start_paused = true)]
async fn dropped_after_any_poll_a_waiter_leaves_no_trace_and_holds_no_one_up() {
    for fault in [None, Some(Fault::SlowRequest(millis(10))), Some(Fault::SlowAnswer(millis(10)))] {
        for place in 0..3 {
            let mut ended = [false; 2];
            // The last one is not dropped: a waiter that yields is polled often.
            for polls in (0..60).chain([usize::MAX]) {
                for (setup, ended) in Setup::both().into_iter().zip(&mut ended) {
                    *ended = dropped_after(&setup, fault, place, polls).await;
                }
            }
            assert_eq!(ended, [true; 2], "more polls than were tried: {fault:?}, {place}");
        }
    }
}

async fn dropped_after(setup: &Setup, fault: Option<Fault>, place: usize, polls: usize) -> bool {
    let what = format!("{fault:?}, place {place}, {polls} polls, {}", setup.store.name());
    let (entered, mut order) = mpsc::unbounded_channel();
    let guard = setup.lock().await;
    for number in 0..place {
        setup.enqueue(Mode::Exclusive, number, &entered, millis(5)).await;
    }
    if let Some(fault) = fault {
        setup.faults.always(Op::Attempt, fault);
        setup.faults.always(Op::Release, fault);
    }
    let dropped = tokio::spawn({
        let keeper = setup.keeper.clone();
        let lock = async move {
            let guard = keeper.mutex("a").lock().await.unwrap();
            guard.release().await.unwrap();
        };
        async move { polled(lock, polls).await.is_some() }
    });
    sleep(millis(50)).await;
    let (last, mutex) = (entered.clone(), setup.keeper.mutex("a"));
    tokio::spawn(async move {
        let guard = mutex.lock().await.unwrap();
        last.send(100).unwrap();
        guard.release().await.unwrap();
    });
    sleep(millis(50)).await;
    guard.release().await.unwrap();
    for number in (0..place).chain([100]) {
        let next = timeout(TTL / 4, order.recv()).await;
        assert_eq!(next, Ok(Some(number)), "{what}");
    }
    let ended = timeout(TTL, dropped).await.unwrap_or(Ok(false)).unwrap();
    setup.faults.none();
    setup.keeper.close().await;
    setup.assert_empty().await;
    ended
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_gives_up_passes_its_turn_on() {
    for way in ["dropped", "released"] {
        for setup in Setup::both() {
            let mut holder = setup.waiter();
            assert!(is_granted(&mut *holder).await);
            let (mut first, mut second) = (setup.waiter(), setup.waiter());
            assert!(!is_granted(&mut *first).await && !is_granted(&mut *second).await);
            assert_eq!((listen(&mut *first, 1), listen(&mut *second, 1)), (None, None));
            holder.release().await.unwrap();
            if way == "dropped" && !setup.store.capabilities().leases {
                drop(first);
            } else {
                first.release().await.unwrap();
            }
            let change = listen(&mut *second, 1);
            assert!(is_handed_over(change), "{way}: {change:?} on {}", setup.store.name());
        }
    }
}

/// A release whose future is dropped before its answer may have reached the store.
#[tokio::test(start_paused = true)]
async fn a_release_that_is_dropped_wakes_the_next_one() {
    let setup = Setup::new(Unordered::silent());
    let mut holder = setup.waiter();
    assert!(is_granted(&mut *holder).await);
    let mut waiter = setup.waiter();
    assert!(!is_granted(&mut *waiter).await);
    setup.faults.once(Op::Release, Fault::NoAnswer);
    let mut release = holder.release();
    assert!(poll_once(release.as_mut()).is_pending());
    assert_eq!(listen(&mut *waiter, 1), None);
    drop(release);
    assert!(is_handed_over(listen(&mut *waiter, 1)));
}

/// The place is free before the store has answered: the next one asks meanwhile.
#[tokio::test(start_paused = true)]
async fn a_release_that_hangs_holds_up_no_waiter_of_a_fair_store() {
    let setup = Setup::new(Memory::new());
    let mut holder = setup.waiter();
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(3).await;
    let [first, _second, third] = &mut waiters[..] else { panic!("three") };
    let mut third = Listening::new(&mut **third);
    assert_eq!(third.poll(), None);
    setup.faults.once(Op::Release, Fault::Hangs);
    let mut release = first.release();
    assert!(poll_once(release.as_mut()).is_pending());
    assert!(third.is_woken());
}

/// On a store without notices, only this process can tell.
#[tokio::test(start_paused = true)]
async fn a_holder_that_is_dropped_wakes_the_next_one() {
    let setup = Setup::new(Unordered::silent());
    for queue in [true, false] {
        let mut holder = setup.claim(|spec| spec.queue = queue);
        assert!(is_granted(&mut *holder).await);
        let mut waiter = setup.waiter();
        assert!(!is_granted(&mut *waiter).await);
        assert_eq!(listen(&mut *waiter, 1), None);
        drop(holder);
        assert!(is_handed_over(listen(&mut *waiter, 1)));
    }
}

/// The store granted, and its answer was lost: asked again, it grants, whatever the place in the queue.
#[tokio::test(start_paused = true)]
async fn a_lost_answer_is_asked_for_again() {
    for setup in Setup::both() {
        let mut first = setup.waiter();
        setup.faults.once(Op::Attempt, Fault::LostAnswer);
        assert!(first.attempt(None).await.is_err());
        let mut second = setup.waiter();
        assert!(!is_granted(&mut *second).await);
        assert!(is_granted(&mut *first).await, "{}", setup.store.name());
        assert!(is_granted(&mut *first).await, "asked again, it still holds");
        assert_eq!(first.release().await.unwrap(), Release::Released);
        assert!(is_granted(&mut *second).await);
    }
}

/// The look-ahead of a store without an order has asked out of turn.
#[tokio::test(start_paused = true)]
async fn a_lost_answer_is_asked_for_again_behind_the_front() {
    let setup = Setup::new(Unordered::silent());
    let mut holder = setup.claim(|_| ());
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(2).await;
    holder.release().await.unwrap();
    setup.faults.once(Op::Attempt, Fault::LostAnswer);
    tokio::time::advance(TURN).await;
    assert_eq!(listen(&mut *waiters[1], 1), Some(Change::LookAgain));
    assert!(is_granted(&mut *waiters[1]).await, "the store has granted it");
}

/// The first error ends an acquire. The next one must not be told that others hold the lock.
#[tokio::test(start_paused = true)]
async fn a_store_that_is_down_is_an_error_each_time() {
    for setup in Setup::both() {
        setup.faults.always(Op::Attempt, Fault::Refused);
        for _ in 0..3 {
            let error = timeout(secs(1), setup.keeper.mutex("a").lock()).await.expect("an answer");
            assert_eq!(error.unwrap_err().kind(), ErrorKind::Unavailable);
        }
        setup.faults.none();
        setup.lock().await.release().await.unwrap();
        setup.assert_empty().await;
    }
}

/// Those behind the front do not ask the store. They must not take its silence for an answer.
#[tokio::test(start_paused = true)]
async fn a_store_that_goes_down_fails_all_waiters_after_a_ttl() {
    let one_by_one = Setup::with(Memory::new(), LocalQueue::one_by_one);
    for setup in Setup::both().into_iter().chain([one_by_one]) {
        let _guard = setup.lock().await;
        let mut waiters = tokio::task::JoinSet::new();
        for _ in 0..5 {
            let mutex = setup.keeper.mutex("a");
            waiters.spawn(async move { mutex.lock().await.map(drop) });
        }
        setup.until_queued("a", 5).await;
        sleep(TTL * 2).await;
        assert_eq!(waiters.try_join_next().map(drop), None);
        let start = Instant::now();
        setup.faults.always(Op::Attempt, Fault::Refused);
        while let Some(waiter) = waiters.join_next().await {
            assert_eq!(waiter.unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
        }
        let took = start.elapsed();
        assert!(took < TTL + secs(2), "{took:?} on {}", setup.store.name());
    }
}

/// A front that has met an error and is not polled any more says nothing about the store.
#[tokio::test(start_paused = true)]
async fn the_error_of_a_front_is_forgotten() {
    for setup in
        [Setup::new(Unordered::silent()), Setup::with(Memory::new(), LocalQueue::one_by_one)]
    {
        let mut holder = setup.claim(|_| ());
        assert!(is_granted(&mut *holder).await);
        let mut waiters = setup.refused(3).await;
        setup.faults.once(Op::Attempt, Fault::Refused);
        assert!(waiters[0].attempt(None).await.is_err());
        assert!(waiters[2].attempt(None).await.is_err());
        tokio::time::advance(TTL / 2).await;
        assert!(!is_granted(&mut *waiters[2]).await);
        setup.faults.once(Op::Attempt, Fault::Refused);
        assert!(waiters[0].attempt(None).await.is_err());
        assert!(waiters[2].attempt(None).await.is_err());
        assert!(!is_granted(&mut *waiters[0]).await);
        assert!(!is_granted(&mut *waiters[2]).await, "the store has answered");
    }
}

/// An attempt at the head that hangs is given up by the engine. Those behind it need not wait for that.
#[tokio::test(start_paused = true)]
async fn an_attempt_that_hangs_does_not_stop_those_behind_it() {
    for setup in Setup::both() {
        setup.faults.once(Op::Attempt, Fault::Hangs);
        let hangs = tokio::spawn({
            let mutex = setup.keeper.mutex("a");
            async move { mutex.lock().await.map(drop) }
        });
        tokio::task::yield_now().await;
        let start = Instant::now();
        setup.lock().await.release().await.unwrap();
        assert!(
            start.elapsed() <= TTL + secs(1),
            "{:?} on {}",
            start.elapsed(),
            setup.store.name()
        );
        let _ = hangs.await.unwrap();
        setup.assert_empty().await;
    }
}

// What passes through.

#[tokio::test(start_paused = true)]
async fn a_downgrade_lets_waiting_readers_in() {
    for setup in [Setup::new(Memory::new()), Setup::new(Unordered::silent())] {
        let mut writer = setup.waiter();
        assert!(is_granted(&mut *writer).await);
        let mut readers = Vec::new();
        for _ in 0..2 {
            let mut reader = setup.claim(|spec| (spec.mode, spec.queue) = (Mode::Shared, true));
            assert!(!is_granted(&mut *reader).await);
            readers.push(reader);
        }
        writer.downgrade(TTL).await.unwrap();
        for reader in &mut readers {
            assert!(is_handed_over(listen(&mut **reader, 1)), "{}", setup.store.name());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_broken_lock_is_lost_and_goes_to_the_next_one() {
    for setup in Setup::both() {
        let (entered, mut order) = mpsc::unbounded_channel();
        let guard = setup.lock().await;
        setup.enqueue(Mode::Exclusive, 0, &entered, secs(1)).await;
        assert_eq!(setup.keeper.inspect().unwrap().break_lock("a").await.unwrap(), 1);
        timeout(TTL / 4, guard.lost()).await.expect("told of its loss");
        assert_eq!(timeout(TTL / 4, order.recv()).await, Ok(Some(0)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_ticket_is_adopted_and_its_release_wakes_the_next_one() {
    let setup = Setup::new(Memory::new());
    let ticket = setup.lock().await.detach().unwrap();
    let (entered, mut order) = mpsc::unbounded_channel();
    setup.enqueue(Mode::Exclusive, 0, &entered, secs(1)).await;
    let adopted = setup.keeper.adopt(ticket).await.unwrap();
    adopted.release().await.unwrap();
    assert_eq!(timeout(millis(20), order.recv()).await, Ok(Some(0)));
}

/// The floor of the last attempt counts for a grant that a notice leads to.
#[tokio::test(start_paused = true)]
async fn a_hand_over_has_a_fence_at_or_above_the_floor() {
    let setup = Setup::new(Memory::new());
    let mut holder = setup.waiter();
    let Attempt::Granted(grant) = holder.attempt(None).await.unwrap() else { panic!("free") };
    let floor = grant.fence.and_then(|fence| Fence::new(fence.get() + 1000));
    let mut waiters = [setup.waiter(), setup.waiter(), setup.waiter()];
    for waiter in &mut waiters {
        assert!(!matches!(waiter.attempt(floor).await.unwrap(), Attempt::Granted(_)));
    }
    holder.release().await.unwrap();
    for waiter in &mut waiters {
        let Some(Change::Granted(grant)) = listen(&mut **waiter, 1) else { panic!("handed over") };
        assert!(grant.fence >= floor);
        waiter.release().await.unwrap();
    }
}

// Inspection.

#[tokio::test(start_paused = true)]
async fn inspection_shows_every_waiter_once_in_the_order_of_the_queue() {
    for setup in Setup::both() {
        let owners: Vec<Owner> = (0..6).map(|_| Owner::random()).collect();
        let mut claims = Vec::new();
        for owner in &owners {
            let mut claim = setup.claim(|spec| (spec.owner, spec.queue) = (*owner, true));
            claim.attempt(None).await.unwrap();
            claims.push(claim);
        }
        let waiters: Vec<_> = owners[1..].iter().copied().map(Some).collect();
        assert_eq!(setup.waiters("a").await, waiters, "{}", setup.store.name());
        let listed = setup.left().await;
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].holders.len(), 1);
        assert_eq!(listed[0].waiters.len(), 5);
        assert!(setup.keeper.inspect().unwrap().list("b").await.unwrap().is_empty());
        claims[3].release().await.unwrap();
        assert_eq!(setup.waiters("a").await.len(), 4);
    }
}

#[tokio::test(start_paused = true)]
async fn inspection_shows_waiters_of_a_lock_that_the_store_does_not_list() {
    let setup = Setup::new(Unordered::default());
    let mut holder = setup.claim(|_| ());
    assert!(is_granted(&mut *holder).await);
    let mut waiter = setup.waiter();
    assert!(!is_granted(&mut *waiter).await);
    holder.release().await.unwrap();
    assert_eq!(setup.waiters("a").await.len(), 1, "it has not come yet");
}

// Names.

#[tokio::test(start_paused = true)]
async fn names_and_kinds_have_queues_of_their_own() {
    let setup = Setup::new(Memory::new());
    let _mutex = setup.keeper.mutex("a").lock().await.unwrap();
    let _waiting = unpolled(&setup);
    let permits = setup.keeper.semaphore("a", 1);
    let one = permits.acquire().await.unwrap();
    assert!(permits.try_acquire().await.unwrap().is_none());
    one.release().await.unwrap();
    setup.keeper.mutex("b").lock().await.unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn many_names_are_served_and_forgotten() {
    for setup in Setup::both() {
        let mut tasks = Vec::new();
        for name in 0..500 {
            for _ in 0..4 {
                let mutex = setup.keeper.mutex(format!("name-{name}"));
                tasks.push(tokio::spawn(async move {
                    let guard = mutex.lock().await.unwrap();
                    sleep(millis(10)).await;
                    guard.release().await.unwrap();
                }));
            }
        }
        for task in tasks {
            timeout(TTL, task).await.unwrap().unwrap();
        }
        setup.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn permits_of_slots_are_waited_for_in_order() {
    let store = LocalQueue::new(Arc::new(Unordered::default()));
    let keeper = Keeper::new(Slots::new(Arc::new(store))).ttl(TTL);
    let permits = keeper.semaphore("a", 2);
    let both = permits.acquire_many(2).await.unwrap();
    let (entered, mut order) = mpsc::unbounded_channel();
    for number in 0..5 {
        let (permits, entered) = (permits.clone(), entered.clone());
        tokio::spawn(async move {
            let guard = permits.acquire().await.unwrap();
            entered.send(number).unwrap();
            sleep(secs(1)).await;
            guard.release().await.unwrap();
        });
        sleep(millis(10)).await;
    }
    both.release().await.unwrap();
    for number in 0..5 {
        assert_eq!(timeout(TTL, order.recv()).await, Ok(Some(number)));
    }
}

/// Claims of two threads that leave at the same moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claims_that_are_dropped_on_several_threads_at_once_leave_no_queue() {
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
        setup.assert_empty_now();
    }
}

impl Setup {
    /// No name is known any more.
    fn assert_empty_now(&self) {
        let shown = format!("{:?}", self.store);
        assert!(shown.contains("locks: {}, semaphores: {}"), "a queue is left: {shown}");
    }
}

// Who talks to the store, and who is woken, step by step.

/// Counts how often it is woken.
#[derive(Default)]
struct Wakes(AtomicUsize);

impl std::task::Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A claim that listens, and is polled only by hand.
struct Listening<'a> {
    changed: BoxFuture<'a, Change>,
    wakes: Arc<Wakes>,
}

impl<'a> Listening<'a> {
    fn new(claim: &'a mut dyn Claim) -> Self {
        Self { changed: claim.changed(), wakes: Arc::default() }
    }

    fn poll(&mut self) -> Option<Change> {
        let waker = Waker::from(self.wakes.clone());
        self.wakes.0.store(0, Ordering::Relaxed);
        match self.changed.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(change) => Some(change),
            Poll::Pending => None,
        }
    }

    fn is_woken(&self) -> bool {
        self.wakes.0.load(Ordering::Relaxed) > 0
    }
}

impl Setup {
    async fn refused(&self, count: usize) -> Vec<Box<dyn Claim>> {
        let mut waiters = Vec::new();
        for _ in 0..count {
            let mut waiter = self.waiter();
            assert!(!is_granted(&mut *waiter).await);
            waiters.push(waiter);
        }
        waiters
    }
}

#[tokio::test(start_paused = true)]
async fn all_readers_at_the_front_ask_the_store() {
    for setup in Setup::both() {
        let mut holder = setup.waiter();
        assert!(is_granted(&mut *holder).await);
        let mut readers = Vec::new();
        for _ in 0..5 {
            let mut reader = setup.claim(|spec| (spec.mode, spec.queue) = (Mode::Shared, true));
            assert!(!is_granted(&mut *reader).await);
            readers.push(reader);
        }
        assert_eq!(setup.faults.asked(Op::Attempt), 6, "{}", setup.store.name());
    }
}

/// The waits of two claims may overtake each other on their way to the store.
#[tokio::test(start_paused = true)]
async fn one_by_one_only_the_first_waiter_asks_the_store_readers_included() {
    for mode in [Mode::Exclusive, Mode::Shared] {
        let setup = Setup::with(Memory::new(), LocalQueue::one_by_one);
        let mut holder = setup.waiter();
        assert!(is_granted(&mut *holder).await);
        let mut waiters = Vec::new();
        for _ in 0..4 {
            let mut waiter = setup.claim(|spec| (spec.mode, spec.queue) = (mode, true));
            assert!(!is_granted(&mut *waiter).await);
            waiters.push(waiter);
        }
        assert_eq!(setup.faults.asked(Op::Attempt), 2, "{mode:?}");
        let mut waiters = waiters.iter_mut();
        let [first, second, third] = [(); 3].map(|()| waiters.next().unwrap());
        let mut second = Listening::new(&mut **second);
        let mut third = Listening::new(&mut **third);
        assert_eq!((second.poll(), third.poll()), (None, None));
        assert_eq!(setup.faults.asked(Op::Attempt), 2, "{mode:?}");
        holder.release().await.unwrap();
        assert!(is_handed_over(listen(&mut **first, 1)));
        assert!(second.is_woken() && !third.is_woken(), "{mode:?}");
        // A reader is granted the lock beside the first one. A writer waits in the store from now on.
        let polled = second.poll();
        assert_eq!(is_handed_over(polled), mode == Mode::Shared);
        assert_eq!(setup.faults.asked(Op::Attempt), 3, "{mode:?}");
        assert_eq!(third.is_woken(), mode == Mode::Shared);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_sends_no_extra_attempt_if_the_store_hands_over() {
    let setup = Setup::new(Memory::new());
    let mut holder = setup.waiter();
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(2).await;
    holder.release().await.unwrap();
    let asked = setup.faults.asked(Op::Attempt);
    assert!(is_handed_over(listen(&mut *waiters[0], 1)));
    assert_eq!(setup.faults.asked(Op::Attempt), asked);
}

/// The store sees claims in the order of the queue.
#[tokio::test(start_paused = true)]
async fn the_look_ahead_asks_a_fair_store_once_the_front_has_its_answer() {
    for is_held in [true, false] {
        let setup = Setup::new(Memory::new());
        let mut holder = setup.claim(|_| ());
        if is_held {
            assert!(is_granted(&mut *holder).await);
        }
        let before = setup.faults.asked(Op::Attempt);
        setup.faults.once(Op::Attempt, Fault::SlowRequest(secs(1)));
        let (mut front, mut look_ahead) = (setup.waiter(), setup.waiter());
        let mut asking = front.attempt(None);
        assert!(poll_once(asking.as_mut()).is_pending());
        assert!(!is_granted(&mut *look_ahead).await);
        let mut look_ahead = Listening::new(&mut *look_ahead);
        assert_eq!(look_ahead.poll(), None);
        assert_eq!(setup.faults.asked(Op::Attempt) - before, 1, "overtook the front");
        let answer = asking.await.unwrap();
        assert_eq!(matches!(answer, Attempt::Granted(_)), !is_held);
        assert!(look_ahead.is_woken());
        assert_eq!(look_ahead.poll(), None);
        assert_eq!(setup.faults.asked(Op::Attempt) - before, 2);
    }
}

#[tokio::test(start_paused = true)]
async fn the_look_ahead_asks_a_fair_store_at_its_refresh_if_the_front_has_no_answer() {
    let setup = Setup::new(Memory::new());
    setup.faults.once(Op::Attempt, Fault::Hangs);
    let (mut front, mut look_ahead) = (setup.waiter(), setup.waiter());
    let mut hangs = front.attempt(None);
    assert!(poll_once(hangs.as_mut()).is_pending());
    assert!(!is_granted(&mut *look_ahead).await);
    tokio::time::advance(TTL / 3).await;
    assert!(is_granted(&mut *look_ahead).await);
}

/// One that waits behind a front that does not come is told when that is passed over.
#[tokio::test(start_paused = true)]
async fn the_waiter_behind_one_that_is_passed_over_is_woken() {
    let setup = Setup::new(Unordered::silent());
    let mut holder = setup.claim(|_| ());
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(4).await;
    let [_unpolled, second, _third, fourth] = &mut waiters[..] else { panic!("four") };
    let mut second = Listening::new(&mut **second);
    assert_eq!(second.poll(), None);
    holder.release().await.unwrap();
    assert!(!second.is_woken());
    tokio::time::advance(millis(200)).await;
    assert!(!is_granted(&mut **fourth).await);
    assert!(second.is_woken());
    assert!(is_handed_over(second.poll()));
}

/// Woken a moment ago, it may come yet.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_was_just_woken_is_not_passed_over() {
    let setup = Setup::new(Unordered::silent());
    let mut holder = setup.claim(|_| ());
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(3).await;
    holder.release().await.unwrap();
    assert!(!is_granted(&mut *waiters[2]).await && !is_granted(&mut *waiters[1]).await);
    assert!(is_handed_over(listen(&mut *waiters[0], 1)));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_was_passed_over_and_comes_is_the_first_again() {
    let setup = Setup::new(Unordered::silent());
    let mut holder = setup.claim(|_| ());
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(3).await;
    let [first, second, third] = &mut waiters[..] else { panic!("three") };
    // The second's refresh calls the first, and the third's passes it over.
    tokio::time::advance(millis(200)).await;
    assert!(!is_granted(&mut **second).await);
    tokio::time::advance(millis(200)).await;
    assert!(!is_granted(&mut **third).await);
    assert_eq!(listen(&mut **first, 1), None);
    holder.release().await.unwrap();
    assert!(!is_handed_over(listen(&mut **second, 1)), "overtook the first");
    assert!(is_handed_over(listen(&mut **first, 1)));
}

/// Time that the front has had after one call does not count for the next call.
#[tokio::test(start_paused = true)]
async fn the_look_ahead_leaves_a_turn_to_the_front_after_each_call() {
    let setup = Setup::new(Unordered::silent());
    let mut holder = setup.claim(|_| ());
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(2).await;
    let [front, look_ahead] = &mut waiters[..] else { panic!("two") };
    holder.release().await.unwrap();
    // The front comes, and finds that a try was faster.
    assert!(is_granted(&mut *holder).await);
    assert!(!is_granted(&mut **front).await);
    tokio::time::advance(TURN * 9 / 10).await;
    holder.release().await.unwrap();
    tokio::time::advance(TURN / 2).await;
    assert_ne!(setup.faults.asked(Op::Attempt), 0);
    let asked = setup.faults.asked(Op::Attempt);
    assert!(!is_handed_over(listen(&mut **look_ahead, 1)), "overtook the front");
    assert_eq!(setup.faults.asked(Op::Attempt), asked);
    tokio::time::advance(TURN / 2).await;
    assert!(is_handed_over(listen(&mut **look_ahead, 1)), "the front has not come");
}

/// No notice has reached the front.
#[tokio::test(start_paused = true)]
async fn the_refresh_of_the_look_ahead_makes_the_front_ask() {
    let store = Unordered::silent();
    let setup = Setup::new(store.clone());
    let mut elsewhere = elsewhere(&store).await;
    let mut waiters = setup.refused(2).await;
    let [front, look_ahead] = &mut waiters[..] else { panic!("two") };
    let mut front = Listening::new(&mut **front);
    assert_eq!(front.poll(), None);
    elsewhere.release().await.unwrap();
    assert!(!front.is_woken());
    tokio::time::advance(TTL / 3).await;
    assert!(!is_granted(&mut **look_ahead).await);
    assert!(front.is_woken());
    assert!(is_handed_over(front.poll()));
}

/// Another process releases, and the front is not polled.
#[tokio::test(start_paused = true)]
async fn the_look_ahead_hears_of_a_release_elsewhere() {
    // The engine pauses between two attempts. Within that time it has an alarm, and need not be told.
    for (waited, change) in [(Duration::ZERO, None), (TURN, Some(Change::LookAgain))] {
        let store = Unordered::default();
        let setup = Setup::new(store.clone());
        let mut elsewhere = elsewhere(&store).await;
        let mut front = setup.waiter();
        assert!(!is_granted(&mut *front).await);
        let mut look_ahead = setup.waiter();
        assert_eq!(look_ahead.attempt(None).await.unwrap(), AFTER_A_TURN);
        tokio::time::advance(waited).await;
        let mut listening = Listening::new(&mut *look_ahead);
        assert_eq!(listening.poll(), None);
        elsewhere.release().await.unwrap();
        assert!(listening.is_woken());
        assert_eq!(listening.poll(), change);
        drop(listening);
        if change.is_some() {
            assert_eq!(look_ahead.attempt(None).await.unwrap(), AFTER_A_TURN);
        }
        tokio::time::advance(TURN).await;
        assert!(is_granted(&mut *look_ahead).await);
    }
}

/// The front comes within its turn.
#[tokio::test(start_paused = true)]
async fn the_look_ahead_does_not_pass_a_front_that_comes() {
    let store = Unordered::default();
    let setup = Setup::new(store.clone());
    let mut elsewhere = elsewhere(&store).await;
    let mut waiters = setup.refused(2).await;
    let [front, look_ahead] = &mut waiters[..] else { panic!("two") };
    elsewhere.release().await.unwrap();
    assert_eq!(listen(&mut **look_ahead, 1), None);
    tokio::time::advance(TURN / 2).await;
    assert!(is_handed_over(listen(&mut **front, 1)));
    tokio::time::advance(TURN).await;
    assert!(!is_granted(&mut **look_ahead).await);
}

/// Each lock file that is closed gives a notice, also those of waiters that leave.
#[tokio::test(start_paused = true)]
async fn notices_are_ignored_while_another_claim_of_the_process_holds_the_lock() {
    let store = Unordered::default();
    let setup = Setup::new(store.clone());
    let mut holder = setup.waiter();
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(3).await;
    holder.release().await.unwrap();
    assert!(is_handed_over(listen(&mut *waiters[0], 1)));
    let asked = setup.faults.asked(Op::Attempt);
    let [granted, front, look_ahead] = &mut waiters[..] else { panic!("three") };
    let (mut front, mut look_ahead) =
        (Listening::new(&mut **front), Listening::new(&mut **look_ahead));
    assert_eq!((front.poll(), look_ahead.poll()), (None, None));
    store.break_lock(&Name::new("b").unwrap()).await.unwrap();
    assert!(!front.is_woken(), "it waits for the release alone");
    assert_eq!(look_ahead.poll(), None);
    assert!(!look_ahead.is_woken(), "it yields to the front");
    assert_eq!(setup.faults.asked(Op::Attempt), asked);
    granted.release().await.unwrap();
    assert!(is_handed_over(front.poll()));
}

/// A hold that is lost ends without a release.
#[tokio::test(start_paused = true)]
async fn a_lost_hold_wakes_the_next_one() {
    for by_renewal in [true, false] {
        let store = Unordered::default();
        let setup = Setup::new(store.clone());
        let mut holder = setup.waiter();
        assert!(is_granted(&mut *holder).await);
        let mut waiters = setup.refused(2).await;
        holder.release().await.unwrap();
        assert!(is_handed_over(listen(&mut *waiters[0], 1)));
        let [granted, front] = &mut waiters[..] else { panic!("two") };
        let mut front = Listening::new(&mut **front);
        assert_eq!(front.poll(), None);
        store.break_lock(&Name::new("a").unwrap()).await.unwrap();
        assert!(!front.is_woken(), "the loss is not known yet");
        if by_renewal {
            granted.renew(TTL).await.unwrap();
        } else {
            assert!(listen(&mut **granted, 1).is_some());
        }
        assert!(front.is_woken());
        assert!(is_handed_over(front.poll()));
    }
}

/// The holder learns from its release that the hold was gone.
#[tokio::test(start_paused = true)]
async fn a_loss_that_is_found_by_the_release_wakes_the_next_one() {
    let store = Unordered::default();
    let setup = Setup::new(store.clone());
    let mut holder = setup.waiter();
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(2).await;
    holder.release().await.unwrap();
    assert!(is_handed_over(listen(&mut *waiters[0], 1)));
    let [granted, front] = &mut waiters[..] else { panic!("two") };
    let mut front = Listening::new(&mut **front);
    assert_eq!(front.poll(), None);
    store.break_lock(&Name::new("a").unwrap()).await.unwrap();
    assert_eq!(granted.release().await.unwrap(), Release::WasNotHeld);
    assert!(front.is_woken());
    assert!(is_handed_over(front.poll()));
}

/// Another process has the lock by the time the holder asks again.
#[tokio::test(start_paused = true)]
async fn a_loss_that_is_found_by_an_attempt_wakes_the_next_one() {
    let store = Unordered::default();
    let setup = Setup::new(store.clone());
    let mut holder = setup.waiter();
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(2).await;
    holder.release().await.unwrap();
    assert!(is_handed_over(listen(&mut *waiters[0], 1)));
    let [granted, front] = &mut waiters[..] else { panic!("two") };
    let mut front = Listening::new(&mut **front);
    assert_eq!(front.poll(), None);
    store.break_lock(&Name::new("a").unwrap()).await.unwrap();
    let mut other = elsewhere(&store).await;
    assert!(!is_granted(&mut **granted).await);
    assert_eq!(front.poll(), None);
    other.release().await.unwrap();
    assert!(front.is_woken(), "it listens to the store again");
    assert!(is_handed_over(front.poll()));
}

/// A waker that owns a claim of the same store, as that of an executor may own a task.
struct Owning {
    _claim: std::sync::Mutex<Option<Box<dyn Claim>>>,
}

impl std::task::Wake for Owning {
    fn wake(self: Arc<Self>) {}
}

#[tokio::test]
async fn a_waker_that_is_dropped_may_drop_a_claim() {
    for replaced in [true, false] {
        let setup = Setup::new(Memory::new());
        let mut holder = setup.waiter();
        assert!(is_granted(&mut *holder).await);
        let mut waiters = setup.refused(2).await;
        let owning = Owning { _claim: std::sync::Mutex::new(waiters.pop()) };
        let waker = Waker::from(Arc::new(owning));
        let mut waiter = waiters.pop().unwrap();
        assert!(waiter.changed().as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(waker);
        let (done, is_done) = std::sync::mpsc::channel();
        let runtime = tokio::runtime::Handle::current();
        std::thread::spawn(move || {
            let _entered = runtime.enter();
            if replaced {
                assert_eq!(listen(&mut *waiter, 1), None);
            }
            drop(waiter);
            done.send(()).unwrap();
        });
        is_done.recv_timeout(secs(10)).expect("no deadlock");
    }
}

/// It may have to keep readers of other processes out.
#[tokio::test(start_paused = true)]
async fn a_writer_that_comes_to_the_front_behind_readers_asks() {
    let setup = Setup::new(Unordered::silent());
    let mut holder = setup.claim(|_| ());
    assert!(is_granted(&mut *holder).await);
    let mut reader = setup.claim(|spec| (spec.mode, spec.queue) = (Mode::Shared, true));
    assert!(!is_granted(&mut *reader).await);
    let mut waiters = setup.refused(1).await;
    let mut writer = Listening::new(&mut *waiters[0]);
    assert_eq!(writer.poll(), None);
    holder.release().await.unwrap();
    assert!(is_handed_over(listen(&mut *reader, 1)));
    assert!(writer.is_woken());
    let asked = setup.faults.asked(Op::Attempt);
    assert_eq!(writer.poll(), None);
    assert_eq!(setup.faults.asked(Op::Attempt), asked + 1);
}

/// A claim of another process.
async fn elsewhere(store: &Unordered) -> Box<dyn Claim> {
    let background = Background::new(tokio::runtime::Handle::current());
    let spec = ClaimSpec::new(Name::new("a").unwrap(), TTL, background);
    let mut holder = store.claim(spec).unwrap();
    assert!(is_granted(&mut *holder).await);
    holder
}

// Odd stores.

/// A store that says the same all the time.
#[derive(Debug, Clone, Copy)]
struct Scripted {
    fair: bool,
    attempt: Attempt,
    changed: Change,
}

impl Backend for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { fair: self.fair, push: true, ..Capabilities::default() }
    }

    fn claim(&self, _spec: ClaimSpec) -> lockkeeper_core::Result<Box<dyn Claim>> {
        Ok(Box::new(*self))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        None
    }
}

impl Claim for Scripted {
    fn attempt(
        &mut self,
        _floor: Option<Fence>,
    ) -> BoxFuture<'_, lockkeeper_core::Result<Attempt>> {
        Box::pin(std::future::ready(Ok(self.attempt)))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(std::future::ready(self.changed))
    }

    fn renew(&mut self, _ttl: Duration) -> BoxFuture<'_, lockkeeper_core::Result<Renewal>> {
        Box::pin(std::future::ready(Ok(Renewal::Held)))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, lockkeeper_core::Result<Renewal>> {
        self.renew(ttl)
    }

    fn release(&mut self) -> BoxFuture<'_, lockkeeper_core::Result<Release>> {
        Box::pin(std::future::ready(Ok(Release::Released)))
    }
}

const REFUSED: Attempt = Attempt::Contended { retry: Retry::OnNotify, holder: Holder::Unknown };

/// Its thread would never do anything else.
#[tokio::test(start_paused = true)]
async fn a_store_that_gives_notice_without_end_is_left_to_the_engine() {
    for (fair, follow_ups) in [(true, 0), (false, 16)] {
        let setup = Setup::new(Scripted { fair, attempt: REFUSED, changed: Change::LookAgain });
        let mut front = setup.waiter();
        assert!(!is_granted(&mut *front).await);
        assert_eq!(listen(&mut *front, 1), Some(Change::LookAgain));
        assert_eq!(setup.faults.asked(Op::Attempt), 1 + follow_ups);
    }
}

/// The engine counts the lease of a hand-over from the last answer "contended". If that was given without asking the
/// store, the grant may be older.
#[tokio::test(start_paused = true)]
async fn a_hand_over_that_may_be_older_than_the_last_answer_is_asked_for_again() {
    let grant = |seconds| Grant { fence: None, valid_for: Some(secs(seconds)) };
    let store = Scripted { fair: false, attempt: REFUSED, changed: Change::Granted(grant(1)) };
    let setup = Setup::new(store);
    let mut front = setup.waiter();
    assert!(!is_granted(&mut *front).await);
    let mut look_ahead = setup.waiter();
    assert!(!is_granted(&mut *look_ahead).await);
    assert_eq!(setup.faults.asked(Op::Attempt), 1, "answered without asking the store");
    listen(&mut *look_ahead, 1);
    assert_eq!(setup.faults.asked(Op::Attempt), 2);
}

/// The engine was told to wait for a notice, and the store says that there will be none in time.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_moves_up_and_cannot_be_told_is_left_to_the_engine() {
    let soon = Retry::After(TTL / 4);
    let late = Retry::After(TTL / 3);
    let grant = Grant { fence: None, valid_for: None };
    for (retry, asks) in
        [(Retry::Poll, true), (soon, true), (late, false), (Retry::OnNotify, false)]
    {
        let attempt = Attempt::Contended { retry, holder: Holder::Unknown };
        let changed = Change::Granted(grant);
        let setup = Setup::new(Scripted { fair: true, attempt, changed });
        let mut waiters = setup.refused(3).await;
        waiters[0].release().await.unwrap();
        let expected = if asks { Change::LookAgain } else { changed };
        assert_eq!(listen(&mut *waiters[2], 1), Some(expected), "{retry:?}");
    }
}
