//! Re-entrancy within a scope, and only there.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{
    Backend, ErrorKind, Keeper, Memory, ReleaseOutcome, ScopedGuard, State, blocking, scope,
};
use lockkeeper_testkit::wait::soon;

/// A keeper that does not wait: what would be a deadlock is an error.
fn keeper() -> Keeper {
    Keeper::new(Memory::new()).max_wait(Duration::ZERO)
}

async fn is_free(keeper: &Keeper) -> bool {
    keeper.mutex("a").try_lock().await.unwrap().is_some()
}

#[track_caller]
fn refused(answer: lockkeeper_core::Result<ScopedGuard>, kind: ErrorKind) {
    assert_eq!(answer.unwrap_err().kind(), kind);
}

#[tokio::test]
async fn the_inner_one_counts_up_with_the_same_fence_and_the_outermost_gives_back() {
    let keeper = keeper();
    scope(async {
        let outer = keeper.lock_scoped("a").await.unwrap();
        let inner = keeper.clone().ttl(Duration::from_secs(1)).lock_scoped("a").await.unwrap();
        let innermost = keeper.lock_scoped("a").await.unwrap();
        assert!(outer.fence().is_some());
        assert_eq!((inner.fence(), innermost.fence()), (outer.fence(), outer.fence()));
        assert!(inner.remaining().unwrap() > Duration::from_secs(1), "the outer's ttl");
        drop(innermost);
        assert_eq!(inner.release().await.unwrap(), None);
        assert!(outer.is_held() && !is_free(&keeper).await);
        assert_eq!(outer.release().await.unwrap(), Some(ReleaseOutcome::Released));
        assert!(is_free(&keeper).await);
    })
    .await;
}

#[tokio::test]
async fn whichever_guard_is_the_last_gives_back() {
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
async fn a_guard_that_leaves_its_scope_still_holds() {
    let keeper = keeper();
    let guard = scope(keeper.lock_scoped("a")).await.unwrap();
    assert!(guard.is_held() && !is_free(&keeper).await);
    scope(async { refused(keeper.lock_scoped("a").await, ErrorKind::TimedOut) }).await;
    drop(guard);
    assert!(is_free(&keeper).await);
}

#[tokio::test]
async fn without_a_scope_there_is_no_re_entrancy() {
    let keeper = keeper();
    let guard = keeper.lock_scoped("a").await.unwrap();
    refused(keeper.lock_scoped("a").await, ErrorKind::TimedOut);
    assert_eq!(guard.release().await.unwrap(), Some(ReleaseOutcome::Released));
}

#[tokio::test]
async fn a_plain_lock_is_not_re_entrant_in_a_scope_either() {
    let keeper = keeper();
    scope(async {
        let plain = keeper.mutex("a").lock().await.unwrap();
        refused(keeper.lock_scoped("a").await, ErrorKind::TimedOut);
        drop(plain);
        let scoped = keeper.lock_scoped("a").await.unwrap();
        assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
        drop(scoped);
    })
    .await;
}

#[tokio::test]
async fn other_names_and_semaphores_are_other_locks() {
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
async fn keepers_on_one_store_object_are_one_and_others_are_not() {
    let memory = Memory::new();
    let store: Arc<dyn Backend> = Arc::new(memory.clone());
    let one = Keeper::from_backend(store.clone()).max_wait(Duration::ZERO);
    let same = Keeper::from_backend(store).max_wait(Duration::ZERO);
    let same_store = Keeper::new(memory).max_wait(Duration::ZERO);
    let other_store = keeper();
    scope(async {
        let guard = one.lock_scoped("a").await.unwrap();
        assert_eq!(same.lock_scoped("a").await.unwrap().fence(), guard.fence());
        // Nobody can know that it is the same: it waits, as for anybody.
        refused(same_store.lock_scoped("a").await, ErrorKind::TimedOut);
        let other = other_store.lock_scoped("a").await.unwrap();
        drop(guard);
        assert!(other.is_held() && !is_free(&other_store).await && is_free(&one).await);
    })
    .await;
}

#[tokio::test]
async fn a_lost_lock_is_lost_for_all_who_count_on_it_and_cannot_be_counted_on() {
    let keeper = keeper();
    scope(async {
        let outer = keeper.lock_scoped("a").await.unwrap();
        let inner = keeper.lock_scoped("a").await.unwrap();
        let work = inner.while_held(std::future::pending::<()>());
        let taken = async { keeper.inspect().unwrap().break_lock("a").await.unwrap() };
        let (ended, _) = tokio::join!(soon("the loss", work), taken);
        assert_eq!(ended.unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!((outer.state(), inner.state()), (State::Lost, State::Lost));
        // Not a new hold with a new fence, behind the back of the outer.
        refused(keeper.lock_scoped("a").await, ErrorKind::Lost);
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
        refused(plain.await.unwrap(), ErrorKind::TimedOut);
        // A scope belongs to the task that polls it, not to the one that makes it.
        let other = keeper.clone();
        let scoped = tokio::spawn(scope(async move { other.lock_scoped("a").await }));
        refused(scoped.await.unwrap(), ErrorKind::TimedOut);
        // But a guard may be moved there.
        let held = tokio::spawn(async move { guard.is_held() });
        assert!(held.await.unwrap());
        assert!(is_free(&keeper).await);
    })
    .await;
}

#[tokio::test]
async fn an_inner_scope_knows_what_the_outer_has_and_not_the_other_way_round() {
    let keeper = keeper();
    scope(async {
        let outer = keeper.lock_scoped("a").await.unwrap();
        let inner = scope(keeper.lock_scoped("a")).await.unwrap();
        assert_eq!(inner.fence(), outer.fence());
        drop((outer, inner));
        let inner = scope(keeper.lock_scoped("a")).await.unwrap();
        refused(keeper.lock_scoped("a").await, ErrorKind::TimedOut);
        drop(inner);
    })
    .await;
}

#[tokio::test]
async fn branches_with_scopes_of_their_own_exclude_each_other() {
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

/// The documented limit: without scopes of their own, branches are one.
#[tokio::test]
async fn branches_without_scopes_of_their_own_count_up_on_each_other() {
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
async fn a_scope_that_is_dropped_gives_back_what_it_holds() {
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
fn a_blocking_scope_is_a_scope_and_one_with_async_ones() {
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
async fn a_blocking_lock_inside_of_an_async_scope_counts_up() {
    let keeper = keeper();
    scope(async {
        let guard = keeper.lock_scoped("a").await.unwrap();
        assert_eq!(keeper.blocking_lock_scoped("a").unwrap().fence(), guard.fence());
    })
    .await;
    assert!(is_free(&keeper).await);
}
