//! Leases, tickets, faults, names and inspection.

use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use lockkeeper_core::{ErrorKind, Fences, Guard, Keeper, LossReason, ReleaseOutcome};

use super::{ShownWaiters, Subject, eventually, soon};
use crate::faulty::{Fault, Faulty, Op};

/// A lease that is not renewed ends, and not before its TTL. A store without leases reports `Unsupported`.
pub async fn a_lease_ends_by_itself(subject: Subject) {
    let keeper = subject.keeper();
    let mutex = keeper.mutex(subject.name("a"));
    let start = Instant::now();
    let guard = mutex.clone().ttl(subject.ttl).lock().await.unwrap();
    let fence = guard.fence();
    if !subject.capabilities().leases {
        assert_eq!(guard.expires_at().is_some(), subject.ends_in_silence().await);
        assert_eq!(guard.detach().unwrap_err().kind(), ErrorKind::Unsupported);
        soon("lock", mutex.lock()).await.unwrap().release().await.unwrap();
        return subject.done(&[&keeper]).await;
    }
    let _ticket = guard.detach().unwrap();
    let next = soon("lock", mutex.lock()).await.unwrap();
    // A little less, because the store's clock is not ours.
    assert!(start.elapsed() >= subject.ttl * 9 / 10, "ended after {:?}", start.elapsed());
    assert!(subject.capabilities().fences == Fences::None || next.fence() > fence);
    next.release().await.unwrap();
    subject.done(&[&keeper]).await;
}

/// A holder without a connection is notified before the store grants the lock to another. If
/// the store has no expiry, no other client is granted the lock.
pub async fn a_hold_that_cannot_renew_is_lost_before_another_enters(subject: Subject) {
    let (store, faults) = Faulty::around(subject.backend.clone());
    let cut_off = Keeper::new(store).ttl(subject.ttl);
    let keeper = subject.keeper();
    let guard = cut_off.mutex(subject.name("a")).lock().await.unwrap();
    let ends = subject.ends_in_silence().await;
    faults.everything(Fault::Hangs);
    let mutex = keeper.mutex(subject.name("a"));
    if ends {
        let next = soon("lock", mutex.lock()).await.unwrap();
        assert!(!guard.is_held(), "two hold it, the first for {:?} more", guard.remaining());
        assert_eq!(guard.loss_reason(), Some(LossReason::Expired));
        next.release().await.unwrap();
    } else {
        assert!(mutex.try_lock_for(subject.ttl * 2).await.unwrap().is_none());
        assert!(guard.is_held());
        assert_eq!(guard.loss_reason(), None);
    }
    faults.none();
    drop(guard);
    subject.done(&[&cut_off, &keeper]).await;
}

/// A ticket transfers a hold to another keeper, once.
pub async fn a_ticket_carries_a_hold(subject: Subject) {
    let (one, two) = (subject.keeper(), subject.keeper());
    let guard = one.mutex(subject.name("a")).lock().await.unwrap();
    let (owner, fence) = (guard.owner(), guard.fence());
    let ticket = match guard.detach() {
        Ok(ticket) => ticket,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(!subject.capabilities().leases, "a store with leases has tickets");
            return subject.done(&[&one, &two]).await;
        }
    };
    assert!(one.mutex(subject.name("a")).try_lock().await.unwrap().is_none());
    let guard = soon("adopt", two.adopt(ticket.clone())).await.unwrap();
    assert_eq!((guard.owner(), guard.fence()), (owner, fence));
    assert!(guard.is_held());
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    assert_eq!(two.adopt(ticket).await.unwrap_err().kind(), ErrorKind::Lost);
    subject.done(&[&one, &two]).await;
}

/// The store processes a request and its response is lost: nothing is left behind.
pub async fn answers_that_are_lost_leave_nothing(subject: Subject) {
    let (store, faults) = Faulty::around(subject.backend.clone());
    let keeper = Keeper::new(store).ttl(Duration::from_secs(600));
    let mutex = keeper.mutex(subject.name("a"));

    faults.once(Op::Attempt, Fault::LostAnswer);
    let error = soon("lock", mutex.lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let guard = soon("lock", mutex.lock()).await.expect("the first is given back by itself");

    faults.once(Op::Renew, Fault::LostAnswer);
    let error = guard.extend(Duration::from_secs(700)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(guard.is_held());
    guard.extend(Duration::from_secs(700)).await.unwrap();

    faults.once(Op::Release, Fault::LostAnswer);
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    soon("lock", mutex.lock()).await.unwrap().release().await.unwrap();
    subject.done(&[&keeper]).await;
}

/// Drops an acquire, free or contended, after one poll, two polls, and so on.
pub async fn an_acquire_dropped_at_any_poll_leaves_nothing(subject: Subject) {
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
    subject.done(&[]).await;
}

/// Polls a future up to so many times, when it is woken or a little later, and drops it.
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
pub async fn a_severed_hold_is_told_and_another_enters(subject: Subject) {
    let keeper = subject.keeper();
    let mutex = keeper.mutex(subject.name("a")).ttl(subject.ttl);
    let guard = mutex.lock().await.unwrap();
    subject.sever(&guard).await;
    soon("to be told", guard.lost()).await;
    assert!(!guard.is_held());
    let next = soon("lock", mutex.lock()).await.unwrap();
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
    assert!(next.is_held(), "a stale guard's release took another's lock");
    assert!(mutex.try_lock().await.unwrap().is_none());
    next.release().await.unwrap();
    subject.done(&[&keeper]).await;
}

/// Any name of up to 1 KiB is a lock of its own.
pub async fn every_name_works_and_no_two_meet(subject: Subject) {
    let keeper = subject.keeper();
    let space = subject.name("");
    let longest = "x".repeat(1024 - space.len());
    let almost = format!("{}y", "x".repeat(1023 - space.len()));
    let emoji = "🔒".repeat((1024 - space.len()) / 4);
    let names = [
        "a", "A", "á", "a\u{301}", "a ", " a", "a/b", "a//b", "../a", "..", ".", "/", "a\\b",
        "a:b", "{a}", "}a{", "{}", "a{b}c", "a*", "a?", "%61", "%", "a\nb", "a\tb", "a\u{7f}",
        "'; --", "\"", "$(a)", "CON", "a.lock", "a\u{1f}", "🔒", &longest, &almost, &emoji,
    ];
    let mut guards = Vec::new();
    for name in names {
        let mutex = keeper.mutex(format!("{space}{name}"));
        let guard = soon("try_lock", mutex.try_lock()).await;
        let guard = guard.unwrap_or_else(|error| panic!("{name:?} is refused: {error}"));
        guards.push(guard.unwrap_or_else(|| panic!("{name:?} meets another name")));
    }
    for name in names {
        let mutex = keeper.mutex(format!("{space}{name}"));
        assert!(mutex.try_lock().await.unwrap().is_none(), "{name:?} is not excluded");
    }
    if let Some(left) = subject.left().await {
        let mut shown: Vec<_> = left.iter().map(|info| info.name.as_str()).collect();
        let mut held: Vec<_> = guards.iter().map(Guard::name).collect();
        shown.sort_unstable();
        held.sort_unstable();
        assert_eq!(shown, held, "names are shown as they were given");
    }
    for guard in guards {
        assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    }
    subject.done(&[&keeper]).await;
}

/// Any ttl works or is refused at once.
pub async fn long_and_short_ttls_are_taken_or_refused(subject: Subject) {
    let keeper = subject.keeper();
    let century = Duration::from_secs(100 * 366 * 24 * 60 * 60);
    let day = Duration::from_secs(24 * 60 * 60);
    for ttl in [century, day, Duration::from_millis(500), Duration::ZERO, Duration::MAX] {
        let mutex = keeper.mutex(subject.name("a")).ttl(ttl);
        match soon("lock", mutex.lock()).await {
            Ok(guard) => {
                assert!(guard.is_held());
                assert!(mutex.try_lock().await.unwrap().is_none());
                assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InvalidOption, "{ttl:?}: {error}");
                assert!(ttl != day, "a day is not too long");
            }
        }
    }
    subject.done(&[&keeper]).await;
}

/// Holders and waiters, labels and fences, or `Unsupported`.
pub async fn inspection_shows_holders_and_waiters(subject: Subject) {
    let keeper = subject.keeper();
    let name = subject.name("a");
    let guard = keeper.mutex(name.clone()).label("the holder").lock().await.unwrap();
    let inspect = match keeper.inspect() {
        Ok(inspect) => inspect,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(subject.backend.inspector().is_none());
            guard.release().await.unwrap();
            return subject.done(&[&keeper]).await;
        }
    };
    let waiter = tokio::spawn({
        let mutex = keeper.mutex(name.clone()).label("the waiter");
        async move { mutex.lock().await }
    });
    subject.until_queued("a", 1).await;
    let shown = inspect.show(name.clone()).await.unwrap();
    assert_eq!(shown.len(), 1);
    assert_eq!(*shown[0].name, *name);
    let holder = &shown[0].holders[0];
    assert_eq!(holder.who(), "the holder");
    assert!(holder.owner.is_none_or(|owner| owner == guard.owner()));
    assert!(holder.fence.is_none() || holder.fence == guard.fence());
    let waiters: Vec<_> = shown[0].waiters.iter().map(lockkeeper_core::Participant::who).collect();
    let expected: &[_] = match subject.shown_waiters {
        ShownWaiters::All | ShownWaiters::OwnProcess => &["the waiter"],
        ShownWaiters::None => &[],
    };
    assert_eq!(waiters, expected);
    let listed = subject.left().await.unwrap();
    let of = |infos: &[lockkeeper_core::LockInfo]| {
        infos.iter().map(|info| (info.name.to_string(), info.holders.len())).collect::<Vec<_>>()
    };
    assert_eq!(of(&listed), of(&shown));
    assert!(inspect.show(subject.name("nobody")).await.unwrap().is_empty());
    waiter.abort();
    subject.until_queued("a", 0).await;
    guard.release().await.unwrap();
    assert!(inspect.show(name).await.unwrap().is_empty());
    subject.done(&[&keeper]).await;
}

/// A lock can be broken, and its holder is notified. A store without inspection
/// reports `Unsupported`.
pub async fn a_broken_lock_is_lost_and_the_next_enters(subject: Subject) {
    let keeper = subject.keeper();
    let name = subject.name("a");
    // A store that pushes notifies holders immediately; otherwise the next renewal detects the loss.
    let push = subject.capabilities().push;
    let ttl = if push { Duration::from_secs(600) } else { subject.ttl };
    let guard = keeper.mutex(name.clone()).ttl(ttl).lock().await.unwrap();
    let Ok(inspect) = keeper.inspect() else {
        assert!(subject.backend.inspector().is_none());
        guard.release().await.unwrap();
        return subject.done(&[&keeper]).await;
    };
    let waiter = tokio::spawn({
        let mutex = keeper.mutex(name.clone());
        async move { mutex.lock().await.unwrap() }
    });
    subject.until_queued("a", 1).await;
    assert_eq!(inspect.break_lock(name.clone()).await.unwrap(), 1);
    let next = soon("the waiter", waiter).await.unwrap();
    soon("to be told", guard.lost()).await;
    let reason = guard.loss_reason();
    let told = matches!(reason, Some(LossReason::Broken | LossReason::SessionEnded));
    assert!(told, "a broken lock was lost because of {reason:?}");
    let error = guard.while_held(async {}).await.unwrap_err();
    assert_eq!((error.kind(), error.loss_reason()), (ErrorKind::Lost, reason));
    assert_eq!(next.loss_reason(), None);
    assert!(next.is_held());
    next.release().await.unwrap();
    eventually("nobody holds", async || inspect.show(name.clone()).await.unwrap().is_empty()).await;
    assert_eq!(inspect.break_lock(name.clone()).await.unwrap(), 0);
    if subject.capabilities().leases {
        // A holder that is gone cannot help: breaking alone lets the next one in.
        let mutex = keeper.mutex(name.clone());
        let _gone = mutex.lock().await.unwrap().detach().unwrap();
        let waiter = tokio::spawn(async move { mutex.lock().await.unwrap() });
        subject.until_queued("a", 1).await;
        assert_eq!(inspect.break_lock(name).await.unwrap(), 1);
        soon("the waiter", waiter).await.unwrap().release().await.unwrap();
    }
    subject.done(&[&keeper]).await;
}
