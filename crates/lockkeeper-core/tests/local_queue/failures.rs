//! Cancellation, lost answers and a store that fails.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;

use lockkeeper_core::{Backend, Change, ErrorKind, LocalQueue, Memory, Mode, Release};
use lockkeeper_testkit::{Fault, Op};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use crate::common::unordered::Unordered;
use crate::common::{millis, secs};
use crate::{FRONT_GRACE, Listening, Setup, TTL, is_granted, is_handed_off, listen, poll_once};

/// Polls a future up to `times` times and drops it.
pub(crate) async fn polled<F: Future>(future: F, times: usize) -> Option<F::Output> {
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

/// At any place in the queue, also on a slow store.
#[tokio::test(start_paused = true)]
async fn a_waiter_dropped_after_any_poll_leaves_no_entry_and_blocks_no_waiter() {
    for fault in [None, Some(Fault::SlowRequest(millis(10))), Some(Fault::SlowAnswer(millis(10)))] {
        for place in 0..3 {
            let mut ended = [false; 2];
            // The last waiter is not dropped: one that yields needs an unknown number of polls.
            for polls in (0..60).chain([usize::MAX]) {
                for (setup, ended) in Setup::both().into_iter().zip(&mut ended) {
                    *ended = dropped_after(&setup, fault, place, polls).await;
                }
            }
            assert_eq!(ended, [true; 2], "needs more polls: {fault:?}, {place}");
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
            assert_eq!((listen(&mut *first), listen(&mut *second)), (None, None));
            holder.release().await.unwrap();
            if way == "dropped" && !setup.store.capabilities().leases {
                drop(first);
            } else {
                first.release().await.unwrap();
            }
            let change = listen(&mut *second);
            assert!(is_handed_off(change), "{way}: {change:?} on {}", setup.store.name());
        }
    }
}

/// The store may have released the lock.
#[tokio::test(start_paused = true)]
async fn a_dropped_release_wakes_the_next_waiter() {
    let setup = Setup::new(Unordered::silent());
    let mut holder = setup.waiter();
    assert!(is_granted(&mut *holder).await);
    let mut waiter = setup.waiter();
    assert!(!is_granted(&mut *waiter).await);
    setup.faults.once(Op::Release, Fault::NoAnswer);
    let mut release = holder.release();
    assert!(poll_once(release.as_mut()).is_pending());
    assert_eq!(listen(&mut *waiter), None);
    drop(release);
    assert!(is_handed_off(listen(&mut *waiter)));
}

/// The waiter leaves the queue before the store answers.
#[tokio::test(start_paused = true)]
async fn a_hung_release_blocks_no_waiter_of_a_fair_store() {
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

/// The store granted the first attempt. The second one goes to the store from any place in the queue.
#[tokio::test(start_paused = true)]
async fn an_attempt_after_a_lost_answer_is_granted() {
    for setup in Setup::both() {
        let mut first = setup.waiter();
        setup.faults.once(Op::Attempt, Fault::LostAnswer);
        assert!(first.attempt(None).await.is_err());
        let mut second = setup.waiter();
        assert!(!is_granted(&mut *second).await);
        assert!(is_granted(&mut *first).await, "{}", setup.store.name());
        assert!(is_granted(&mut *first).await, "it still holds the lock");
        assert_eq!(first.release().await.unwrap(), Release::Released);
        assert!(is_granted(&mut *second).await);
    }
}

/// The look-ahead of an unfair store passed the front.
#[tokio::test(start_paused = true)]
async fn an_attempt_after_a_lost_answer_is_granted_behind_the_front() {
    let setup = Setup::new(Unordered::silent());
    let mut holder = setup.claim(|_| ());
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(2).await;
    holder.release().await.unwrap();
    setup.faults.once(Op::Attempt, Fault::LostAnswer);
    tokio::time::advance(FRONT_GRACE).await;
    assert_eq!(listen(&mut *waiters[1]), Some(Change::LookAgain));
    assert!(is_granted(&mut *waiters[1]).await, "the store has granted it");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_attempt_failed_or_was_dropped_is_woken_by_a_release() {
    for fault in [Fault::Refused, Fault::Hangs] {
        let setup = Setup::new(Unordered::silent());
        let mut holder = setup.waiter();
        assert!(is_granted(&mut *holder).await);
        let mut waiters = setup.refused(1).await;
        setup.faults.once(Op::Attempt, fault);
        assert!(!matches!(poll_once(waiters[0].attempt(None).as_mut()), Poll::Ready(Ok(_))));
        let mut waiter = Listening::new(&mut *waiters[0]);
        assert_eq!(waiter.poll(), None);
        holder.release().await.unwrap();
        assert!(waiter.is_woken() && is_handed_off(waiter.poll()), "{fault:?}");
    }
}

/// The first error ends an acquire. The next acquire must not get "contended".
#[tokio::test(start_paused = true)]
async fn each_lock_on_a_failed_store_is_an_error() {
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

/// Waiters behind the front send no attempts. They must not wait without limit.
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

/// A front that is no longer polled is no evidence that the store fails.
#[tokio::test(start_paused = true)]
async fn the_error_of_a_front_expires() {
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

#[tokio::test(start_paused = true)]
async fn a_hung_attempt_does_not_block_the_waiters_behind_it() {
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
