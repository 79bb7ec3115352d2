//! Inspection, breaking of locks, and `gc`.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::fs;
use std::time::Duration;

use common::{LONG, claim, fence_of, files, half_an_hour_ahead, keeper, soon, store};
use lockkeeper_core::{
    Backend as _, Fence, Guard, LossReason, Mode, Name, ReleaseOutcome, Renewal,
};

#[tokio::test]
async fn gc_removes_only_idle_files() {
    let (store, dir) = store();
    let keeper = keeper(&store);
    let held = keeper.mutex("held").lock().await.unwrap();
    let read = keeper.rw_lock("read").read().await.unwrap();
    let permit = keeper.semaphore("gpu", 1).acquire().await.unwrap();
    for name in ["idle", "Idle", &"long".repeat(100)] {
        keeper.mutex(name).lock().await.unwrap().release().await.unwrap();
    }
    fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    fs::write(dir.path().join(".tmp-0123"), "of a killed process").unwrap();
    // Three idle locks, and the gate of the semaphore.
    assert_eq!(store.gc().await.unwrap(), 4);
    assert_eq!(files(dir.path()), ["gpu%00slot%000.lock", "held.lock", "notes.txt", "read.lock"]);
    assert!(held.is_held() && read.is_held() && permit.is_held());
    assert_eq!(held.release().await.unwrap(), ReleaseOutcome::Released);
    drop((read, permit));
    keeper.close().await;
    assert_eq!(store.gc().await.unwrap(), 3);
    assert_eq!(store.gc().await.unwrap(), 0);
}

#[tokio::test]
async fn gc_keeps_a_file_whose_fence_is_ahead_of_the_time() {
    let (store, _dir) = store();
    let ahead = half_an_hour_ahead();
    let mut first = claim(&store, "a");
    assert_eq!(Some(fence_of(&mut *first, ahead).await), ahead.map(Fence::get));
    first.release().await.unwrap();
    assert_eq!(store.gc().await.unwrap(), 0);
    assert!(Some(fence_of(&mut *claim(&store, "a"), None).await) > ahead.map(Fence::get));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_is_never_refused_because_of_inspection_or_gc() {
    let (store, _dir) = store();
    let keeper = keeper(&store);
    let inspecting = tokio::spawn({
        let (store, keeper) = (store.clone(), keeper.clone());
        async move {
            loop {
                keeper.inspect().unwrap().list("").await.unwrap();
                store.gc().await.unwrap();
                // In an empty directory neither call awaits, and the task could not be aborted.
                tokio::task::yield_now().await;
            }
        }
    });
    for i in 0..300 {
        let guard = keeper.mutex("a").try_lock().await.unwrap();
        guard.unwrap_or_else(|| panic!("refused at {i}")).release().await.unwrap();
        let permit = keeper.semaphore("b", 1).try_acquire().await.unwrap();
        permit.unwrap_or_else(|| panic!("no permit at {i}")).release().await.unwrap();
    }
    inspecting.abort();
}

#[tokio::test]
async fn inspection_shows_the_holder_and_its_age() {
    let (store, _dir) = store();
    let keeper = keeper(&store);
    let inspect = keeper.inspect().unwrap();
    let guard = keeper.mutex("a").label("billing").lock().await.unwrap();
    tokio::time::sleep(Duration::from_millis(5)).await;
    let shown = inspect.show("a").await.unwrap();
    let [holder] = &shown[0].holders[..] else { panic!("{shown:?}") };
    assert_eq!(holder.owner, Some(guard.owner()));
    assert_eq!(holder.who(), "billing");
    assert_eq!(holder.fence, guard.fence());
    assert_eq!(holder.mode, Mode::Exclusive);
    assert!(holder.age.unwrap() >= Duration::from_millis(4), "{holder:?}");
    assert_eq!(holder.remaining, None);
    let fence = guard.fence();
    guard.release().await.unwrap();
    assert!(inspect.show("a").await.unwrap().is_empty(), "although the file still has a record");

    let readers =
        [keeper.rw_lock("a").read().await.unwrap(), keeper.rw_lock("a").read().await.unwrap()];
    let shown = inspect.show("a").await.unwrap();
    let [holder] = &shown[0].holders[..] else { panic!("{shown:?}") };
    assert_eq!((holder.owner, holder.mode, holder.fence), (None, Mode::Shared, fence));
    assert_eq!(holder.label, None, "not the previous writer");
    assert!(readers.iter().all(Guard::is_held), "inspection does not affect them");
}

#[tokio::test]
async fn a_broken_lock_keeps_its_fence_and_name() {
    let (store, _dir) = store();
    let ahead = half_an_hour_ahead();
    let name = Name::new("a".repeat(200)).unwrap();
    let mut stuck = claim(&store, &name);
    fence_of(&mut *stuck, ahead).await;
    // The holder does not listen, so it does not release. The lock is broken after the grace time.
    assert_eq!(store.inspector().unwrap().break_lock(&name).await.unwrap(), 1);
    assert_eq!(store.inspector().unwrap().list("").await.unwrap(), []);
    let mut next = claim(&store, &name);
    assert!(Some(fence_of(&mut *next, None).await) > ahead.map(Fence::get));
    let listed = store.inspector().unwrap().list("").await.unwrap();
    assert_eq!(listed[0].name, name, "the long name is kept");
    assert_eq!(stuck.renew(LONG).await.unwrap(), Renewal::Lost(LossReason::Broken));
    assert_eq!(next.renew(LONG).await.unwrap(), Renewal::Held);
}

#[tokio::test]
async fn a_lock_held_by_readers_can_be_broken() {
    let (store, dir) = store();
    let keeper = keeper(&store);
    let lock = keeper.rw_lock("a");
    let readers = [lock.read().await.unwrap(), lock.read().await.unwrap()];
    assert_eq!(keeper.inspect().unwrap().break_lock("a").await.unwrap(), 1);
    for reader in &readers {
        soon("the loss", reader.lost()).await;
    }
    soon("write", lock.write()).await.unwrap().release().await.unwrap();
    assert_eq!(keeper.inspect().unwrap().break_lock("a").await.unwrap(), 0);
    assert_eq!(files(dir.path()), ["a.lock"], "no temporary file is left");
}

#[tokio::test]
async fn a_foreign_holder_is_shown_without_a_label() {
    let (store, dir) = store();
    let file = std::fs::File::create(dir.path().join("a.lock")).unwrap();
    let inspect = keeper(&store).inspect().unwrap();
    for mode in [Mode::Exclusive, Mode::Shared] {
        match mode {
            Mode::Exclusive => file.lock().unwrap(),
            _ => file.lock_shared().unwrap(),
        }
        let shown = inspect.show("a").await.unwrap();
        let [holder] = &shown[0].holders[..] else { panic!("{shown:?}") };
        assert_eq!((holder.label.as_ref(), holder.owner, holder.mode), (None, None, mode));
        assert_eq!(holder.who(), "(unknown)");
        file.unlock().unwrap();
    }
}
