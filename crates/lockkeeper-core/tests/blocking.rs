//! The blocking twins, from every kind of thread.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lockkeeper_core::blocking::Keeper;
use lockkeeper_core::{ErrorKind, EventKind, Memory, ReleaseOutcome, State};

/// Everything that a blocking lock does.
fn exercise() {
    let keeper = Keeper::new(Memory::new()).ttl(Duration::from_secs(10));
    let mutex = keeper.mutex("a");
    let guard = mutex.lock().unwrap();
    assert!(mutex.try_lock().unwrap().is_none());
    assert!(mutex.try_lock_for(Duration::from_millis(20)).unwrap().is_none());
    let error = mutex.clone().max_wait(Duration::from_millis(20)).lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    guard.extend(Duration::from_secs(20)).unwrap();
    guard.downgrade().unwrap();
    assert_eq!(guard.state(), State::Held);
    assert_eq!(guard.release().unwrap(), ReleaseOutcome::Released);

    let lock = keeper.rw_lock("b");
    let (one, two) = (lock.read().unwrap(), lock.read().unwrap());
    assert!(lock.try_write().unwrap().is_none());
    drop((one, two));
    drop(lock.write().unwrap());

    let semaphore = keeper.semaphore("c", 3);
    let two = semaphore.acquire_many(2).unwrap();
    assert_eq!(semaphore.available().unwrap(), 1);
    assert!(semaphore.try_acquire_many(2).unwrap().is_none());
    let ticket = two.detach().unwrap();
    assert!(keeper.adopt(ticket).unwrap().is_held());

    let guards = keeper.lock_all(["x", "y"]).lock().unwrap();
    assert!(guards.is_held() && keeper.lock_all(["y", "z"]).try_lock().unwrap().is_none());
    guards.release().unwrap();

    assert_eq!(keeper.with_lock("d", |guard| guard.name().to_owned()).unwrap(), "d");
    let mut watch = keeper.inspect().unwrap().watch("e").unwrap();
    let held = keeper.mutex("e").lock().unwrap();
    assert_eq!(watch.next().unwrap().what, EventKind::Acquired);
    assert_eq!(keeper.inspect().unwrap().break_lock("e").unwrap(), 1);
    assert_eq!(held.release().unwrap(), ReleaseOutcome::AlreadyLost);
    keeper.close();
    assert!(keeper.inspect().unwrap().list("").unwrap().is_empty());
}

#[test]
fn works_from_a_plain_thread() {
    exercise();
}

#[tokio::test(flavor = "current_thread")]
async fn works_inside_a_single_threaded_runtime() {
    exercise();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn works_inside_a_task_of_a_runtime_with_many_threads() {
    tokio::spawn(async { exercise() }).await.unwrap();
}

#[tokio::test]
async fn works_inside_spawn_blocking() {
    tokio::task::spawn_blocking(exercise).await.unwrap();
}

#[tokio::test]
async fn works_beyond_the_budget_of_a_task() {
    let keeper = Keeper::new(Memory::new());
    // A task of tokio may use its primitives 128 times before it has to yield.
    for _ in 0..1000 {
        let guard = keeper.mutex("a").lock().unwrap();
        guard.extend(Duration::from_secs(60)).unwrap();
        guard.release().unwrap();
    }
}

#[test]
fn threads_exclude_each_other_and_all_get_their_turn() {
    let keeper = Keeper::new(Memory::new());
    let (inside, total) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let (mutex, inside, total) = (keeper.mutex("a"), inside.clone(), total.clone());
            std::thread::spawn(move || {
                for _ in 0..50 {
                    let guard = mutex.lock().unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    total.fetch_add(1, Ordering::SeqCst);
                    inside.fetch_sub(1, Ordering::SeqCst);
                    drop(guard);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(total.load(Ordering::SeqCst), 400);
}

#[test]
fn a_lock_is_renewed_while_its_thread_is_busy() {
    let keeper = Keeper::new(Memory::new()).ttl(Duration::from_millis(300));
    let guard = keeper.mutex("a").lock().unwrap();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(900) {
        std::hint::spin_loop();
    }
    assert_eq!(guard.release().unwrap(), ReleaseOutcome::Released);
}
