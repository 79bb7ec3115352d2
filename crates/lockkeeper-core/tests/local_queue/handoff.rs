//! Releases, losses and downgrades, which wake the next waiter.

use std::sync::Arc;
use std::task::{Context, Waker};

use lockkeeper_core::{
    Attempt, Backend, Change, Claim, Fence, Inspector, Memory, Mode, Name, Release,
};
use lockkeeper_testkit::Op;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::common::unordered::Unordered;
use crate::common::{millis, secs};
use crate::{Listening, Setup, TTL, elsewhere, is_granted, is_handed_off, listen};

/// The store sends no notifications.
#[tokio::test(start_paused = true)]
async fn a_dropped_holder_wakes_the_next_waiter() {
    let setup = Setup::new(Unordered::silent());
    for queue in [true, false] {
        let mut holder = setup.claim(|spec| spec.queue = queue);
        assert!(is_granted(&mut *holder).await);
        let mut waiter = setup.waiter();
        assert!(!is_granted(&mut *waiter).await);
        assert_eq!(listen(&mut *waiter), None);
        drop(holder);
        assert!(is_handed_off(listen(&mut *waiter)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_hand_off_by_the_store_sends_no_extra_attempt() {
    let setup = Setup::new(Memory::new());
    let mut holder = setup.waiter();
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(2).await;
    holder.release().await.unwrap();
    let asked = setup.faults.asked(Op::Attempt);
    assert!(is_handed_off(listen(&mut *waiters[0])));
    assert_eq!(setup.faults.asked(Op::Attempt), asked);
}

/// A waiter that leaves closes its lock file, which causes a notification.
#[tokio::test(start_paused = true)]
async fn notifications_are_ignored_while_another_claim_of_the_process_holds_the_lock() {
    let store = Unordered::default();
    let setup = Setup::new(store.clone());
    let mut holder = setup.waiter();
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(3).await;
    holder.release().await.unwrap();
    assert!(is_handed_off(listen(&mut *waiters[0])));
    let asked = setup.faults.asked(Op::Attempt);
    let [granted, front, look_ahead] = &mut waiters[..] else { panic!("three") };
    let (mut front, mut look_ahead) =
        (Listening::new(&mut **front), Listening::new(&mut **look_ahead));
    assert_eq!((front.poll(), look_ahead.poll()), (None, None));
    store.break_lock(&Name::new("b").unwrap()).await.unwrap();
    assert!(!front.is_woken(), "it waits only for the release");
    assert_eq!(look_ahead.poll(), None);
    assert!(!look_ahead.is_woken(), "it yields to the front");
    assert_eq!(setup.faults.asked(Op::Attempt), asked);
    granted.release().await.unwrap();
    assert!(is_handed_off(front.poll()));
}

#[tokio::test(start_paused = true)]
async fn a_lost_hold_wakes_the_next_waiter() {
    for by_renewal in [true, false] {
        let store = Unordered::default();
        let setup = Setup::new(store.clone());
        let mut holder = setup.waiter();
        assert!(is_granted(&mut *holder).await);
        let mut waiters = setup.refused(2).await;
        holder.release().await.unwrap();
        assert!(is_handed_off(listen(&mut *waiters[0])));
        let [granted, front] = &mut waiters[..] else { panic!("two") };
        let mut front = Listening::new(&mut **front);
        assert_eq!(front.poll(), None);
        store.break_lock(&Name::new("a").unwrap()).await.unwrap();
        assert!(!front.is_woken(), "the loss is not known yet");
        if by_renewal {
            granted.renew(TTL).await.unwrap();
        } else {
            assert!(listen(&mut **granted).is_some());
        }
        assert!(front.is_woken());
        assert!(is_handed_off(front.poll()));
    }
}

#[tokio::test(start_paused = true)]
async fn a_loss_found_by_the_release_wakes_the_next_waiter() {
    let store = Unordered::default();
    let setup = Setup::new(store.clone());
    let mut holder = setup.waiter();
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(2).await;
    holder.release().await.unwrap();
    assert!(is_handed_off(listen(&mut *waiters[0])));
    let [granted, front] = &mut waiters[..] else { panic!("two") };
    let mut front = Listening::new(&mut **front);
    assert_eq!(front.poll(), None);
    store.break_lock(&Name::new("a").unwrap()).await.unwrap();
    assert_eq!(granted.release().await.unwrap(), Release::WasNotHeld);
    assert!(front.is_woken());
    assert!(is_handed_off(front.poll()));
}

/// Another process holds the lock when the old holder sends its attempt.
#[tokio::test(start_paused = true)]
async fn a_loss_found_by_an_attempt_wakes_the_next_waiter() {
    let store = Unordered::default();
    let setup = Setup::new(store.clone());
    let mut holder = setup.waiter();
    assert!(is_granted(&mut *holder).await);
    let mut waiters = setup.refused(2).await;
    holder.release().await.unwrap();
    assert!(is_handed_off(listen(&mut *waiters[0])));
    let [granted, front] = &mut waiters[..] else { panic!("two") };
    let mut front = Listening::new(&mut **front);
    assert_eq!(front.poll(), None);
    store.break_lock(&Name::new("a").unwrap()).await.unwrap();
    let mut other = elsewhere(&store).await;
    assert!(!is_granted(&mut **granted).await);
    assert_eq!(front.poll(), None);
    other.release().await.unwrap();
    assert!(front.is_woken(), "it listens to the store again");
    assert!(is_handed_off(front.poll()));
}

#[tokio::test(start_paused = true)]
async fn a_broken_lock_is_lost_and_granted_to_the_next_waiter() {
    for setup in Setup::both() {
        let (entered, mut order) = mpsc::unbounded_channel();
        let guard = setup.lock().await;
        setup.enqueue(Mode::Exclusive, 0, &entered, secs(1)).await;
        assert_eq!(setup.keeper.inspect().unwrap().break_lock("a").await.unwrap(), 1);
        timeout(TTL / 4, guard.lost()).await.expect("the loss is reported");
        assert_eq!(timeout(TTL / 4, order.recv()).await, Ok(Some(0)));
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_readers_acquire_after_a_downgrade() {
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
            assert!(is_handed_off(listen(&mut **reader)), "{}", setup.store.name());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_release_of_an_adopted_ticket_wakes_the_next_waiter() {
    let setup = Setup::new(Memory::new());
    let ticket = setup.lock().await.detach().unwrap();
    let (entered, mut order) = mpsc::unbounded_channel();
    setup.enqueue(Mode::Exclusive, 0, &entered, secs(1)).await;
    let adopted = setup.keeper.adopt(ticket).await.unwrap();
    adopted.release().await.unwrap();
    assert_eq!(timeout(millis(20), order.recv()).await, Ok(Some(0)));
}

/// The floor is that of the last attempt.
#[tokio::test(start_paused = true)]
async fn a_hand_off_has_a_fence_at_or_above_the_floor() {
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
        let Some(Change::Granted(grant)) = listen(&mut **waiter) else { panic!("handed off") };
        assert!(grant.fence >= floor);
        waiter.release().await.unwrap();
    }
}

/// The store may have to keep out readers of other processes.
#[tokio::test(start_paused = true)]
async fn a_writer_that_moves_to_the_front_behind_readers_sends_an_attempt() {
    let setup = Setup::new(Unordered::silent());
    let mut holder = setup.claim(|_| ());
    assert!(is_granted(&mut *holder).await);
    let mut reader = setup.claim(|spec| (spec.mode, spec.queue) = (Mode::Shared, true));
    assert!(!is_granted(&mut *reader).await);
    let mut waiters = setup.refused(1).await;
    let mut writer = Listening::new(&mut *waiters[0]);
    assert_eq!(writer.poll(), None);
    holder.release().await.unwrap();
    assert!(is_handed_off(listen(&mut *reader)));
    assert!(writer.is_woken());
    let asked = setup.faults.asked(Op::Attempt);
    assert_eq!(writer.poll(), None);
    assert_eq!(setup.faults.asked(Op::Attempt), asked + 1);
}

/// A waker that owns a claim of the same store, as the waker of an executor may own a task.
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
                assert_eq!(listen(&mut *waiter), None);
            }
            drop(waiter);
            done.send(()).unwrap();
        });
        is_done.recv_timeout(secs(10)).expect("no deadlock");
    }
}
