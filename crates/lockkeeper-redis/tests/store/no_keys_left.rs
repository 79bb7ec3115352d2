//! Whatever happens, no key is left in the database.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use lockkeeper_core::{ErrorKind, Guard, Keeper, Result};
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{
    got, lock, nothing_left, number, open, queued, read, secs, server, waiter, write,
};

#[tokio::test]
async fn nothing_is_left_after_a_release() {
    let (server, keeper) = server().await;
    lock(&keeper, "a").await.release().await.unwrap();
    assert_eq!(number(&server, &["DBSIZE"]), 0);
    keeper.rw_lock("a").write().await.unwrap().release().await.unwrap();
    assert_eq!(number(&server, &["DBSIZE"]), 0);
    let readers = [read(&keeper, "a").await.unwrap(), read(&keeper, "a").await.unwrap()];
    for reader in readers {
        reader.release().await.unwrap();
    }
    assert_eq!(number(&server, &["DBSIZE"]), 0);
    let semaphore = keeper.semaphore("a", 3);
    let permits = [semaphore.acquire().await.unwrap(), semaphore.acquire_many(2).await.unwrap()];
    for permit in permits {
        permit.release().await.unwrap();
    }
    assert_eq!(number(&server, &["DBSIZE"]), 0);
    drop(lock(&keeper, "a").await);
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn nothing_is_left_after_hand_overs() {
    let (server, keeper) = server().await;
    let other = open(&server.url()).await;
    let first = lock(&keeper, "a").await;
    let waiters = [
        waiter(&keeper, "a", 1, read(&other, "a")).await,
        waiter(&keeper, "a", 2, read(&keeper, "a")).await,
        waiter(&keeper, "a", 3, write(&other, "a")).await,
        waiter(&keeper, "a", 4, read(&keeper, "a")).await,
    ];
    first.release().await.unwrap();
    for waiter in waiters {
        got(waiter).await.release().await.unwrap();
    }
    nothing_left(&other, &server).await;
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn nothing_is_left_of_waiters_that_leave() {
    let (server, keeper) = server().await;
    let other = open(&server.url()).await;
    let holder = lock(&keeper, "a").await;
    let permits = keeper.semaphore("a", 2).acquire_many(2).await.unwrap();
    let waiters = [
        waiter(&keeper, "a", 1, write(&other, "a")).await,
        waiter(&keeper, "a", 2, read(&other, "a")).await,
        {
            let semaphore = other.semaphore("a", 2);
            waiter(&keeper, "a", 3, async move { semaphore.acquire().await }).await
        },
    ];
    for waiter in waiters {
        waiter.abort();
    }
    queued(&keeper, "a", 0).await;
    holder.release().await.unwrap();
    permits.release().await.unwrap();
    nothing_left(&other, &server).await;
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn nothing_is_left_of_tries_and_of_waits_that_time_out() {
    let (server, keeper) = server().await;
    let (holder, permit) =
        (lock(&keeper, "a").await, keeper.semaphore("a", 1).acquire().await.unwrap());
    let before = number(&server, &["DBSIZE"]);
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
    assert!(keeper.rw_lock("a").try_read().await.unwrap().is_none());
    assert!(keeper.semaphore("a", 1).try_acquire().await.unwrap().is_none());
    assert_eq!(number(&server, &["DBSIZE"]), before);
    let wait = Duration::from_millis(50);
    assert!(keeper.mutex("a").try_lock_for(wait).await.unwrap().is_none());
    assert!(keeper.rw_lock("a").try_read_for(wait).await.unwrap().is_none());
    assert!(keeper.semaphore("a", 1).try_acquire_for(wait).await.unwrap().is_none());
    let error = keeper.mutex("a").max_wait(wait).lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    // Who timed out leaves in the background.
    queued(&keeper, "a", 0).await;
    holder.release().await.unwrap();
    permit.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn nothing_is_left_after_a_downgrade() {
    let (server, keeper) = server().await;
    let guard = keeper.rw_lock("a").write().await.unwrap();
    let waiting = waiter(&keeper, "a", 1, read(&keeper, "a")).await;
    guard.downgrade().await.unwrap();
    let reader = got(waiting).await;
    let writer = waiter(&keeper, "a", 1, write(&keeper, "a")).await;
    guard.release().await.unwrap();
    reader.release().await.unwrap();
    got(writer).await.release().await.unwrap();
    // With nobody after it who would tidy up.
    let guard = keeper.rw_lock("a").write().await.unwrap();
    guard.downgrade().await.unwrap();
    guard.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn nothing_is_left_after_a_lock_is_broken() {
    let (server, keeper) = server().await;
    let inspect = keeper.inspect().unwrap();
    let writer = lock(&keeper, "a").await;
    let semaphore = keeper.semaphore("a", 3);
    let permits = [semaphore.acquire().await.unwrap(), semaphore.acquire().await.unwrap()];
    assert_eq!(inspect.break_lock("a").await.unwrap(), 3);
    assert_eq!(number(&server, &["DBSIZE"]), 0);
    let readers = [read(&keeper, "a").await.unwrap(), read(&keeper, "a").await.unwrap()];
    assert_eq!(inspect.break_lock("a").await.unwrap(), 2);
    assert_eq!(number(&server, &["DBSIZE"]), 0);
    for guard in permits.into_iter().chain(readers).chain([writer]) {
        soon("the loss", guard.lost()).await;
    }
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn nothing_is_left_when_leases_end_without_a_release() {
    let (server, keeper) = server().await;
    let ttl = secs(3);
    let _ = keeper.mutex("a").ttl(ttl).lock().await.unwrap().detach().unwrap();
    let _ = keeper.rw_lock("b").ttl(ttl).read().await.unwrap().detach().unwrap();
    let _ = keeper.semaphore("c", 2).ttl(ttl).acquire().await.unwrap().detach().unwrap();
    eventually("the leases end", async || server.command(&["KEYS", "*"]).is_empty()).await;
    nothing_left(&keeper, &server).await;
}

/// Polls a future so often, whenever it is woken, and drops it.
async fn polled<T>(future: impl Future<Output = T>, times: usize) -> Option<T> {
    let mut future = pin!(future);
    let mut left = times;
    poll_fn(|cx| {
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
    .await
}

#[derive(Debug, Clone, Copy)]
enum Ask {
    Lock,
    Read,
    Acquire,
}

async fn ask(keeper: &Keeper, what: Ask) -> Result<Guard> {
    match what {
        Ask::Lock => keeper.mutex("a").lock().await,
        Ask::Read => keeper.rw_lock("a").read().await,
        Ask::Acquire => keeper.semaphore("a", 1).acquire().await,
    }
}

/// How long a waiter that is not woken any more is let wait.
const A_MOMENT: Duration = Duration::from_millis(10);

/// Drops an acquire after each number of polls: of what is free, held, or handed over meanwhile.
async fn drop_everywhere(what: Ask) {
    let (server, keeper) = server().await;
    // So long that nothing goes by itself.
    let keeper = keeper.ttl(secs(36_000));
    let holder = open(&server.url()).await.ttl(secs(36_000));
    let empty = async |when: &str| {
        let when = format!("nothing is left of {what:?}, {when}");
        eventually(&when, async || number(&server, &["DBSIZE"]) == 0).await;
    };
    for polls in 0..40 {
        let asked = || tokio::time::timeout(A_MOMENT, polled(ask(&keeper, what), polls));
        drop(asked().await);
        empty(&format!("free, after {polls} polls")).await;

        let held = ask(&holder, what_excludes(what)).await.unwrap();
        drop(asked().await);
        held.release().await.unwrap();
        empty(&format!("held, after {polls} polls")).await;

        let held = ask(&holder, what_excludes(what)).await.unwrap();
        let (asked, released) = tokio::join!(asked(), held.release());
        drop(asked);
        released.unwrap();
        empty(&format!("handed over, after {polls} polls")).await;
    }
    nothing_left(&keeper, &server).await;
    nothing_left(&holder, &server).await;
}

fn what_excludes(what: Ask) -> Ask {
    match what {
        Ask::Lock | Ask::Read => Ask::Lock,
        Ask::Acquire => Ask::Acquire,
    }
}

#[tokio::test]
async fn nothing_is_left_of_a_lock_that_is_dropped_after_any_number_of_polls() {
    drop_everywhere(Ask::Lock).await;
}

#[tokio::test]
async fn nothing_is_left_of_a_read_that_is_dropped_after_any_number_of_polls() {
    drop_everywhere(Ask::Read).await;
}

#[tokio::test]
async fn nothing_is_left_of_an_acquire_that_is_dropped_after_any_number_of_polls() {
    drop_everywhere(Ask::Acquire).await;
}
