//! Waiters that are not polled, and the look-ahead that passes them.

use std::time::Duration;

use lockkeeper_core::{Attempt, Backend, Change, Memory, Mode};
use lockkeeper_testkit::{Fault, Op};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use crate::common::unordered::Unordered;
use crate::common::{millis, secs};
use crate::{
    AFTER_GRACE, FRONT_GRACE, Listening, Setup, TTL, elsewhere, is_granted, is_handed_off, listen,
    poll_once, unpolled,
};

#[tokio::test(start_paused = true)]
async fn an_unpolled_front_does_not_block_the_next_waiter() {
    for setup in Setup::both() {
        let (entered, mut order) = mpsc::unbounded_channel();
        let guard = setup.lock().await;
        // A fair store queues the first two waiters itself, so those cannot be passed.
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
async fn two_unpolled_waiters_are_passed_when_the_next_one_refreshes_its_place() {
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

/// It keeps its place at the front.
#[tokio::test(start_paused = true)]
async fn an_unpolled_waiter_that_is_polled_again_acquires() {
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

#[tokio::test(start_paused = true)]
async fn the_waiter_behind_a_passed_one_is_woken() {
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
    assert!(is_handed_off(second.poll()));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_was_just_woken_is_not_passed() {
    let setup = Setup::new(Unordered::silent());
    let mut holder = setup.claim(|_| ());
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(3).await;
    holder.release().await.unwrap();
    assert!(!is_granted(&mut *waiters[2]).await && !is_granted(&mut *waiters[1]).await);
    assert!(is_handed_off(listen(&mut *waiters[0])));
}

#[tokio::test(start_paused = true)]
async fn a_passed_waiter_that_is_polled_again_is_the_front() {
    let setup = Setup::new(Unordered::silent());
    let mut holder = setup.claim(|_| ());
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(3).await;
    let [first, second, third] = &mut waiters[..] else { panic!("three") };
    // The refresh of the second waiter notifies the first. The refresh of the third passes it.
    tokio::time::advance(millis(200)).await;
    assert!(!is_granted(&mut **second).await);
    tokio::time::advance(millis(200)).await;
    assert!(!is_granted(&mut **third).await);
    assert_eq!(listen(&mut **first), None);
    holder.release().await.unwrap();
    assert!(!is_handed_off(listen(&mut **second)), "overtook the first");
    assert!(is_handed_off(listen(&mut **first)));
}

/// Attempts reach the store in the order of the queue.
#[tokio::test(start_paused = true)]
async fn the_look_ahead_sends_to_a_fair_store_after_the_front_has_its_answer() {
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
async fn the_look_ahead_sends_to_a_fair_store_at_its_refresh_if_the_front_has_no_answer() {
    let setup = Setup::new(Memory::new());
    setup.faults.once(Op::Attempt, Fault::Hangs);
    let (mut front, mut look_ahead) = (setup.waiter(), setup.waiter());
    let mut hangs = front.attempt(None);
    assert!(poll_once(hangs.as_mut()).is_pending());
    assert!(!is_granted(&mut *look_ahead).await);
    tokio::time::advance(TTL / 3).await;
    assert!(is_granted(&mut *look_ahead).await);
}

/// Time that passed since an earlier notification does not count.
#[tokio::test(start_paused = true)]
async fn each_notification_gives_the_front_a_full_grace_time() {
    let setup = Setup::new(Unordered::silent());
    let mut holder = setup.claim(|_| ());
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(2).await;
    let [front, look_ahead] = &mut waiters[..] else { panic!("two") };
    holder.release().await.unwrap();
    // A try was faster than the front.
    assert!(is_granted(&mut *holder).await);
    assert!(!is_granted(&mut **front).await);
    tokio::time::advance(FRONT_GRACE * 9 / 10).await;
    holder.release().await.unwrap();
    tokio::time::advance(FRONT_GRACE / 2).await;
    assert_ne!(setup.faults.asked(Op::Attempt), 0);
    let asked = setup.faults.asked(Op::Attempt);
    assert!(!is_handed_off(listen(&mut **look_ahead)), "overtook the front");
    assert_eq!(setup.faults.asked(Op::Attempt), asked);
    tokio::time::advance(FRONT_GRACE / 2).await;
    assert!(is_handed_off(listen(&mut **look_ahead)), "the front was not polled");
}

/// The store sends no notifications.
#[tokio::test(start_paused = true)]
async fn the_refresh_of_the_look_ahead_makes_the_front_send_an_attempt() {
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
    assert!(is_handed_off(front.poll()));
}

#[tokio::test(start_paused = true)]
async fn the_look_ahead_passes_an_unpolled_front_after_a_release_elsewhere() {
    // Within the grace time of its first attempt, the engine repeats it and needs no report.
    for (waited, change) in [(Duration::ZERO, None), (FRONT_GRACE, Some(Change::LookAgain))] {
        let store = Unordered::default();
        let setup = Setup::new(store.clone());
        let mut elsewhere = elsewhere(&store).await;
        let mut front = setup.waiter();
        assert!(!is_granted(&mut *front).await);
        let mut look_ahead = setup.waiter();
        assert_eq!(look_ahead.attempt(None).await.unwrap(), AFTER_GRACE);
        tokio::time::advance(waited).await;
        let mut listening = Listening::new(&mut *look_ahead);
        assert_eq!(listening.poll(), None);
        elsewhere.release().await.unwrap();
        assert!(listening.is_woken());
        assert_eq!(listening.poll(), change);
        drop(listening);
        if change.is_some() {
            assert_eq!(look_ahead.attempt(None).await.unwrap(), AFTER_GRACE);
        }
        tokio::time::advance(FRONT_GRACE).await;
        assert!(is_granted(&mut *look_ahead).await);
    }
}

#[tokio::test(start_paused = true)]
async fn the_look_ahead_does_not_pass_a_front_polled_within_the_grace_time() {
    let store = Unordered::default();
    let setup = Setup::new(store.clone());
    let mut elsewhere = elsewhere(&store).await;
    let mut waiters = setup.refused(2).await;
    let [front, look_ahead] = &mut waiters[..] else { panic!("two") };
    elsewhere.release().await.unwrap();
    assert_eq!(listen(&mut **look_ahead), None);
    tokio::time::advance(FRONT_GRACE / 2).await;
    assert!(is_handed_off(listen(&mut **front)));
    tokio::time::advance(FRONT_GRACE).await;
    assert!(!is_granted(&mut **look_ahead).await);
}
