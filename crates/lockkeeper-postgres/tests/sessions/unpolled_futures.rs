//! Futures that are polled a few times and then neither polled nor dropped. No other claim may depend on them.

use std::pin::Pin;
use std::sync::mpsc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use lockkeeper_core::{ErrorKind, Guard, Keeper, Result};
use lockkeeper_postgres::AdvisoryKey;

use crate::common::{SOON, client, eventually, holders_and_waiters, keeper, name, soon};

/// A future that is neither polled nor dropped.
type Unpolled = Pin<Box<dyn Future<Output = Result<Guard>> + Send>>;

/// Polls a lock `polls` times, with pauses in which answers can arrive. If the future completes, for example because the
/// thread was preempted within a poll, starts again.
async fn unpolled(keeper: &Keeper, name: String, polls: usize) -> Unpolled {
    'attempts: for _ in 0..5 {
        let mutex = keeper.mutex(name.clone());
        let mut future: Unpolled = Box::pin(async move { mutex.lock().await });
        for poll in 0..polls {
            if poll > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let polled = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            if let Poll::Ready(locked) = polled {
                locked.unwrap().release().await.unwrap();
                continue 'attempts;
            }
        }
        return future;
    }
    panic!("the future always completed");
}

/// Returns a keeper with an open connection, and a lock that keeps its session alive.
async fn warm(ttl: Duration) -> (Keeper, Guard) {
    let keeper = keeper("").ttl(ttl);
    let other = keeper.mutex(name("other")).lock().await.unwrap();
    (keeper, other)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_granted_to_an_unpolled_future_is_released() {
    let (keeper, _other) = warm(Duration::from_secs(2)).await;
    let (name, client) = (name("left"), client().await);
    let mut future = unpolled(&keeper, name.clone(), 1).await;
    let key = AdvisoryKey::of(&name);
    eventually("it is granted", async || holders_and_waiters(&client, key).await == (1, 0)).await;
    let next = soon("the next", keeper.mutex(name.clone()).lock()).await.unwrap();
    let error = soon("the unpolled future", future.as_mut()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("its future was not polled for 2.0s"), "{error}");
    assert!(next.is_held());
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_waiter_does_not_block_the_waiters_behind_it() {
    let (keeper, _other) = warm(Duration::from_secs(2)).await;
    let holder = crate::common::keeper("");
    let names: Vec<String> = (0..4).map(|_| name("left-waiter")).collect();
    let mut futures = Vec::new();
    let mut behind = Vec::new();
    let mut held = Vec::new();
    for (polls, name) in names.iter().enumerate() {
        held.push(holder.mutex(name.clone()).lock().await.unwrap());
        futures.push(unpolled(&keeper, name.clone(), polls + 1).await);
        let mutex = keeper.mutex(name.clone());
        behind.push(tokio::spawn(async move { mutex.lock().await.unwrap() }));
    }
    for guard in held {
        guard.release().await.unwrap();
    }
    for waiter in behind {
        soon("the waiter behind it", waiter).await.unwrap().release().await.unwrap();
    }
    drop(futures);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_future_that_opens_a_connection_does_not_block_others() {
    // So long that no attempt is abandoned during the test.
    let keeper = keeper("").ttl(Duration::from_secs(600));
    let _unpolled = unpolled(&keeper, name("opening"), 1).await;
    let guard = soon("another name", keeper.mutex(name("other")).lock()).await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_future_that_configures_a_session_does_not_block_others() {
    let keeper = keeper("max_connections=1").ttl(Duration::from_secs(600));
    keeper.mutex(name("warm")).lock().await.unwrap().release().await.unwrap();
    // The label of an idle connection is changed before it is used.
    let relabelled = keeper.clone().label("another label");
    let _unpolled = unpolled(&relabelled, name("changing"), 1).await;
    let third = keeper.label("a third label");
    let guard = soon("another name", third.mutex(name("other")).lock()).await.unwrap();
    guard.release().await.unwrap();
}

/// A long answer that is not read fills the driver's buffer and blocks the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_list_does_not_block_the_claims_that_share_its_connection() {
    let (application, space) = (name("list"), name("many"));
    let keeper = keeper(&format!("max_connections=1&application_name={application}"))
        .ttl(Duration::from_secs(600));
    let mut guards = Vec::new();
    for i in 0..2000 {
        guards.push(keeper.mutex(format!("{space}/{i}")).lock().await.unwrap());
    }
    let inspect = keeper.inspect().unwrap();
    let mut list = Box::pin(async move { inspect.list("").await });
    assert!(list.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let guard = soon("another name", keeper.mutex(space).lock()).await.unwrap();
    guard.release().await.unwrap();
    drop(guards);
    soon("close", keeper.close()).await;
}

/// A future that is polled for the last time when it is dropped.
struct LastPoll(Unpolled);

impl Drop for LastPoll {
    fn drop(&mut self) {
        let _ = self.0.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    }
}

/// A runtime that is shutting down drops a new task inside the call of `spawn`. A future that another thread polls at that
/// time may be about to open a connection.
#[test]
fn opening_a_connection_while_the_runtime_shuts_down_does_not_block_it() {
    let (sender, ended) = mpsc::channel();
    let mutex = keeper("").mutex(name("ending"));
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let last = LastPoll(Box::pin(async move { mutex.lock().await }));
        runtime.spawn(async move {
            let _last = last;
            std::future::pending::<()>().await;
        });
        runtime.block_on(tokio::task::yield_now());
        drop(runtime);
        sender.send(()).unwrap();
    });
    ended.recv_timeout(SOON).expect("the runtime shuts down");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_try_does_not_block_tries_that_share_its_statement() {
    let (keeper, _other) = warm(Duration::from_secs(600)).await;
    let mut all = Vec::new();
    for _ in 0..8 {
        all.push(unpolled(&keeper, name("left"), 1).await);
    }
    // With so many tries in flight, these share statements.
    for _ in 0..8 {
        let mutex = keeper.mutex(name("polled"));
        soon("a polled lock", mutex.lock()).await.unwrap().release().await.unwrap();
    }
    drop(all);
    soon("close", keeper.close()).await;
}
