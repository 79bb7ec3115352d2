//! Names, inspection and breaking of locks.

use std::time::Duration;

use lockkeeper_core::{ErrorKind, Guard, LossReason, ReleaseOutcome};

use super::{ShownWaiters, Subject, eventually, soon};

/// Any name of up to 1 KiB is an independent lock.
pub async fn all_names_work_and_are_independent(subject: Subject) {
    let keeper = subject.keeper();
    let prefix = subject.name("");
    let longest = "x".repeat(1024 - prefix.len());
    let almost = format!("{}y", "x".repeat(1023 - prefix.len()));
    let emoji = "🔒".repeat((1024 - prefix.len()) / 4);
    let names = [
        "a", "A", "á", "a\u{301}", "a ", " a", "a/b", "a//b", "../a", "..", ".", "/", "a\\b",
        "a:b", "{a}", "}a{", "{}", "a{b}c", "a*", "a?", "%61", "%", "a\nb", "a\tb", "a\u{7f}",
        "'; --", "\"", "$(a)", "CON", "a.lock", "a\u{1f}", "🔒", &longest, &almost, &emoji,
    ];
    let mut guards = Vec::new();
    for name in names {
        let mutex = keeper.mutex(format!("{prefix}{name}"));
        let guard = soon("try_lock", mutex.try_lock()).await;
        let guard = guard.unwrap_or_else(|error| panic!("{name:?} is refused: {error}"));
        guards.push(guard.unwrap_or_else(|| panic!("{name:?} collides with another name")));
    }
    for name in names {
        let mutex = keeper.mutex(format!("{prefix}{name}"));
        assert!(mutex.try_lock().await.unwrap().is_none(), "{name:?} has two holders");
    }
    if let Some(left) = subject.remaining_locks().await {
        let mut shown: Vec<_> = left.iter().map(|info| info.name.as_str()).collect();
        let mut held: Vec<_> = guards.iter().map(Guard::name).collect();
        shown.sort_unstable();
        held.sort_unstable();
        assert_eq!(shown, held, "inspection changed a name");
    }
    for guard in guards {
        assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    }
    subject.assert_nothing_left(&[&keeper]).await;
}

/// Inspection shows holders and waiters with labels and fences. A store without inspection reports `Unsupported`.
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
            return subject.assert_nothing_left(&[&keeper]).await;
        }
    };
    let waiter = tokio::spawn({
        let mutex = keeper.mutex(name.clone()).label("the waiter");
        async move { mutex.lock().await }
    });
    subject.wait_for_waiters("a", 1).await;
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
    let listed = subject.remaining_locks().await.unwrap();
    let of = |infos: &[lockkeeper_core::LockInfo]| {
        infos.iter().map(|info| (info.name.to_string(), info.holders.len())).collect::<Vec<_>>()
    };
    assert_eq!(of(&listed), of(&shown));
    assert!(inspect.show(subject.name("unused")).await.unwrap().is_empty());
    waiter.abort();
    subject.wait_for_waiters("a", 0).await;
    guard.release().await.unwrap();
    assert!(inspect.show(name).await.unwrap().is_empty());
    subject.assert_nothing_left(&[&keeper]).await;
}

/// A lock can be broken, and its holder is notified. A store without inspection
/// reports `Unsupported`.
pub async fn a_broken_lock_is_lost_and_the_next_waiter_is_granted(subject: Subject) {
    let keeper = subject.keeper();
    let name = subject.name("a");
    // A store that pushes notifies holders immediately; otherwise the next renewal detects the loss.
    let push = subject.capabilities().push;
    let ttl = if push { Duration::from_secs(600) } else { subject.ttl };
    let guard = keeper.mutex(name.clone()).ttl(ttl).lock().await.unwrap();
    let Ok(inspect) = keeper.inspect() else {
        assert!(subject.backend.inspector().is_none());
        guard.release().await.unwrap();
        return subject.assert_nothing_left(&[&keeper]).await;
    };
    let waiter = tokio::spawn({
        let mutex = keeper.mutex(name.clone());
        async move { mutex.lock().await.unwrap() }
    });
    subject.wait_for_waiters("a", 1).await;
    assert_eq!(inspect.break_lock(name.clone()).await.unwrap(), 1);
    let next = soon("the waiter", waiter).await.unwrap();
    soon("the loss", guard.lost()).await;
    let reason = guard.loss_reason();
    let expected = matches!(reason, Some(LossReason::Broken | LossReason::SessionEnded));
    assert!(expected, "the loss reason of a broken lock is {reason:?}");
    let error = guard.while_held(async {}).await.unwrap_err();
    assert_eq!((error.kind(), error.loss_reason()), (ErrorKind::Lost, reason));
    assert_eq!(next.loss_reason(), None);
    assert!(next.is_held());
    next.release().await.unwrap();
    eventually("no holder", async || inspect.show(name.clone()).await.unwrap().is_empty()).await;
    assert_eq!(inspect.break_lock(name.clone()).await.unwrap(), 0);
    if subject.capabilities().leases {
        // The holder is gone and cannot release: breaking the lock is enough for the waiter.
        let mutex = keeper.mutex(name.clone());
        let _gone = mutex.lock().await.unwrap().detach().unwrap();
        let waiter = tokio::spawn(async move { mutex.lock().await.unwrap() });
        subject.wait_for_waiters("a", 1).await;
        assert_eq!(inspect.break_lock(name).await.unwrap(), 1);
        soon("the waiter", waiter).await.unwrap().release().await.unwrap();
    }
    subject.assert_nothing_left(&[&keeper]).await;
}
