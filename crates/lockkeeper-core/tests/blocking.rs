//! The blocking methods, from every kind of thread.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use common::remote::Remote;
use lockkeeper_core::{
    ErrorKind, EventKind, Fence, FenceRegister, Keeper, Leadership, Memory, ReleaseOutcome, State,
};
use tokio::runtime::Builder;

/// Calls every blocking method.
fn exercise(keeper: &Keeper) {
    let mutex = keeper.mutex("a");
    let guard = mutex.blocking_lock().unwrap();
    assert!(mutex.blocking_try_lock().unwrap().is_none());
    assert!(mutex.blocking_try_lock_for(Duration::from_millis(20)).unwrap().is_none());
    let error = mutex.clone().max_wait(Duration::from_millis(20)).blocking_lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    guard.blocking_extend(Duration::from_secs(20)).unwrap();
    guard.blocking_downgrade().unwrap();
    assert_eq!(guard.state(), State::Held);
    assert_eq!(guard.blocking_release().unwrap(), ReleaseOutcome::Released);

    let lock = keeper.rw_lock("b");
    let (one, two) = (lock.blocking_read().unwrap(), lock.blocking_try_read().unwrap());
    assert!(two.is_some() && lock.blocking_try_write().unwrap().is_none());
    assert!(lock.blocking_try_write_for(Duration::from_millis(20)).unwrap().is_none());
    drop((one, two));
    let write = lock.blocking_write().unwrap();
    assert!(lock.blocking_try_read_for(Duration::from_millis(20)).unwrap().is_none());
    drop(write);

    let semaphore = keeper.semaphore("c", 3);
    let two = semaphore.blocking_acquire_many(2).unwrap();
    assert_eq!(semaphore.blocking_available().unwrap(), 1);
    assert!(semaphore.blocking_try_acquire_many(2).unwrap().is_none());
    let wait = Duration::from_millis(20);
    assert!(semaphore.blocking_try_acquire_many_for(2, wait).unwrap().is_none());
    let third = semaphore.blocking_acquire().unwrap();
    assert!(semaphore.blocking_try_acquire().unwrap().is_none());
    assert!(semaphore.blocking_try_acquire_for(wait).unwrap().is_none());
    drop(third);
    let ticket = two.detach().unwrap();
    assert!(keeper.blocking_adopt(ticket).unwrap().is_held());

    let guards = keeper.lock_all(["x", "y"]).blocking_lock().unwrap();
    let others = keeper.lock_all(["y", "z"]);
    assert!(guards.is_held() && others.blocking_try_lock().unwrap().is_none());
    assert!(others.blocking_try_lock_for(wait).unwrap().is_none());
    guards.blocking_release().unwrap();

    assert_eq!(keeper.blocking_with_lock("d", |guard| guard.name().to_owned()).unwrap(), "d");
    let inspect = keeper.inspect().unwrap();
    let mut watch = inspect.blocking_watch("e").unwrap();
    let held = keeper.mutex("e").blocking_lock().unwrap();
    assert_eq!(watch.blocking_next().unwrap().what, EventKind::Acquired);
    assert_eq!(inspect.blocking_show("e").unwrap().len(), 1);
    assert_eq!(inspect.blocking_break_lock("e").unwrap(), 1);
    assert_eq!(held.blocking_release().unwrap(), ReleaseOutcome::AlreadyLost);

    let election = keeper.election("f");
    let mut observe = election.observe().unwrap();
    assert_eq!(observe.blocking_next().unwrap(), None);
    let leadership = election.blocking_campaign().unwrap();
    let leader = election.blocking_leader().unwrap().unwrap();
    assert_eq!(leader.term, Some(leadership.term()));
    assert_eq!(observe.blocking_next().unwrap(), Some(leader));
    assert_eq!(leadership.blocking_resign().unwrap(), ReleaseOutcome::Released);
    let term = election.blocking_run_while_leader(Leadership::term).unwrap();
    assert!(election.blocking_campaign().unwrap().term() > term);

    keeper.blocking_close();
    assert!(inspect.blocking_list("").unwrap().is_empty());
    assert_eq!(mutex.blocking_lock().unwrap_err().kind(), ErrorKind::Closed);
}

fn keeper() -> Keeper {
    Keeper::new(Memory::new()).ttl(Duration::from_secs(10))
}

/// Calls `work` on a separate thread. Panics if it takes more than a minute.
fn in_time(work: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        work();
        drop(done);
    });
    let ended = is_done.recv_timeout(Duration::from_secs(60));
    assert_ne!(ended, Err(mpsc::RecvTimeoutError::Timeout), "the thread hangs");
    thread.join().unwrap();
}

#[test]
fn works_from_a_plain_thread() {
    in_time(|| exercise(&keeper()));
}

#[test]
fn works_on_the_only_thread_of_a_runtime() {
    in_time(|| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { exercise(&keeper()) });
    });
}

#[test]
fn works_inside_a_task_of_a_runtime_with_one_worker() {
    in_time(|| {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async { tokio::spawn(async { exercise(&keeper()) }).await }).unwrap();
    });
}

#[test]
fn works_inside_spawn_blocking_with_a_keeper_of_the_runtime() {
    in_time(|| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let keeper = keeper();
            tokio::task::spawn_blocking(move || exercise(&keeper)).await.unwrap();
        });
    });
}

#[test]
fn works_in_a_task_with_a_keeper_created_outside_a_runtime() {
    in_time(|| {
        let keeper = keeper();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { exercise(&keeper) });
    });
}

#[tokio::test]
async fn works_beyond_the_coop_budget_of_a_task() {
    let keeper = keeper();
    // tokio's coop budget lets a task use 128 of its primitives before it must yield.
    for _ in 0..1000 {
        let guard = keeper.mutex("a").blocking_lock().unwrap();
        guard.blocking_extend(Duration::from_secs(60)).unwrap();
        guard.blocking_release().unwrap();
    }
}

#[test]
fn async_and_blocking_locks_exclude_each_other() {
    in_time(|| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mutex = keeper().mutex("a");
            let held = mutex.lock().await.unwrap();
            assert!(mutex.blocking_try_lock().unwrap().is_none());
            drop(held);
            let held = mutex.blocking_lock().unwrap();
            assert!(mutex.try_lock().await.unwrap().is_none());
            held.blocking_release().unwrap();
            assert!(mutex.try_lock().await.unwrap().is_some());
        });
    });
}

#[test]
fn an_async_guard_can_be_extended_and_released_on_a_blocked_runtime() {
    in_time(|| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let keeper = keeper();
            let guard = keeper.rw_lock("a").write().await.unwrap();
            guard.blocking_extend(Duration::from_secs(20)).unwrap();
            guard.blocking_downgrade().unwrap();
            assert!(keeper.rw_lock("a").try_read().await.unwrap().is_some());
            assert_eq!(guard.blocking_release().unwrap(), ReleaseOutcome::Released);
        });
    });
}

/// A task that blocks its worker may have woken the store's task, which then waits in the LIFO slot of that worker.
#[test]
fn the_stores_task_runs_on_another_worker_if_its_worker_is_blocked() {
    in_time(|| {
        let runtime = Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
        let task = runtime.spawn(async {
            let keeper = Keeper::new(Remote::new(Memory::new())).ttl(Duration::from_secs(1));
            // Lets the store's task start to wait for requests.
            tokio::task::yield_now().await;
            for _ in 0..100 {
                let guard = keeper.mutex("a").blocking_lock().unwrap();
                guard.blocking_extend(Duration::from_secs(2)).unwrap();
                assert_eq!(guard.blocking_release().unwrap(), ReleaseOutcome::Released);
            }
        });
        runtime.block_on(task).unwrap();
    });
}

/// The store and the timers of the guard run on the runtime whose only thread is blocked.
#[test]
fn a_blocking_call_on_an_async_guard_fails_if_the_store_cannot_respond() {
    in_time(|| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let keeper = Keeper::new(Remote::new(Memory::new())).ttl(Duration::from_secs(1));
            let guard = keeper.mutex("a").lock().await.unwrap();
            let error = guard.blocking_extend(Duration::from_secs(2)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
            let guard = keeper.mutex("b").lock().await.unwrap();
            let error = guard.blocking_release().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            let mutex = keeper.mutex("b");
            assert!(mutex.try_lock_for(Duration::from_secs(10)).await.unwrap().is_some());
        });
    });
}

#[test]
fn a_keeper_first_used_by_blocking_code_outlives_any_runtime() {
    let keeper = keeper();
    let held = keeper.mutex("a").blocking_lock().unwrap();
    let guard = {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(keeper.mutex("b").lock()).unwrap()
    };
    assert!(held.is_held() && guard.is_held());
    assert_eq!(guard.blocking_release().unwrap(), ReleaseOutcome::Released);
    assert_eq!(held.blocking_release().unwrap(), ReleaseOutcome::Released);
}

#[test]
fn a_keeper_works_on_several_runtimes_in_sequence() {
    let keeper = keeper();
    for _ in 0..3 {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let lost = runtime.block_on(async {
            let guard = keeper.mutex("a").lock().await.unwrap();
            guard.extend(Duration::from_secs(60)).await.unwrap();
            guard.release().await.unwrap();
            keeper.mutex("b").try_lock().await.unwrap().map(|guard| guard.lost_token())
        });
        assert!(lost.is_some());
        drop(runtime);
        assert!(keeper.mutex("c").blocking_try_lock().unwrap().is_some());
    }
}

#[tokio::test(flavor = "current_thread")]
async fn close_ends_async_and_blocking_waits() {
    let keeper = keeper();
    let held = keeper.mutex("a").lock().await.unwrap();
    let mutex = keeper.mutex("a");
    let blocked = std::thread::spawn({
        let mutex = mutex.clone();
        move || mutex.blocking_lock().map(drop)
    });
    let waiting = tokio::spawn(async move { mutex.lock().await.map(drop) });
    let both_wait = async {
        while keeper.waiting().len() < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), both_wait).await.expect("two waiters");
    keeper.close().await;
    assert_eq!(waiting.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(blocked.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    drop(held);
}

#[test]
fn blocking_work_of_a_leader_is_repeated_if_the_leadership_was_lost_during_it() {
    in_time(|| {
        let keeper = keeper();
        let inspect = keeper.inspect().unwrap();
        let mut terms = Vec::new();
        let election = keeper.election("service");
        let output = election.blocking_run_while_leader(|leadership| {
            terms.push(leadership.term());
            if terms.len() == 1 {
                inspect.blocking_break_lock("election/service").unwrap();
                while leadership.is_leader() {
                    std::thread::yield_now();
                }
            }
            terms.len()
        });
        assert_eq!(output.unwrap(), 2);
        assert!(terms[0] < terms[1], "{terms:?}");
        assert_eq!(election.blocking_leader().unwrap(), None, "the leader has resigned");
    });
}

#[test]
fn blocking_with_lock_fails_if_the_lock_is_lost() {
    in_time(|| {
        let keeper = keeper();
        let inspect = keeper.inspect().unwrap();
        let error = keeper.blocking_with_lock("a", |guard| {
            inspect.blocking_break_lock("a").unwrap();
            while guard.is_held() {
                std::thread::yield_now();
            }
        });
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Lost);
    });
}

#[test]
fn a_fence_register_can_be_checked_by_blocking_code() {
    let register = FenceRegister::in_memory();
    let fence = |number| Fence::new(number).unwrap();
    assert!(register.blocking_check("a", fence(7)).unwrap().is_passed());
    assert!(!register.blocking_check("a", fence(6)).unwrap().is_passed());
}

#[test]
fn threads_exclude_each_other_and_all_are_granted_the_lock() {
    let keeper = keeper();
    let (inside, total) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let (mutex, inside, total) = (keeper.mutex("a"), inside.clone(), total.clone());
            std::thread::spawn(move || {
                for _ in 0..50 {
                    let guard = mutex.blocking_lock().unwrap();
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
fn a_lock_is_renewed_while_the_thread_of_its_holder_is_busy() {
    let keeper = keeper().ttl(Duration::from_millis(300));
    let guard = keeper.mutex("a").blocking_lock().unwrap();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(900) {
        std::hint::spin_loop();
    }
    assert_eq!(guard.blocking_release().unwrap(), ReleaseOutcome::Released);
}
