//! Calls that fail, panic, or lose their runtime.

use std::pin::pin;
use std::sync::Mutex;
use std::time::Duration;

use lockkeeper_core::coalescer::{Batch, BatchSender, Coalescer, Limits};
use lockkeeper_core::{ErrorKind, Result};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use crate::store::{
    BREAKS, CALL, Connects, FAILS, ONE_CALL, PANICS, Store, join, open, open_with, poll_once,
    send_all,
};

#[tokio::test(start_paused = true)]
async fn an_error_of_one_request_does_not_affect_the_others_of_its_call() {
    let (store, coalescer) = open(ONE_CALL);
    let mut tasks = send_all(&coalescer, [1, FAILS, 2]).await;
    while let Some(answered) = tasks.join_next().await {
        match answered.unwrap() {
            (FAILS, answer) => assert_eq!(answer.unwrap_err().to_string(), "refused"),
            (item, answer) => assert_eq!(answer.unwrap(), item * 2),
        }
    }
    assert_eq!(store.calls(), [[1, FAILS, 2]]);
}

#[tokio::test(start_paused = true)]
async fn a_failed_call_fails_its_requests_and_no_others() {
    let (_, coalescer) = open(Limits { max_batch: 2, ..ONE_CALL });
    for (item, answer) in send_all(&coalescer, [1, BREAKS, 2, 3]).await.join_all().await {
        match item {
            1 | BREAKS => assert_eq!(answer.unwrap_err().to_string(), "the connection broke"),
            _ => assert_eq!(answer.unwrap(), item * 2),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_connect_fails_all_queued_requests() {
    let connects = Mutex::new(Connects::Fails);
    let store = Store { connecting: CALL, connects, ..Store::default() };
    let (store, coalescer) = open_with(store, Limits { max_batch: 2, ..ONE_CALL });
    let before = Instant::now();
    for (_, answer) in send_all(&coalescer, 0..8).await.join_all().await {
        assert_eq!(answer.unwrap_err().to_string(), "no connection");
    }
    assert_eq!(before.elapsed(), CALL, "they connected once");
    *store.connects.lock().unwrap() = Connects::Succeeds;
    join(send_all(&coalescer, 0..2).await).await;
    assert_eq!(store.calls(), [[0, 1]]);
}

#[tokio::test(start_paused = true)]
async fn a_sender_that_panics_fails_its_requests_and_no_others() {
    let (_, coalescer) = open(Limits { max_batch: 2, max_in_flight: 3, ..ONE_CALL });
    for (item, answer) in send_all(&coalescer, [1, 2, 3, PANICS, 5, 6, 7]).await.join_all().await {
        match item {
            3 | PANICS => assert_eq!(answer.unwrap_err().to_string(), "the call panicked"),
            _ => assert_eq!(answer.unwrap(), item * 2),
        }
    }
    // A panic before the call is sent.
    let connects = Mutex::new(Connects::Panics);
    let (store, coalescer) = open_with(Store { connects, ..Store::default() }, ONE_CALL);
    for (_, answer) in send_all(&coalescer, 0..3).await.join_all().await {
        assert_eq!(answer.unwrap_err().to_string(), "the call panicked");
    }
    *store.connects.lock().unwrap() = Connects::Succeeds;
    assert_eq!(coalescer.send(1).await.unwrap(), 2);
    // A panic in a direct send.
    let (_, coalescer) = open(Limits { max_direct: 1, ..ONE_CALL });
    let error = coalescer.send(PANICS).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.to_string().as_str()),
        (ErrorKind::Unavailable, "the call panicked")
    );
    let mut direct = pin!(coalescer.send(1));
    assert!(poll_once(direct.as_mut()).await.is_pending());
    assert_eq!(direct.await.unwrap(), 2);
}

#[test]
fn requests_fail_when_the_runtime_that_sends_them_is_shut_down() {
    let this = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    for connecting in [CALL, Duration::ZERO] {
        let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let runtime = Some(other.handle().clone());
        let store = Store { connecting, runtime, ..Store::default() };
        let (_, coalescer) = open_with(store, Limits { max_batch: 2, ..ONE_CALL });
        let tasks = this.block_on(send_all(&coalescer, 0..5));
        // One call is connecting or in flight; the other requests are queued.
        other.block_on(async { sleep(Duration::from_millis(1)).await });
        drop(other);
        let soon = async { tokio::time::timeout(CALL * 100, tasks.join_all()).await.unwrap() };
        for (_, answer) in this.block_on(soon) {
            let error = answer.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            assert!(error.to_string().contains("was shut down"), "{error}");
        }
        // A later request fails at once.
        let late = this.block_on(coalescer.send(6)).unwrap_err();
        assert!(late.to_string().contains("was shut down"), "{late}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_with_too_few_or_too_many_answers_fails_its_requests() {
    struct Miscounts;
    impl BatchSender for Miscounts {
        type Item = usize;
        type Answer = usize;
        async fn send(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<usize>>> {
            let Some(items) = batch.close() else { return Ok(Vec::new()) };
            Ok(items.iter().flat_map(|item| vec![Ok(*item); *item]).collect())
        }
        fn runtime(&self) -> Handle {
            Handle::current()
        }
    }
    for max_direct in [0, 1] {
        let coalescer = Coalescer::new(Miscounts, Limits { max_direct, ..ONE_CALL });
        for count in [0, 2] {
            let error = coalescer.send(count).await.unwrap_err().to_string();
            assert_eq!(error, format!("the call returned {count} answers to 1 requests"));
        }
        assert_eq!(coalescer.send(1).await.unwrap(), 1);
    }
}
