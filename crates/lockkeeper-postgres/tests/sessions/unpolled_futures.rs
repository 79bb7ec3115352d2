//! Futures that are polled for a while and then neither polled nor dropped: nobody else may depend on them.

use std::pin::Pin;
use std::sync::mpsc;
use std::task::{Context, Waker};
use std::time::Duration;

use lockkeeper_core::{ErrorKind, Guard, Keeper, Result};
use lockkeeper_postgres::AdvisoryKey;

use crate::common::{SOON, client, eventually, holders_and_waiters, keeper, name, soon};

/// Nobody polls it any more once it is in here; it lives on.
type Left = Pin<Box<dyn Future<Output = Result<Guard>> + Send>>;

/// A lock that is polled so often, with time for answers in between, and then left.
async fn left(keeper: &Keeper, name: String, polls: usize) -> Left {
    let mutex = keeper.mutex(name);
    let mut left: Left = Box::pin(async move { mutex.lock().await });
    for poll in 0..polls {
        if poll > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let polled = left.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending(), "it is not left but has ended");
    }
    left
}

/// A keeper that has a connection already, and keeps it awake: its session does not end by itself.
async fn warm(ttl: Duration) -> (Keeper, Guard) {
    let keeper = keeper("").ttl(ttl);
    let other = keeper.mutex(name("other")).lock().await.unwrap();
    (keeper, other)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_granted_to_a_future_that_was_left_comes_back() {
    let (keeper, _other) = warm(Duration::from_secs(2)).await;
    let (name, client) = (name("left"), client().await);
    let mut left = left(&keeper, name.clone(), 1).await;
    let key = AdvisoryKey::of(&name);
    eventually("it is granted", async || holders_and_waiters(&client, key).await == (1, 0)).await;
    let next = soon("the next", keeper.mutex(name.clone()).lock()).await.unwrap();
    let error = soon("what was left", left.as_mut()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("its future was not polled for 2.0s"), "{error}");
    assert!(next.is_held());
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_was_left_does_not_keep_those_behind_it_waiting() {
    let (keeper, _other) = warm(Duration::from_secs(2)).await;
    let holder = crate::common::keeper("");
    let names: Vec<String> = (0..4).map(|_| name("left-waiter")).collect();
    let mut lefts = Vec::new();
    let mut behind = Vec::new();
    let mut held = Vec::new();
    for (polls, name) in names.iter().enumerate() {
        held.push(holder.mutex(name.clone()).lock().await.unwrap());
        lefts.push(left(&keeper, name.clone(), polls + 1).await);
        let mutex = keeper.mutex(name.clone());
        behind.push(tokio::spawn(async move { mutex.lock().await.unwrap() }));
    }
    for guard in held {
        guard.release().await.unwrap();
    }
    for waiter in behind {
        soon("the one behind", waiter).await.unwrap().release().await.unwrap();
    }
    drop(lefts);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_future_left_while_it_opens_a_connection_holds_up_no_other() {
    // So long that nothing is given up in time.
    let keeper = keeper("").ttl(Duration::from_secs(600));
    let _left = left(&keeper, name("opening"), 1).await;
    let guard = soon("another name", keeper.mutex(name("other")).lock()).await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_future_left_while_it_changes_a_session_holds_up_no_other() {
    let keeper = keeper("max_connections=1").ttl(Duration::from_secs(600));
    keeper.mutex(name("warm")).lock().await.unwrap().release().await.unwrap();
    // An idle connection is given another label first.
    let relabelled = keeper.clone().label("another label");
    let _left = left(&relabelled, name("changing"), 1).await;
    let third = keeper.label("a third label");
    let guard = soon("another name", third.mutex(name("other")).lock()).await.unwrap();
    guard.release().await.unwrap();
}

/// A long answer fills what the driver keeps for it, and then the connection stands still.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_was_left_does_not_hold_up_those_who_share_its_connection() {
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

/// Polled for the last time when it is dropped.
struct LastPoll(Left);

impl Drop for LastPoll {
    fn drop(&mut self) {
        let _ = self.0.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    }
}

/// A runtime that ends drops what is spawned on it at once, inside of the call. On several threads, whoever
/// is being polled at that moment may be about to open a connection.
#[test]
fn one_who_asks_for_a_connection_while_the_runtime_ends_does_not_hold_it_up() {
    let (tell, ended) = mpsc::channel();
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
        tell.send(()).unwrap();
    });
    ended.recv_timeout(SOON).expect("the runtime ends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_was_left_does_not_hold_up_those_who_ask_together_with_it() {
    let (keeper, _other) = warm(Duration::from_secs(600)).await;
    let mut all = Vec::new();
    for _ in 0..8 {
        all.push(left(&keeper, name("left"), 1).await);
    }
    // With so many under way, these go together.
    for _ in 0..8 {
        let mutex = keeper.mutex(name("polled"));
        soon("one that is polled", mutex.lock()).await.unwrap().release().await.unwrap();
    }
    drop(all);
    soon("close", keeper.close()).await;
}
