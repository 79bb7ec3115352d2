//! Leases, TTLs and tickets.

use std::time::{Duration, Instant};

use lockkeeper_core::{ErrorKind, Fences, Keeper, LossReason, ReleaseOutcome};

use super::{Subject, soon};
use crate::faulty::{Fault, Faulty};

/// A lease that is not renewed ends, and not before its TTL. A store without leases reports `Unsupported`.
pub async fn a_lease_that_is_not_renewed_expires(subject: Subject) {
    let keeper = subject.keeper();
    let mutex = keeper.mutex(subject.name("a"));
    let start = Instant::now();
    let guard = mutex.clone().ttl(subject.ttl).lock().await.unwrap();
    let fence = guard.fence();
    if !subject.capabilities().leases {
        assert_eq!(guard.expires_at().is_some(), subject.expires_without_renewal().await);
        assert_eq!(guard.detach().unwrap_err().kind(), ErrorKind::Unsupported);
        soon("lock", mutex.lock()).await.unwrap().release().await.unwrap();
        return subject.assert_nothing_left(&[&keeper]).await;
    }
    let _ticket = guard.detach().unwrap();
    let next = soon("lock", mutex.lock()).await.unwrap();
    // A little less, because the store has another clock.
    assert!(start.elapsed() >= subject.ttl * 9 / 10, "ended after {:?}", start.elapsed());
    assert!(subject.capabilities().fences == Fences::None || next.fence() > fence);
    next.release().await.unwrap();
    subject.assert_nothing_left(&[&keeper]).await;
}

/// A holder without a connection is notified before the store grants the lock to another. If
/// the store has no expiry, no other client is granted the lock.
pub async fn a_hold_that_cannot_renew_is_lost_before_another_is_granted(subject: Subject) {
    let (store, faults) = Faulty::around(subject.backend.clone());
    let cut_off = Keeper::new(store).ttl(subject.ttl);
    let keeper = subject.keeper();
    let guard = cut_off.mutex(subject.name("a")).lock().await.unwrap();
    let expires = subject.expires_without_renewal().await;
    faults.everything(Fault::Hangs);
    let mutex = keeper.mutex(subject.name("a"));
    if expires {
        let next = soon("lock", mutex.lock()).await.unwrap();
        assert!(!guard.is_held(), "two holders, the first for {:?} more", guard.remaining());
        assert_eq!(guard.loss_reason(), Some(LossReason::Expired));
        next.release().await.unwrap();
    } else {
        assert!(mutex.try_lock_for(subject.ttl * 2).await.unwrap().is_none());
        assert!(guard.is_held());
        assert_eq!(guard.loss_reason(), None);
    }
    faults.none();
    drop(guard);
    subject.assert_nothing_left(&[&cut_off, &keeper]).await;
}

/// A ticket transfers a hold to another keeper, once.
pub async fn a_ticket_transfers_a_hold(subject: Subject) {
    let (one, two) = (subject.keeper(), subject.keeper());
    let guard = one.mutex(subject.name("a")).lock().await.unwrap();
    let (owner, fence) = (guard.owner(), guard.fence());
    let ticket = match guard.detach() {
        Ok(ticket) => ticket,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(!subject.capabilities().leases, "a store with leases has tickets");
            return subject.assert_nothing_left(&[&one, &two]).await;
        }
    };
    assert!(one.mutex(subject.name("a")).try_lock().await.unwrap().is_none());
    let guard = soon("adopt", two.adopt(ticket.clone())).await.unwrap();
    assert_eq!((guard.owner(), guard.fence()), (owner, fence));
    assert!(guard.is_held());
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    assert_eq!(two.adopt(ticket).await.unwrap_err().kind(), ErrorKind::Lost);
    subject.assert_nothing_left(&[&one, &two]).await;
}

/// Any TTL works or is refused at once.
pub async fn extreme_ttls_are_accepted_or_refused(subject: Subject) {
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
                assert!(ttl != day, "a TTL of one day was refused");
            }
        }
    }
    subject.assert_nothing_left(&[&keeper]).await;
}
