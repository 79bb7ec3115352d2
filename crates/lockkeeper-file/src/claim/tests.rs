//! Those who wait in line. The clock stands still unless a test moves it on.

use std::fs;
use std::task::Poll;

use lockkeeper_core::{Background, Name};

use super::*;
use crate::File;

const LONG: Duration = Duration::from_secs(600);
/// Longer than a lock is left to one who was called.
const MOMENT: Duration = Duration::from_millis(5);

fn open_store() -> (File, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    // Nobody is woken by inotify: what comes, comes from others of this process.
    (File::options().polling(true).open(dir.path()).unwrap(), dir)
}

fn claim(store: &File, queue: bool) -> FileClaim {
    let background = Background::new(tokio::runtime::Handle::current());
    let mut spec = ClaimSpec::new(Name::new("a").unwrap(), LONG, background);
    spec.queue = queue;
    FileClaim::new(store.store.clone(), spec)
}

async fn holder(store: &File) -> FileClaim {
    let mut holder = claim(store, true);
    assert!(is_granted(&mut holder).await);
    holder
}

/// A claim that has asked in vain, and listens.
async fn waiter(store: &File) -> FileClaim {
    let mut waiter = claim(store, true);
    assert!(!is_granted(&mut waiter).await);
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

#[tokio::test(start_paused = true)]
async fn a_released_lock_is_left_to_the_first_in_line_even_by_who_asks_at_once() {
    let (store, _dir) = open_store();
    let mut holder = holder(&store).await;
    let (mut first, mut second) = (waiter(&store).await, waiter(&store).await);
    holder.release().await.unwrap();
    assert!(!is_granted(&mut holder).await, "it was faster than those who wait");
    assert!(!is_granted(&mut second).await);
    assert!(is_free(&store), "for other processes it is free");
    assert!(is_told(&mut first));
    assert!(is_granted(&mut first).await);
    first.release().await.unwrap();
    assert!(is_told(&mut second));
    assert!(is_granted(&mut second).await);
    drop((holder, first, second));
    assert!(store.store.lines.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_try_is_refused_by_no_one_who_only_waits() {
    let (store, _dir) = open_store();
    let mut holder = holder(&store).await;
    let _first = waiter(&store).await;
    holder.release().await.unwrap();
    assert!(is_granted(&mut claim(&store, false)).await);
}

#[tokio::test(start_paused = true)]
async fn one_who_is_called_and_does_not_come_holds_others_up_for_a_moment_only() {
    let (store, _dir) = open_store();
    let mut holder = holder(&store).await;
    let (_unpolled, mut second) = (waiter(&store).await, waiter(&store).await);
    let mut newcomer = claim(&store, true);
    holder.release().await.unwrap();
    assert!(!is_granted(&mut second).await && !is_granted(&mut newcomer).await);
    let start = tokio::time::Instant::now();
    while !is_granted(&mut second).await {
        assert!(start.elapsed() <= MOMENT, "{:?}", start.elapsed());
        let told = tokio::time::timeout(LONG, second.changed()).await;
        assert_eq!(told.expect("it wakes by itself"), Change::LookAgain);
    }
    second.release().await.unwrap();
    tokio::time::advance(MOMENT).await;
    assert!(is_granted(&mut newcomer).await);
}

#[tokio::test(start_paused = true)]
async fn when_one_who_was_called_goes_the_next_is_called() {
    for way in ["dropped", "released"] {
        let (store, _dir) = open_store();
        let mut holder = holder(&store).await;
        let (mut first, mut second) = (waiter(&store).await, waiter(&store).await);
        let mut third = waiter(&store).await;
        holder.release().await.unwrap();
        // It has been woken to see whether the first comes, and waits for that.
        assert!(is_told(&mut second) && !is_granted(&mut second).await && !is_told(&mut second));
        if way == "dropped" {
            drop(first);
        } else {
            assert_eq!(first.release().await.unwrap(), Release::WasNotHeld);
        }
        assert!(is_told(&mut second), "{way}");
        assert!(!is_told(&mut third), "{way}");
        assert!(is_granted(&mut second).await, "{way}");
    }
}

#[tokio::test(start_paused = true)]
async fn whoever_gets_the_lock_or_gives_up_leaves_the_line() {
    let (store, _dir) = open_store();
    let mut holder = holder(&store).await;
    let (mut served, gone, mut released) =
        (waiter(&store).await, waiter(&store).await, waiter(&store).await);
    assert!(!store.store.lines.is_empty());
    drop(gone);
    released.release().await.unwrap();
    holder.release().await.unwrap();
    assert!(is_granted(&mut served).await);
    assert!(store.store.lines.is_empty());
}

/// Whoever is behind one file need not wait for those who are in line for another.
#[tokio::test(start_paused = true)]
async fn a_line_is_for_one_file_whatever_is_at_its_path_later() {
    let (store, _dir) = open_store();
    let holder = holder(&store).await;
    let (_first, mut second) = (waiter(&store).await, waiter(&store).await);
    store.store.lines.call(holder.file.as_ref().unwrap().id);
    fs::remove_file(store.path("a")).unwrap();
    assert!(is_granted(&mut second).await);
    let at_path = id_at(&store.path("a")).unwrap();
    assert_eq!(at_path, second.file.as_ref().map(|open| open.id));
}

/// Others may have found the lock taken in the meantime, and sleep.
#[tokio::test(start_paused = true)]
async fn one_who_has_left_the_lock_to_another_looks_again_even_if_the_moment_is_over_by_then() {
    let (store, _dir) = open_store();
    let mut holder = holder(&store).await;
    let (_first, _second, mut third) =
        (waiter(&store).await, waiter(&store).await, waiter(&store).await);
    holder.release().await.unwrap();
    assert!(!is_granted(&mut third).await);
    tokio::time::advance(MOMENT).await;
    let told = tokio::time::timeout(LONG, third.changed()).await;
    assert_eq!(told.expect("it looks again"), Change::LookAgain);
    assert!(is_granted(&mut third).await);
}

#[tokio::test(start_paused = true)]
async fn nobody_leaves_the_lock_to_one_who_has_come_in_vain() {
    let (store, _dir) = open_store();
    let mut holder = holder(&store).await;
    let (mut first, mut second) = (waiter(&store).await, waiter(&store).await);
    holder.release().await.unwrap();
    let other = fs::File::open(store.path("a")).unwrap();
    other.try_lock().unwrap();
    assert!(!is_granted(&mut first).await, "another process was faster");
    drop(other);
    assert!(is_granted(&mut second).await);
    second.release().await.unwrap();
    assert!(is_told(&mut first), "it has kept its place");
}

#[tokio::test(start_paused = true)]
async fn one_who_does_not_come_is_waited_for_once() {
    let (store, _dir) = open_store();
    let mut holder = holder(&store).await;
    let (_unpolled, mut second, mut third) =
        (waiter(&store).await, waiter(&store).await, waiter(&store).await);
    holder.release().await.unwrap();
    tokio::time::advance(MOMENT).await;
    assert!(is_granted(&mut second).await);
    second.release().await.unwrap();
    assert!(is_told(&mut third), "its turn has come");
    assert!(is_granted(&mut third).await);
}
