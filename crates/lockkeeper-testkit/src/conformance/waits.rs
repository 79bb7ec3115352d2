//! Waits of extreme lengths, and waits for several locks at once.

use std::time::Duration;

use lockkeeper_core::{ErrorKind, Guard, Mutex, Result};

use super::{Subject, soon};

/// Waits beyond the range of the clock. Each must behave as a wait without a limit.
const MAX_WAITS: [Duration; 3] =
    [Duration::MAX, Duration::from_secs(u64::MAX), Duration::from_millis(u64::MAX)];
/// Waits that end before another holder can release.
const MIN_WAITS: [Duration; 2] = [Duration::ZERO, Duration::from_nanos(1)];

/// A waiter with a limit beyond the range of the clock acquires the lock when the holder releases it. A
/// waiter with a limit of nearly zero times out without another error.
pub async fn extreme_waits_are_granted_or_refused_and_never_fail(subject: Subject) {
    let keeper = subject.keeper();
    let mutex = keeper.mutex(subject.name("a"));
    for wait in MAX_WAITS {
        acquires_after_release(&subject, &mutex, move |mutex| async move {
            let guard = mutex.try_lock_for(wait).await?;
            Ok(guard.expect("an unlimited wait does not time out"))
        })
        .await;
        acquires_after_release(&subject, &mutex, move |mutex| async move {
            mutex.max_wait(wait).lock().await
        })
        .await;
    }
    let holder = soon("lock", mutex.lock()).await.unwrap();
    for wait in MIN_WAITS {
        assert!(soon("a short try", mutex.try_lock_for(wait)).await.unwrap().is_none());
        let error = soon("a short wait", mutex.clone().max_wait(wait).lock()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    }
    holder.release().await.unwrap();
    soon("lock", mutex.lock()).await.unwrap().release().await.unwrap();
    subject.assert_nothing_left(&[&keeper]).await;
}

/// Starts a waiter while the lock is held, releases the lock, and expects the waiter to be granted.
async fn acquires_after_release<F>(subject: &Subject, mutex: &Mutex, wait: impl FnOnce(Mutex) -> F)
where
    F: Future<Output = Result<Guard>> + Send + 'static,
{
    let holder = soon("lock", mutex.lock()).await.unwrap();
    let waiter = tokio::spawn(wait(mutex.clone()));
    subject.wait_for_waiters("a", 1).await;
    holder.release().await.unwrap();
    let guard = soon("the waiter", waiter).await.expect("the waiter does not panic").unwrap();
    guard.release().await.unwrap();
}

/// `lock_all` waits for the names that are held, with and without a limit, and holds none of them when the
/// limit runs out.
pub async fn a_contended_lock_all_waits_for_all_its_names(subject: Subject) {
    let keeper = subject.keeper();
    let names = ["a", "b", "c"].map(|name| subject.name(name));
    let all = keeper.lock_all(names.clone());
    for limit in [None, Some(Duration::MAX)] {
        let holder = soon("lock", keeper.mutex(names[1].clone()).lock()).await.unwrap();
        let all = match limit {
            Some(limit) => all.clone().max_wait(limit),
            None => all.clone(),
        };
        let waiter = tokio::spawn(async move { all.lock().await });
        subject.wait_for_waiters("b", 1).await;
        holder.release().await.unwrap();
        let guards = soon("the waiter", waiter).await.expect("the waiter does not panic").unwrap();
        assert_eq!(guards.iter().count(), names.len());
        assert!(guards.is_held());
        guards.release().await.unwrap();
    }
    let holder = soon("lock", keeper.mutex(names[2].clone()).lock()).await.unwrap();
    for wait in MIN_WAITS {
        assert!(soon("a short try", all.try_lock_for(wait)).await.unwrap().is_none());
    }
    let error =
        soon("a bounded wait", all.clone().max_wait(Duration::from_millis(50)).lock()).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::TimedOut);
    for name in &names[..2] {
        let guard =
            soon("a name of a failed set", keeper.mutex(name.clone()).lock()).await.unwrap();
        guard.release().await.unwrap();
    }
    holder.release().await.unwrap();
    soon("all of them", all.lock()).await.unwrap().release().await.unwrap();
    subject.assert_nothing_left(&[&keeper]).await;
}
