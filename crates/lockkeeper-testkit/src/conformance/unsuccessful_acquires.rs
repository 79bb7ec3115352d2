//! An unsuccessful acquire leaves nothing that could affect the next attempt.

use std::time::{Duration, Instant};

use lockkeeper_core::Keeper;

use super::{Subject, soon};

/// How long a contended attempt waits in these cases.
const WAIT: Duration = Duration::from_millis(5);
/// The engine leaves the queue before it returns, but waits for that no longer than a limit. A round on a busy machine
/// that takes longer than this may have reached the limit and is not conclusive.
const MAX_PROMPT_TIME: Duration = Duration::from_millis(70);
const ROUNDS: usize = 20;

/// Runs rounds until `ROUNDS` of them were prompt. Each returns the duration of the unsuccessful acquire, and whether
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
    assert!(prompt > 0, "{what}: no round finished within {MAX_PROMPT_TIME:?}");
}

async fn is_free(keeper: &Keeper, name: &str) -> bool {
    let Some(guard) = soon("try_lock", keeper.mutex(name).try_lock()).await.unwrap() else {
        return false;
    };
    guard.release().await.unwrap();
    true
}

/// A bounded wait that times out has left the queue when it returns: after the holder's release, a try succeeds.
pub async fn a_wait_that_timed_out_has_left_the_queue(subject: Subject) {
    let (keeper, other) = (subject.keeper(), subject.keeper());
    let name = subject.name("a");
    let mutex = keeper.mutex(name.clone());
    rounds("a waiter whose try_lock_for timed out is still queued", async || {
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
    rounds("a waiter whose max_wait ended is still queued", async || {
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

/// A `lock_all` that fails releases its locks before it returns: all its names are free at once.
pub async fn a_failed_lock_all_holds_no_lock_when_it_returns(subject: Subject) {
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
