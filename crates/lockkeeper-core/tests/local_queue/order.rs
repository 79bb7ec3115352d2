//! Order, tries and names.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockkeeper_core::{Backend, Keeper, LocalQueue, Memory, Mode, Release, Slots};
use lockkeeper_testkit::{Fault, Op};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::common::unordered::Unordered;
use crate::common::{millis, secs};
use crate::{
    FRONT_GRACE, Listening, Setup, TTL, is_granted, is_handed_off, listen, poll_once, unpolled,
};

#[tokio::test(start_paused = true)]
async fn waiters_acquire_in_the_order_of_their_attempts() {
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
        // In front of an unfair store, only the front sends an attempt; the look-ahead listens.
        assert_eq!(setup.faults.asked(Op::Attempt), attempts, "{}", setup.store.name());
        sleep(FRONT_GRACE * 10).await;
        let listening = setup.faults.asked(Op::Changed);
        assert!(listening <= 4, "{listening}: others listen to the store");
        sleep(TTL / 4).await;
        // The holder listens, too.
        let others = setup.faults.asked(Op::Changed) - listening;
        assert!(others <= 1, "{others} others listen to the store");
        assert_eq!(setup.faults.asked(Op::Attempt), attempts);
        tasks.iter().for_each(JoinHandle::abort);
        guard.release().await.unwrap();
        setup.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn all_readers_at_the_front_send_attempts() {
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

/// The waits of two claims may reach the store in the wrong order.
#[tokio::test(start_paused = true)]
async fn one_by_one_only_the_first_waiter_sends_an_attempt_readers_included() {
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
        assert!(is_handed_off(listen(&mut **first)));
        assert!(second.is_woken() && !third.is_woken(), "{mode:?}");
        // A reader is granted the lock beside the first one. A writer waits in the store from now on.
        let polled = second.poll();
        assert_eq!(is_handed_off(polled), mode == Mode::Shared);
        assert_eq!(setup.faults.asked(Op::Attempt), 3, "{mode:?}");
        assert_eq!(third.is_woken(), mode == Mode::Shared);
    }
}

#[tokio::test(start_paused = true)]
async fn adjacent_readers_acquire_together_and_do_not_overtake_writers() {
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
async fn a_new_reader_waits_behind_a_waiting_writer() {
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
async fn an_attempt_after_a_release_joins_at_the_back() {
    for setup in Setup::both() {
        let mut holder = setup.waiter();
        assert!(is_granted(&mut *holder).await);
        let (mut first, mut second) = (setup.waiter(), setup.waiter());
        assert!(!is_granted(&mut *first).await && !is_granted(&mut *second).await);
        assert_eq!(holder.release().await.unwrap(), Release::Released);
        assert!(!is_granted(&mut *holder).await, "overtook two waiters on {}", setup.store.name());
        assert!(!is_granted(&mut *second).await, "overtook one waiter on {}", setup.store.name());
        assert!(is_handed_off(listen(&mut *first)));
        first.release().await.unwrap();
        assert!(!is_granted(&mut *holder).await);
        assert!(is_handed_off(listen(&mut *second)));
        second.release().await.unwrap();
        assert!(is_handed_off(listen(&mut *holder)));
        drop((holder, first, second));
        setup.assert_no_queue();
    }
}

#[tokio::test(start_paused = true)]
async fn tasks_that_lock_in_a_loop_take_turns() {
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

#[tokio::test(start_paused = true)]
async fn a_try_is_refused_while_others_wait_only_if_the_store_is_fair() {
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

/// A claim whose first attempt is in flight neither holds nor waits, so the store decides.
#[tokio::test(start_paused = true)]
async fn a_first_attempt_in_flight_does_not_refuse_a_try() {
    let setup = Setup::new(Memory::new());
    setup.faults.once(Op::Attempt, Fault::Hangs);
    let mut first = setup.waiter();
    let mut hangs = first.attempt(None);
    assert!(poll_once(hangs.as_mut()).is_pending());
    assert!(is_granted(&mut *setup.claim(|_| ())).await);
}

#[tokio::test(start_paused = true)]
async fn names_and_kinds_have_separate_queues() {
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
async fn many_names_leave_no_queue() {
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
async fn waiters_for_permits_of_slots_acquire_in_order() {
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
