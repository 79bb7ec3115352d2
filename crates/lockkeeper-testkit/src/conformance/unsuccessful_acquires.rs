//! An acquire that ends without the lock leaves nothing that the next attempt could notice.

use std::time::{Duration, Instant};

use lockkeeper_core::Keeper;

use super::{Subject, soon};

/// How long a contended attempt waits in these cases.
const WAIT: Duration = Duration::from_millis(5);
/// A response that took longer than this may have reached the engine's limit for leaving the queue, after which it
/// returns first and leaves later. Such a round, on a busy machine, is not conclusive.
const MAX_PROMPT_TIME: Duration = Duration::from_millis(70);
const ROUNDS: usize = 20;

/// Runs rounds until enough of them were prompt. Each returns how long the unsuccessful acquire took, and whether
/// the lock was free afterwards.
async fn rounds(what: &str, round: impl AsyncFn() -> (Duration, bool)) {
    let mut prompt = 0;
    for _ in 0..ROUNDS * 5 {
        let (took, free) = round().await;
        if took < MAX_PROMPT_TIME {
            assert!(free, "{what}, in round {prompt}, after {took:?}");
            prompt += 1;
        }
        if prompt == ROUNDS {
            return;
        }
    }
    assert!(prompt > 0, "{what}: no round was answered within {MAX_PROMPT_TIME:?}");
}

async fn is_free(keeper: &Keeper, name: &str) -> bool {
    let Some(guard) = soon("try_lock", keeper.mutex(name).try_lock()).await.unwrap() else {
        return false;
    };
    guard.release().await.unwrap();
    true
}

/// A bounded wait that ends without the lock has left the queue by then: after the holder's release, a
/// try gets the lock.
pub async fn a_wait_that_timed_out_has_left_the_queue(subject: Subject) {
    let (keeper, other) = (subject.keeper(), subject.keeper());
    let name = subject.name("a");
    let mutex = keeper.mutex(name.clone());
    rounds("a waiter that gave up stands in the way", async || {
        let guard = soon("lock", mutex.lock()).await.unwrap();
        let start = Instant::now();
        assert!(
            soon("a wait", other.mutex(name.clone()).try_lock_for(WAIT)).await.unwrap().is_none()
        );
        let took = start.elapsed();
        guard.release().await.unwrap();
        (took, is_free(&keeper, &name).await)
    })
    .await;
    rounds("a waiter whose max_wait ended stands in the way", async || {
        let guard = soon("lock", mutex.lock()).await.unwrap();
        let start = Instant::now();
        soon("a wait", other.mutex(name.clone()).max_wait(WAIT).lock()).await.unwrap_err();
        let took = start.elapsed();
        guard.release().await.unwrap();
        (took, is_free(&keeper, &name).await)
    })
    .await;
    subject.assert_nothing_left(&[&keeper, &other]).await;
}

/// A set that could not be locked is given back before the answer: all its names are free at once.
pub async fn a_set_that_was_not_locked_is_free_at_once(subject: Subject) {
    let (keeper, other) = (subject.keeper(), subject.keeper());
    let names = ["a", "b", "c", "d"].map(|name| subject.name(name));
    let last = names[3].clone();
    for wait in [Duration::ZERO, WAIT] {
        rounds("a lock of a failed set is still held", async || {
            let guard = soon("lock", keeper.mutex(last.clone()).lock()).await.unwrap();
            let set = other.lock_all(names.clone());
            let start = Instant::now();
            assert!(soon("the set", set.try_lock_for(wait)).await.unwrap().is_none());
            let took = start.elapsed();
            let mut free = true;
            for name in &names[..3] {
                free &= is_free(&keeper, name).await;
            }
            guard.release().await.unwrap();
            (took, free & is_free(&keeper, &last).await)
        })
        .await;
    }
    subject.assert_nothing_left(&[&keeper, &other]).await;
}
