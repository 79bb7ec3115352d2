//! Lost responses, cancelled acquires and holds that are removed from the store.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use lockkeeper_core::{ErrorKind, Guard, Keeper, ReleaseOutcome};

use super::{Subject, soon};
use crate::faulty::{Fault, Faulty, Op};

/// The store processes a request and its response is lost: nothing is left behind.
pub async fn lost_responses_leave_nothing(subject: Subject) {
    let (store, faults) = Faulty::around(subject.backend.clone());
    let keeper = Keeper::new(store).ttl(Duration::from_secs(600));
    let mutex = keeper.mutex(subject.name("a"));

    faults.once(Op::Attempt, Fault::LostAnswer);
    let error = soon("lock", mutex.lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let guard = soon("lock", mutex.lock()).await.expect("the engine releases the unknown grant");

    faults.once(Op::Renew, Fault::LostAnswer);
    let error = guard.extend(Duration::from_secs(700)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(guard.is_held());
    guard.extend(Duration::from_secs(700)).await.unwrap();

    faults.once(Op::Release, Fault::LostAnswer);
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    soon("lock", mutex.lock()).await.unwrap().release().await.unwrap();
    subject.assert_nothing_left(&[&keeper]).await;
}

/// Drops an acquire, free or contended, after one poll, two polls, and so on.
pub async fn an_acquire_cancelled_at_any_poll_leaves_nothing(subject: Subject) {
    for contended in [false, true] {
        let name = subject.name(if contended { "contended" } else { "free" });
        for polls in 1..=6 {
            let keeper = subject.keeper();
            let holder = contended.then(|| subject.keeper());
            let held = match &holder {
                Some(holder) => Some(holder.mutex(name.clone()).lock().await.unwrap()),
                None => None,
            };
            let mutex = keeper.mutex(name.clone());
            polled(mutex.lock(), polls).await;
            drop(held);
            soon("close", keeper.close()).await;
            let after = subject.keeper();
            let guard = soon("lock", after.mutex(name.clone()).lock()).await.unwrap();
            guard.release().await.unwrap();
        }
    }
    subject.assert_nothing_left(&[]).await;
}

/// Polls a future up to `polls` times, a millisecond apart, and drops it.
async fn polled(future: impl Future<Output = lockkeeper_core::Result<Guard>>, polls: usize) {
    let mut future = pin!(future);
    for _ in 0..polls {
        let once = std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready()));
        if once.await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// A holder whose hold is removed from the store is notified, and the next waiter is granted the lock.
pub async fn the_holder_of_a_removed_hold_is_notified(subject: Subject) {
    let keeper = subject.keeper();
    let mutex = keeper.mutex(subject.name("a")).ttl(subject.ttl);
    let guard = mutex.lock().await.unwrap();
    subject.sever(&guard).await;
    soon("the loss", guard.lost()).await;
    assert!(!guard.is_held());
    let next = soon("lock", mutex.lock()).await.unwrap();
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
    assert!(next.is_held(), "a stale guard's release ended another hold");
    assert!(mutex.try_lock().await.unwrap().is_none());
    next.release().await.unwrap();
    subject.assert_nothing_left(&[&keeper]).await;
}
