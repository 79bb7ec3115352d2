//! Re-entrancy within a scope.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{
    Backend, ErrorKind, Keeper, Memory, ReleaseOutcome, ScopedGuard, State, blocking, scope,
};
use lockkeeper_testkit::wait::soon;

/// Returns a keeper that does not wait, so that a deadlock becomes an error.
fn keeper() -> Keeper {
    Keeper::new(Memory::new()).max_wait(Duration::ZERO)
}

async fn is_free(keeper: &Keeper) -> bool {
    keeper.mutex("a").try_lock().await.unwrap().is_some()
}

#[track_caller]
fn assert_error(result: lockkeeper_core::Result<ScopedGuard>, kind: ErrorKind) {
    assert_eq!(result.unwrap_err().kind(), kind);
}

#[tokio::test]
async fn an_inner_guard_shares_the_fence_and_the_outermost_releases_the_lock() {
    let keeper = keeper();
    scope(async {
        let outer = keeper.lock_scoped("a").await.unwrap();
        let inner = keeper.clone().ttl(Duration::from_secs(1)).lock_scoped("a").await.unwrap();
        let innermost = keeper.lock_scoped("a").await.unwrap();
        assert!(outer.fence().is_some());
        assert_eq!((inner.fence(), innermost.fence()), (outer.fence(), outer.fence()));
        assert!(inner.remaining().unwrap() > Duration::from_secs(1), "the TTL of the outer guard");
        drop(innermost);
        assert_eq!(inner.release().await.unwrap(), None);
        assert!(outer.is_held() && !is_free(&keeper).await);
        assert_eq!(outer.release().await.unwrap(), Some(ReleaseOutcome::Released));
        assert!(is_free(&keeper).await);
    })
    .await;
}

#[tokio::test]
async fn the_last_guard_in_any_order_releases_the_lock() {
    let keeper = keeper();
    scope(async {
        let outer = keeper.lock_scoped("a").await.unwrap();
        let inner = keeper.lock_scoped("a").await.unwrap();
        let fence = outer.fence();
        drop(outer);
        assert!(inner.is_held() && !is_free(&keeper).await);
        let again = keeper.lock_scoped("a").await.unwrap();
        assert_eq!(again.fence(), fence, "still the same hold");
        drop((inner, again));
        assert!(is_free(&keeper).await);
        let next = keeper.lock_scoped("a").await.unwrap();
        assert!(next.fence() > fence, "a new hold");
    })
    .await;
}

#[tokio::test]
async fn a_guard_that_outlives_its_scope_still_holds_the_lock() {
    let keeper = keeper();
    let guard = scope(keeper.lock_scoped("a")).await.unwrap();
    assert!(guard.is_held() && !is_free(&keeper).await);
    scope(async { assert_error(keeper.lock_scoped("a").await, ErrorKind::TimedOut) }).await;
    drop(guard);
    assert!(is_free(&keeper).await);
}

#[tokio::test]
async fn a_lock_is_not_re_entrant_outside_a_scope() {
    let keeper = keeper();
    let guard = keeper.lock_scoped("a").await.unwrap();
    assert_error(keeper.lock_scoped("a").await, ErrorKind::TimedOut);
    assert_eq!(guard.release().await.unwrap(), Some(ReleaseOutcome::Released));
}

#[tokio::test]
async fn a_plain_lock_is_not_re_entrant_in_a_scope() {
    let keeper = keeper();
    scope(async {
        let plain = keeper.mutex("a").lock().await.unwrap();
        assert_error(keeper.lock_scoped("a").await, ErrorKind::TimedOut);
        drop(plain);
        let scoped = keeper.lock_scoped("a").await.unwrap();
        assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
        drop(scoped);
    })
    .await;
}

#[tokio::test]
async fn scoped_locks_of_different_names_are_independent() {
    let keeper = keeper();
    scope(async {
        let a = keeper.lock_scoped("a").await.unwrap();
        let b = keeper.lock_scoped("b").await.unwrap();
        assert_ne!(a.fence(), None);
        assert_eq!((a.name(), b.name()), ("a", "b"));
        drop(a);
        assert!(is_free(&keeper).await && b.is_held());
    })
    .await;
}

#[tokio::test]
async fn only_keepers_on_the_same_store_object_share_holds() {
    let memory = Memory::new();
    let store: Arc<dyn Backend> = Arc::new(memory.clone());
    let one = Keeper::from_backend(store.clone()).max_wait(Duration::ZERO);
    let same = Keeper::from_backend(store).max_wait(Duration::ZERO);
    let same_store = Keeper::new(memory).max_wait(Duration::ZERO);
    let other_store = keeper();
    scope(async {
        let guard = one.lock_scoped("a").await.unwrap();
        assert_eq!(same.lock_scoped("a").await.unwrap().fence(), guard.fence());
        // A different store object on the same data: the keeper cannot know, so it waits like any other client.
        assert_error(same_store.lock_scoped("a").await, ErrorKind::TimedOut);
        let other = other_store.lock_scoped("a").await.unwrap();
        drop(guard);
        assert!(other.is_held() && !is_free(&other_store).await && is_free(&one).await);
    })
    .await;
}

#[tokio::test]
async fn a_loss_is_reported_by_all_guards_and_blocks_further_re_entrancy() {
    let keeper = keeper();
    scope(async {
        let outer = keeper.lock_scoped("a").await.unwrap();
        let inner = keeper.lock_scoped("a").await.unwrap();
        let work = inner.while_held(std::future::pending::<()>());
        let broken = async { keeper.inspect().unwrap().break_lock("a").await.unwrap() };
        let (ended, _) = tokio::join!(soon("the loss", work), broken);
        assert_eq!(ended.unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!((outer.state(), inner.state()), (State::Lost, State::Lost));
        // Not a new hold with a new fence while the outer guard exists.
        assert_error(keeper.lock_scoped("a").await, ErrorKind::Lost);
        drop(inner);
        assert_eq!(outer.release().await.unwrap(), Some(ReleaseOutcome::AlreadyLost));
        keeper.lock_scoped("a").await.unwrap().release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_spawned_task_is_not_in_the_scope() {
    let keeper = keeper();
    scope(async {
        let guard = keeper.lock_scoped("a").await.unwrap();
        let other = keeper.clone();
        let plain = tokio::spawn(async move { other.lock_scoped("a").await });
        assert_error(plain.await.unwrap(), ErrorKind::TimedOut);
        // A scope belongs to the task that polls it, not to the task that creates it.
        let other = keeper.clone();
        let scoped = tokio::spawn(scope(async move { other.lock_scoped("a").await }));
        assert_error(scoped.await.unwrap(), ErrorKind::TimedOut);
        // A guard may be moved to another task.
        let held = tokio::spawn(async move { guard.is_held() });
        assert!(held.await.unwrap());
        assert!(is_free(&keeper).await);
    })
    .await;
}

#[tokio::test]
async fn an_inner_scope_shares_holds_of_the_outer_scope_and_not_vice_versa() {
    let keeper = keeper();
    scope(async {
        let outer = keeper.lock_scoped("a").await.unwrap();
        let inner = scope(keeper.lock_scoped("a")).await.unwrap();
        assert_eq!(inner.fence(), outer.fence());
        drop((outer, inner));
        let inner = scope(keeper.lock_scoped("a")).await.unwrap();
        assert_error(keeper.lock_scoped("a").await, ErrorKind::TimedOut);
        drop(inner);
    })
    .await;
}

#[tokio::test]
async fn branches_with_separate_scopes_exclude_each_other() {
    let keeper = Keeper::new(Memory::new());
    let branch = async || {
        let guard = keeper.lock_scoped("a").await.unwrap();
        let again = keeper.lock_scoped("a").await.unwrap();
        tokio::task::yield_now().await;
        assert_eq!(guard.fence(), again.fence());
        guard.fence()
    };
    let branches = scope(async { tokio::join!(scope(branch()), scope(branch()), scope(branch())) });
    let (one, two, three) = soon("the branches", branches).await;
    assert!(one < two && two < three, "{one:?} {two:?} {three:?}");
}

/// A documented limit.
#[tokio::test]
async fn branches_without_separate_scopes_share_holds() {
    let keeper = keeper();
    scope(async {
        let (one, two) = tokio::join!(keeper.lock_scoped("a"), async {
            tokio::task::yield_now().await;
            keeper.lock_scoped("a").await
        });
        assert_eq!(one.unwrap().fence(), two.unwrap().fence());
    })
    .await;
}

#[tokio::test]
async fn a_dropped_scope_releases_its_locks() {
    let keeper = Keeper::new(Memory::new());
    let other = keeper.clone();
    let (send, started) = tokio::sync::oneshot::channel();
    let task = tokio::spawn(scope(async move {
        let _outer = other.lock_scoped("a").await.unwrap();
        let _inner = other.lock_scoped("a").await.unwrap();
        send.send(()).unwrap();
        std::future::pending::<()>().await;
    }));
    soon("both are held", started).await.unwrap();
    task.abort();
    drop(soon("the lock", keeper.mutex("a").lock()).await.unwrap());
}

#[test]
fn blocking_and_async_scopes_share_holds() {
    let keeper = keeper();
    blocking::scope(|| {
        let outer = keeper.blocking_lock_scoped("a").unwrap();
        let inner = blocking::scope(|| keeper.blocking_lock_scoped("a").unwrap());
        assert_eq!(inner.fence(), outer.fence());
        let third = blocking::block_on(scope(keeper.lock_scoped("a"))).unwrap();
        assert_eq!(third.fence(), outer.fence());
        drop(third);
        assert_eq!(inner.blocking_release().unwrap(), None);
        assert_eq!(outer.blocking_release().unwrap(), Some(ReleaseOutcome::Released));
    });
    let held = keeper.blocking_lock_scoped("a").unwrap();
    assert_eq!(keeper.blocking_lock_scoped("a").unwrap_err().kind(), ErrorKind::TimedOut);
    drop(held);
}

#[tokio::test(flavor = "current_thread")]
async fn a_blocking_lock_in_an_async_scope_shares_its_holds() {
    let keeper = keeper();
    scope(async {
        let guard = keeper.lock_scoped("a").await.unwrap();
        assert_eq!(keeper.blocking_lock_scoped("a").unwrap().fence(), guard.fence());
    })
    .await;
    assert!(is_free(&keeper).await);
}
