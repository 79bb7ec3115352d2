//! Dropping any future after any number of polls leaves nothing in the store.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use common::{Pair, pair, secs};
use lockkeeper_core::{Keeper, Mode};
use lockkeeper_testkit::{Fault, Op};
use tokio::time::sleep;

/// Polls a future this many times, whenever it is woken, lets it lie for a while, and drops it.
async fn polled<F: Future>(future: F, times: usize, lies: Duration) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = times;
    let output = std::future::poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await;
    if output.is_none() {
        sleep(lies).await;
    }
    output
}

/// How a step of the engine may fail.
const DAYS: [Option<Fault>; 5] = [
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

/// Runs a use of a keeper, dropped after n polls, for every n until it runs to its end; each time the
/// store must be empty afterwards.
async fn drop_everywhere<F: Future>(
    what: &str,
    prepare: impl Fn(&Pair),
    run: impl Fn(Keeper) -> F,
) {
    for lies in [Duration::ZERO, secs(36)] {
        drop_after_each_poll(what, lies, &prepare, &run).await;
    }
}

async fn drop_after_each_poll<F: Future>(
    what: &str,
    lies: Duration,
    prepare: impl Fn(&Pair),
    run: impl Fn(Keeper) -> F,
) {
    for n in 0.. {
        let pair = pair();
        prepare(&pair);
        // The ttl is so long that nothing goes away by itself.
        let ended = polled(run(pair.faulty.clone().ttl(secs(36_000))), n, lies).await.is_some();
        // What is under way may still meet the fault, and others are done; then all is well again.
        sleep(secs(40)).await;
        pair.faults.none();
        pair.faulty.close().await;
        pair.healthy.close().await;
        assert_eq!(pair.left().await, [], "{what}: left behind when dropped after {n} polls");
        if ended {
            break;
        }
        assert!(n < 1000, "{what}: never ends");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_acquire_leaves_no_holder() {
    for fault in DAYS {
        let bad = |pair: &Pair| inject_faults(pair, &[Op::Attempt], fault);
        drop_everywhere(&format!("lock, {fault:?}"), bad, async |keeper| {
            let _ = keeper.mutex("a").lock().await;
        })
        .await;
        drop_everywhere(&format!("try_lock, {fault:?}"), bad, async |keeper| {
            let _ = keeper.mutex("a").try_lock().await;
        })
        .await;
        drop_everywhere(&format!("semaphore, {fault:?}"), bad, async |keeper| {
            let _ = keeper.semaphore("a", 4).acquire_many(3).await;
        })
        .await;
        drop_everywhere(&format!("lock_all, {fault:?}"), bad, async |keeper| {
            let _ = keeper.lock_all(["a", "b", "c"]).lock().await;
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_waiter_leaves_the_queue() {
    for fault in DAYS {
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
                // Lets the other one get it first.
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

/// Dropped before its time is up, while it leaves the queue, or while a set is given back.
#[tokio::test(start_paused = true)]
async fn a_cancelled_bounded_wait_leaves_the_queue() {
    for (op, fault) in
        [Op::Attempt, Op::Release].into_iter().flat_map(|op| DAYS.map(|day| (op, day)))
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
            // Lets the other one get it first.
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
async fn a_dropped_release_releases() {
    for fault in DAYS {
        let bad = |pair: &Pair| inject_faults(pair, &[Op::Release], fault);
        drop_everywhere(&format!("release, {fault:?}"), bad, async |keeper| {
            let guard = keeper.mutex("a").lock().await.unwrap();
            // Once with a background task, once without.
            tokio::task::yield_now().await;
            let _ = guard.release().await;
            let guard = keeper.mutex("b").lock().await.unwrap();
            let _ = guard.release().await;
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_is_released_whichever_of_its_futures_is_dropped() {
    for fault in DAYS {
        let bad = |pair: &Pair| inject_faults(pair, &[Op::Renew, Op::Downgrade], fault);
        drop_everywhere(&format!("extend and downgrade, {fault:?}"), bad, async |keeper| {
            let guard = keeper.rw_lock("a").write().await.unwrap();
            let _ = guard.extend(secs(60)).await;
            let _ = guard.downgrade().await;
            let _ = guard.while_held(sleep(secs(100))).await;
        })
        .await;
        drop_everywhere(&format!("with_lock, {fault:?}"), bad, async |keeper| {
            let _ = keeper.with_lock("a", async |_| sleep(secs(100)).await).await;
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_adopt_leaves_the_lock_until_its_lease_ends() {
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
    panic!("never adopted");
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
