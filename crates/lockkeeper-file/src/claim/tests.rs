use std::fs;
use std::task::Poll;

use lockkeeper_core::{Background, Name};

use super::*;
use crate::File;

const LONG: Duration = Duration::from_secs(600);

/// A claim that waits in line.
fn claim(store: &File) -> FileClaim {
    let background = Background::new(tokio::runtime::Handle::current());
    let mut spec = ClaimSpec::new(Name::new("a").unwrap(), LONG, background);
    spec.queue = true;
    FileClaim::new(store.store.clone(), spec)
}

fn open_store() -> (File, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    // Nobody is woken by inotify: what comes, comes from others of this process.
    (File::options().polling(true).open(dir.path()).unwrap(), dir)
}

/// A claim that holds, and whose lock stays in this process however long the test takes.
async fn holder(store: &File) -> FileClaim {
    let mut holder = claim(store);
    assert!(matches!(holder.attempt(None).await.unwrap(), Attempt::Granted(_)));
    locked_at(&mut holder, Instant::now() + LONG);
    holder
}

fn locked_at(claim: &mut FileClaim, when: Instant) {
    claim.file.as_mut().unwrap().locked = Some(when);
}

/// A claim that has asked in vain, and listens.
async fn waiter(store: &File) -> FileClaim {
    let mut waiter = claim(store);
    assert!(matches!(waiter.attempt(None).await.unwrap(), Attempt::Contended { .. }));
    assert!(!is_told(&mut waiter));
    waiter
}

/// Whether a claim is told something, without waiting for it.
fn is_told(claim: &mut FileClaim) -> bool {
    let mut changed = claim.changed();
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match changed.as_mut().poll(&mut context) {
        Poll::Ready(change) => change == Change::LookAgain,
        Poll::Pending => false,
    }
}

async fn is_granted(claim: &mut FileClaim) -> bool {
    matches!(claim.attempt(None).await.unwrap(), Attempt::Granted(_))
}

/// Whether the kernel would give the lock to another process.
fn is_free(store: &File) -> bool {
    fs::File::open(store.path("a")).unwrap().try_lock().is_ok()
}

fn nobody_is_in_line(store: &File) -> bool {
    store.store.lines.is_empty()
}

#[tokio::test]
async fn a_released_file_goes_to_the_first_in_line_even_if_others_ask_at_once() {
    let (store, _dir) = open_store();
    let mut holder = holder(&store).await;
    let (mut first, mut second) = (waiter(&store).await, waiter(&store).await);
    assert_eq!(holder.release().await.unwrap(), Release::Released);
    assert!(!is_granted(&mut holder).await, "it was faster than those who wait");
    assert!(!is_told(&mut second));
    assert!(is_told(&mut first));
    assert!(is_granted(&mut first).await);
    assert_eq!(first.release().await.unwrap(), Release::Released);
    assert!(is_granted(&mut second).await, "it need not be told to ask");
    drop((holder, first, second));
    assert!(nobody_is_in_line(&store));
}

#[tokio::test]
async fn each_who_is_handed_a_file_has_a_higher_fence() {
    let (store, _dir) = open_store();
    let mut holder = holder(&store).await;
    let mut fence = holder.held.unwrap().fence;
    for _ in 0..3 {
        let mut next = waiter(&store).await;
        holder.release().await.unwrap();
        let Attempt::Granted(grant) = next.attempt(None).await.unwrap() else { panic!("not it") };
        assert!(grant.fence > fence);
        (holder, fence) = (next, grant.fence);
    }
}

#[tokio::test]
async fn a_file_that_was_handed_to_one_who_goes_is_free() {
    for way in ["dropped", "released"] {
        let (store, _dir) = open_store();
        let mut holder = holder(&store).await;
        let (mut goes, mut stays) = (waiter(&store).await, waiter(&store).await);
        holder.release().await.unwrap();
        assert!(!is_free(&store), "it is on its way");
        if way == "dropped" {
            drop(goes);
        } else {
            assert_eq!(goes.release().await.unwrap(), Release::WasNotHeld);
        }
        assert!(is_free(&store), "{way}");
        assert!(is_granted(&mut stays).await, "{way}");
        assert!(nobody_is_in_line(&store));
    }
}

#[tokio::test]
async fn one_who_has_left_the_line_is_passed_over() {
    let (store, _dir) = open_store();
    let mut holder = holder(&store).await;
    let (gone, mut stays) = (waiter(&store).await, waiter(&store).await);
    drop(gone);
    holder.release().await.unwrap();
    assert!(is_told(&mut stays));
}

#[tokio::test]
async fn a_lock_that_was_here_for_long_is_free_for_other_processes() {
    let (store, _dir) = open_store();
    let mut holder = holder(&store).await;
    let mut waiter = waiter(&store).await;
    locked_at(&mut holder, Instant::now().checked_sub(Duration::from_secs(1)).unwrap());
    holder.release().await.unwrap();
    assert!(is_free(&store));
    assert!(is_granted(&mut waiter).await);
}

/// What is handed on was locked when the kernel did so, and not when it was handed on.
#[tokio::test]
async fn handing_on_does_not_make_a_lock_new() {
    let (store, _dir) = open_store();
    let mut holder = holder(&store).await;
    let locked = holder.file.as_ref().unwrap().locked;
    let mut waiter = waiter(&store).await;
    holder.release().await.unwrap();
    assert!(is_granted(&mut waiter).await);
    assert_eq!(waiter.file.as_ref().unwrap().locked, locked);
}

#[tokio::test]
async fn a_file_that_is_no_longer_in_its_place_is_handed_to_nobody_or_not_believed() {
    for when in ["before", "after"] {
        let (store, _dir) = open_store();
        let mut holder = holder(&store).await;
        let mut waiter = waiter(&store).await;
        let remove = || fs::remove_file(store.path("a")).unwrap();
        if when == "before" {
            remove();
            assert_eq!(holder.release().await.unwrap(), Release::WasNotHeld);
            assert!(!is_told(&mut waiter));
        } else {
            assert_eq!(holder.release().await.unwrap(), Release::Released);
            remove();
        }
        assert!(is_granted(&mut waiter).await);
        let (id, at_path) = (waiter.file.as_ref().unwrap().id, Store::id_at(&store.path("a")));
        assert_eq!(at_path.unwrap(), Some(id), "{when}");
    }
}

#[tokio::test]
async fn what_started_programs_may_hold_as_well_is_not_handed_on() {
    let dir = tempfile::tempdir().unwrap();
    let store = File::options().polling(true).inherit(true).open(dir.path()).unwrap();
    let mut holder = holder(&store).await;
    let _waiter = waiter(&store).await;
    assert!(nobody_is_in_line(&store));
    holder.release().await.unwrap();
    assert!(is_free(&store));
}
