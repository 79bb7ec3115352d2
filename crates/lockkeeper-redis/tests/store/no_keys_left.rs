//! No keys are left in the database after releases, losses and cancelled acquires.

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
async fn a_release_leaves_no_key() {
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
async fn hand_offs_leave_no_key() {
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
async fn cancelled_waiters_leave_no_key() {
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
async fn refused_tries_and_waits_that_time_out_leave_no_key() {
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
    // A waiter that timed out may leave the queue in the background.
    queued(&keeper, "a", 0).await;
    holder.release().await.unwrap();
    permit.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_downgrade_leaves_no_key() {
    let (server, keeper) = server().await;
    let guard = keeper.rw_lock("a").write().await.unwrap();
    let waiting = waiter(&keeper, "a", 1, read(&keeper, "a")).await;
    guard.downgrade().await.unwrap();
    let reader = got(waiting).await;
    let writer = waiter(&keeper, "a", 1, write(&keeper, "a")).await;
    guard.release().await.unwrap();
    reader.release().await.unwrap();
    got(writer).await.release().await.unwrap();
    // Without a later request that could remove leftovers.
    let guard = keeper.rw_lock("a").write().await.unwrap();
    guard.downgrade().await.unwrap();
    guard.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_broken_lock_leaves_no_key() {
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
async fn expired_leases_leave_no_key() {
    let (server, keeper) = server().await;
    let ttl = secs(3);
    let _ = keeper.mutex("a").ttl(ttl).lock().await.unwrap().detach().unwrap();
    let _ = keeper.rw_lock("b").ttl(ttl).read().await.unwrap().detach().unwrap();
    let _ = keeper.semaphore("c", 2).ttl(ttl).acquire().await.unwrap().detach().unwrap();
    eventually("the leases end", async || server.command(&["KEYS", "*"]).is_empty()).await;
    nothing_left(&keeper, &server).await;
}

/// Polls a future up to `times` times, when it is woken, and drops it.
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
enum Acquire {
    Lock,
    Read,
    Permit,
}

async fn acquire(keeper: &Keeper, what: Acquire) -> Result<Guard> {
    match what {
        Acquire::Lock => keeper.mutex("a").lock().await,
        Acquire::Read => keeper.rw_lock("a").read().await,
        Acquire::Permit => keeper.semaphore("a", 1).acquire().await,
    }
}

/// How long to wait for a waiter that is not woken any more.
const WAIT: Duration = Duration::from_millis(10);

/// Drops an acquire after each number of polls: of a lock that is free, held, or handed off meanwhile.
async fn drop_everywhere(what: Acquire) {
    let (server, keeper) = server().await;
    // A TTL that does not expire during the test.
    let keeper = keeper.ttl(secs(36_000));
    let holder = open(&server.url()).await.ttl(secs(36_000));
    let empty = async |when: &str| {
        let when = format!("no keys after {what:?}, {when}");
        eventually(&when, async || number(&server, &["DBSIZE"]) == 0).await;
    };
    for polls in 0..40 {
        let dropped = || tokio::time::timeout(WAIT, polled(acquire(&keeper, what), polls));
        drop(dropped().await);
        empty(&format!("free, after {polls} polls")).await;

        let held = acquire(&holder, what_excludes(what)).await.unwrap();
        drop(dropped().await);
        held.release().await.unwrap();
        empty(&format!("held, after {polls} polls")).await;

        let held = acquire(&holder, what_excludes(what)).await.unwrap();
        let (acquired, released) = tokio::join!(dropped(), held.release());
        drop(acquired);
        released.unwrap();
        empty(&format!("handed off, after {polls} polls")).await;
    }
    nothing_left(&keeper, &server).await;
    nothing_left(&holder, &server).await;
}

fn what_excludes(what: Acquire) -> Acquire {
    match what {
        Acquire::Lock | Acquire::Read => Acquire::Lock,
        Acquire::Permit => Acquire::Permit,
    }
}

#[tokio::test]
async fn a_lock_dropped_after_any_number_of_polls_leaves_no_key() {
    drop_everywhere(Acquire::Lock).await;
}

#[tokio::test]
async fn a_read_dropped_after_any_number_of_polls_leaves_no_key() {
    drop_everywhere(Acquire::Read).await;
}

#[tokio::test]
async fn a_permit_acquire_dropped_after_any_number_of_polls_leaves_no_key() {
    drop_everywhere(Acquire::Permit).await;
}
