//! Dropping any future after any number of polls leaves no state in the store.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use common::{Pair, pair, poll_times, secs};
use lockkeeper_core::{Keeper, Mode};
use lockkeeper_testkit::{Fault, Op};
use tokio::time::sleep;

/// Polls a future up to `times` times, each time it is woken. Then keeps it unpolled for a while and drops it.
async fn polled<F: Future>(future: F, times: usize, unpolled: Duration) -> Option<F::Output> {
    let mut future = pin!(future);
    let output = poll_times(future.as_mut(), times).await;
    if output.is_none() {
        sleep(unpolled).await;
    }
    output
}

/// The faults that are injected, `None` for a healthy store.
const FAULTS: [Option<Fault>; 5] = [
    None,
    Some(Fault::SlowRequest(common::SECOND)),
    Some(Fault::SlowAnswer(common::SECOND)),
    Some(Fault::LostAnswer),
    Some(Fault::NoAnswer),
];

fn inject_faults(pair: &Pair, ops: &[Op], fault: Option<Fault>) {
    for op in ops {
        if let Some(fault) = fault {
            pair.faults.always(*op, fault);
        }
    }
}

/// Runs `run` and drops it after n polls, for every n until it completes. The store must be empty each time.
async fn drop_everywhere<F: Future>(
    what: &str,
    prepare: impl Fn(&Pair),
    run: impl Fn(Keeper) -> F,
) {
    for unpolled in [Duration::ZERO, secs(36)] {
        drop_after_each_poll(what, unpolled, &prepare, &run).await;
    }
}

async fn drop_after_each_poll<F: Future>(
    what: &str,
    unpolled: Duration,
    prepare: impl Fn(&Pair),
    run: impl Fn(Keeper) -> F,
) {
    for n in 0.. {
        let pair = pair();
        prepare(&pair);
        // The TTL is so long that no lease expires during the test.
        let ended = polled(run(pair.faulty.clone().ttl(secs(36_000))), n, unpolled).await.is_some();
        // Requests in flight still meet the fault, and the other holder releases its lock. Then the store is healthy.
        sleep(secs(40)).await;
        pair.faults.none();
        pair.faulty.close().await;
        pair.healthy.close().await;
        assert_eq!(pair.left().await, [], "{what}: dropped after {n} polls");
        if ended {
            break;
        }
        assert!(n < 1000, "{what}: never completes");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_acquire_leaves_no_holder() {
    for fault in FAULTS {
        let prepare = |pair: &Pair| inject_faults(pair, &[Op::Attempt], fault);
        drop_everywhere(&format!("lock, {fault:?}"), prepare, async |keeper| {
            let _ = keeper.mutex("a").lock().await;
        })
        .await;
        drop_everywhere(&format!("try_lock, {fault:?}"), prepare, async |keeper| {
            let _ = keeper.mutex("a").try_lock().await;
        })
        .await;
        drop_everywhere(&format!("semaphore, {fault:?}"), prepare, async |keeper| {
            let _ = keeper.semaphore("a", 4).acquire_many(3).await;
        })
        .await;
        drop_everywhere(&format!("lock_all, {fault:?}"), prepare, async |keeper| {
            let _ = keeper.lock_all(["a", "b", "c"]).lock().await;
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_waiter_leaves_the_queue() {
    for fault in FAULTS {
        let prepare = |pair: &Pair| {
            let mutex = pair.healthy.mutex("a");
            tokio::spawn(async move {
                let guard = mutex.lock().await.unwrap();
                sleep(secs(35)).await;
                drop(guard);
            });
            inject_faults(pair, &[Op::Attempt], fault);
        };
        for mode in [Mode::Exclusive, Mode::Shared] {
            drop_everywhere(&format!("waiting for {mode:?}, {fault:?}"), prepare, async |keeper| {
                // Lets the other task acquire it first.
                tokio::task::yield_now().await;
                let lock = keeper.rw_lock("a");
                let _ = match mode {
                    Mode::Exclusive => lock.write().await,
                    _ => lock.read().await,
                };
            })
            .await;
        }
    }
}

/// Dropped before the deadline, while the waiter leaves the queue, or while a set of locks is released.
#[tokio::test(start_paused = true)]
async fn a_cancelled_bounded_wait_leaves_the_queue() {
    for (op, fault) in
        [Op::Attempt, Op::Release].into_iter().flat_map(|op| FAULTS.map(|fault| (op, fault)))
    {
        let prepare = |pair: &Pair| {
            let mutex = pair.healthy.mutex("b");
            tokio::spawn(async move {
                let guard = mutex.lock().await.unwrap();
                sleep(secs(35)).await;
                drop(guard);
            });
            inject_faults(pair, &[op], fault);
        };
        let what = format!("{op:?}, {fault:?}");
        drop_everywhere(&format!("try_lock_for, {what}"), prepare, async |keeper| {
            // Lets the other task acquire it first.
            tokio::task::yield_now().await;
            let _ = keeper.mutex("b").try_lock_for(secs(2)).await;
        })
        .await;
        drop_everywhere(&format!("max_wait, {what}"), prepare, async |keeper| {
            tokio::task::yield_now().await;
            let _ = keeper.mutex("b").max_wait(secs(2)).lock().await;
        })
        .await;
        drop_everywhere(&format!("lock_all, {what}"), prepare, async |keeper| {
            tokio::task::yield_now().await;
            let _ = keeper.lock_all(["a", "b"]).try_lock_for(secs(2)).await;
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_release_still_releases_the_lock() {
    for fault in FAULTS {
        let prepare = |pair: &Pair| inject_faults(pair, &[Op::Release], fault);
        drop_everywhere(&format!("release, {fault:?}"), prepare, async |keeper| {
            let guard = keeper.mutex("a").lock().await.unwrap();
            // With a background task, then without.
            tokio::task::yield_now().await;
            let _ = guard.release().await;
            let guard = keeper.mutex("b").lock().await.unwrap();
            let _ = guard.release().await;
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_is_released_after_any_of_its_futures_is_dropped() {
    for fault in FAULTS {
        let prepare = |pair: &Pair| inject_faults(pair, &[Op::Renew, Op::Downgrade], fault);
        drop_everywhere(&format!("extend and downgrade, {fault:?}"), prepare, async |keeper| {
            let guard = keeper.rw_lock("a").write().await.unwrap();
            let _ = guard.extend(secs(60)).await;
            let _ = guard.downgrade().await;
            let _ = guard.while_held(sleep(secs(100))).await;
        })
        .await;
        drop_everywhere(&format!("with_lock, {fault:?}"), prepare, async |keeper| {
            let _ = keeper.with_lock("a", async |_| sleep(secs(100)).await).await;
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_adopt_leaves_the_lock_until_its_lease_expires() {
    for n in 0..5 {
        let pair = pair();
        let ticket = pair.faulty.mutex("a").lock().await.unwrap().detach().unwrap();
        pair.faults.always(Op::Renew, Fault::SlowAnswer(secs(1)));
        let adopted = polled(pair.faulty.adopt(ticket.clone()), n, Duration::ZERO).await;
        if adopted.is_some() {
            return;
        }
        pair.faulty.close().await;
        sleep(secs(1)).await;
        let left = pair.left().await;
        assert_eq!(left[0].holders[0].owner, Some(ticket.owner), "after {n} polls");
        sleep(secs(31)).await;
        assert_eq!(pair.left().await, []);
    }
    panic!("the adopt never completed");
}

#[tokio::test(start_paused = true)]
async fn readers_behind_a_cancelled_writer_are_granted_the_lock() {
    let pair = pair();
    let lock = pair.healthy.rw_lock("a");
    let _reader = lock.read().await.unwrap();
    let writer = tokio::spawn({
        let lock = lock.clone();
        async move { lock.write().await }
    });
    pair.until_queued("a", 1).await;
    let second = tokio::spawn({
        let lock = lock.clone();
        async move { lock.read().await }
    });
    pair.until_queued("a", 2).await;
    writer.abort();
    assert!(second.await.unwrap().unwrap().is_held());
}
