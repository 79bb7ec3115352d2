//! Dropped requests, and the order of the others.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockkeeper_core::Result;
use lockkeeper_core::coalescer::{Batch, BatchSender, Coalescer, Limits};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::store::{
    CALL, ONE_CALL, Store, batch_task_ends, join, open, open_with, poll_once, send_all,
};

#[tokio::test(start_paused = true)]
async fn requests_join_and_leave_a_call_until_it_is_sent() {
    let store = Store { connecting: CALL, ..Store::default() };
    let (store, coalescer) = open_with(store, ONE_CALL);
    let (mut one, mut two) = (Box::pin(coalescer.send(1)), Box::pin(coalescer.send(2)));
    assert!(poll_once(one.as_mut()).await.is_pending());
    assert!(poll_once(two.as_mut()).await.is_pending());
    sleep(CALL / 2).await;
    let tasks = send_all(&coalescer, [3]).await;
    drop(one);
    join(tasks).await;
    assert_eq!(two.await.unwrap(), 4);
    assert_eq!(store.calls(), [[2, 3]]);
}

#[tokio::test(start_paused = true)]
async fn no_call_is_made_if_all_requests_are_dropped_before_it_is_sent() {
    let store = Store { connecting: CALL, ..Store::default() };
    let (store, coalescer) = open_with(store, ONE_CALL);
    let mut one = Box::pin(coalescer.send(1));
    assert!(poll_once(one.as_mut()).await.is_pending());
    sleep(CALL / 2).await;
    drop(one);
    sleep(CALL * 2).await;
    assert_eq!(store.calls(), Vec::<Vec<u32>>::new());
    assert_eq!(coalescer.send(2).await.unwrap(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_request_dropped_before_it_is_sent_is_never_sent() {
    let (store, coalescer) = open(ONE_CALL);
    let first = send_all(&coalescer, [1]).await;
    sleep(CALL / 2).await;
    let mut dropped = Box::pin(coalescer.send(2));
    assert!(poll_once(dropped.as_mut()).await.is_pending());
    let third = send_all(&coalescer, [3]).await;
    drop(dropped);
    join(first).await;
    join(third).await;
    assert_eq!(store.calls(), [[1], [3]]);
}

#[tokio::test(start_paused = true)]
async fn the_other_requests_of_a_call_get_answers_after_one_is_dropped() {
    let (store, coalescer) = open(ONE_CALL);
    let mut dropped = Box::pin(coalescer.send(1));
    assert!(poll_once(dropped.as_mut()).await.is_pending());
    let tasks = send_all(&coalescer, [2, 3]).await;
    sleep(CALL / 2).await;
    assert_eq!(store.calls(), [[1, 2, 3]]);
    drop(dropped);
    join(tasks).await;
    assert_eq!(coalescer.send(4).await.unwrap(), 8);
}

#[tokio::test(start_paused = true)]
async fn a_retry_sends_only_the_requests_that_are_still_awaited() {
    let store = Store { repeats: true, ..Store::default() };
    let (store, coalescer) = open_with(store, ONE_CALL);
    let mut dropped = Box::pin(coalescer.send(1));
    assert!(poll_once(dropped.as_mut()).await.is_pending());
    let others = send_all(&coalescer, [2, 3]).await;
    sleep(CALL / 2).await;
    drop(dropped);
    join(others).await;
    assert_eq!(store.calls(), [vec![1, 2, 3], vec![2, 3]]);
}

#[tokio::test(start_paused = true)]
async fn a_direct_sender_that_is_dropped_or_not_polled_blocks_no_other_request() {
    let (store, coalescer) = open(Limits { max_direct: 2, ..ONE_CALL });
    let (mut unpolled, mut dropped) = (Box::pin(coalescer.send(1)), Box::pin(coalescer.send(2)));
    assert!(poll_once(unpolled.as_mut()).await.is_pending());
    assert!(poll_once(dropped.as_mut()).await.is_pending());
    let others = send_all(&coalescer, [3, 4]).await;
    drop(dropped);
    join(others).await;
    assert_eq!(store.calls(), [vec![1], vec![2], vec![3, 4]]);
    batch_task_ends().await;
    // The direct slot of the dropped request is free.
    let mut direct = pin!(coalescer.send(5));
    assert!(poll_once(direct.as_mut()).await.is_pending());
    assert_eq!(store.calls().len(), 4);
    assert_eq!(direct.await.unwrap(), 10);
    assert_eq!(unpolled.await.unwrap(), 2);
}

/// The attempt of a claim may still be queued when its release is sent and a direct slot has become free.
#[tokio::test(start_paused = true)]
async fn no_request_is_sent_directly_while_others_are_queued() {
    let store = Store { connecting: CALL, ..Store::default() };
    let (store, coalescer) = open_with(store, Limits { max_direct: 1, ..ONE_CALL });
    let mut direct = Box::pin(coalescer.send(1));
    assert!(poll_once(direct.as_mut()).await.is_pending());
    let queued = send_all(&coalescer, [2]).await;
    drop(direct);
    sleep(CALL / 2).await;
    let last = send_all(&coalescer, [3]).await;
    join(queued).await;
    join(last).await;
    assert_eq!(store.calls(), [[2, 3]]);
}

/// A sender of reference-counted requests.
struct Counted;

impl BatchSender for Counted {
    type Item = Arc<()>;
    type Answer = Arc<()>;

    async fn send(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<Arc<()>>>> {
        sleep(CALL).await;
        let Some(items) = batch.close() else { return Ok(Vec::new()) };
        let answers = items.iter().cloned().map(Ok).collect();
        sleep(CALL).await;
        Ok(answers)
    }

    fn runtime(&self) -> Handle {
        Handle::current()
    }
}

#[tokio::test(start_paused = true)]
async fn memory_is_freed_with_each_request_and_with_the_last_clone() {
    let coalescer = Coalescer::new(Counted, ONE_CALL);
    let item = Arc::new(());
    let mut dropped: Vec<_> = (0..100).map(|_| Box::pin(coalescer.send(item.clone()))).collect();
    for request in &mut dropped {
        assert!(poll_once(request.as_mut()).await.is_pending());
    }
    let last = dropped.pop().unwrap();
    drop(dropped);
    assert_eq!(Arc::strong_count(&item), 2, "only the awaited request is kept");
    drop(last.await.unwrap());
    assert_eq!(Arc::strong_count(&item), 1);
    batch_task_ends().await;
    let (store, coalescer) = open(ONE_CALL);
    let weak = Arc::downgrade(&store);
    drop(store);
    join(send_all(&coalescer, 0..100).await).await;
    batch_task_ends().await;
    drop(coalescer);
    assert!(weak.upgrade().is_none(), "the sender is dropped with the last clone");
}

/// On several threads, with requests that are dropped at random.
#[test]
fn requests_of_one_claim_are_sent_in_order_or_not_at_all() {
    struct Log(Mutex<Vec<(u32, u32)>>);
    impl BatchSender for Log {
        type Item = (u32, u32);
        type Answer = ();
        async fn send(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<()>>> {
            if fastrand::bool() {
                tokio::task::yield_now().await;
            }
            let Some(items) = batch.close() else { return Ok(Vec::new()) };
            // Lets other threads run between the close and the write.
            std::thread::yield_now();
            self.0.lock().unwrap().extend(items);
            tokio::task::yield_now().await;
            Ok(items.iter().map(|_| Ok(())).collect())
        }
        fn runtime(&self) -> Handle {
            Handle::current()
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).build().unwrap();
    let limits = Limits { max_direct: 2, max_in_flight: 2, max_batch: 4, linger: Duration::ZERO };
    let coalescer = Coalescer::new(Log(Mutex::default()), limits);
    runtime.block_on(async {
        let mut claims = JoinSet::new();
        for claim in 0..6 {
            let coalescer = coalescer.clone();
            claims.spawn(async move {
                for number in 0..3000 {
                    let mut request = Box::pin(coalescer.send((claim, number)));
                    for _ in 0..fastrand::usize(1..4) {
                        if poll_once(request.as_mut()).await.is_ready() {
                            break;
                        }
                        tokio::task::yield_now().await;
                    }
                }
            });
        }
        claims.join_all().await;
        coalescer.send((99, 0)).await.unwrap();
    });
    let mut last = HashMap::new();
    for &(claim, number) in &*coalescer.sender().0.lock().unwrap() {
        if let Some(before) = last.insert(claim, number) {
            assert!(before < number, "claim {claim}: {number} was sent after {before}");
        }
    }
    assert_eq!(last.len(), 7);
}

/// Otherwise it would keep the sender, and with it a connection, for the whole linger time.
#[tokio::test(start_paused = true)]
async fn the_batch_task_ends_when_the_last_lingering_request_is_dropped() {
    let (store, coalescer) = open(Limits { linger: Duration::from_secs(3600), ..ONE_CALL });
    let mut requests: Vec<_> = (0..2).map(|item| Box::pin(coalescer.send(item))).collect();
    for request in &mut requests {
        assert!(poll_once(request.as_mut()).await.is_pending());
    }
    sleep(CALL).await;
    drop(requests);
    batch_task_ends().await;
    let weak = Arc::downgrade(&store);
    drop((store, coalescer));
    assert!(weak.upgrade().is_none(), "the sender is dropped with the last clone");
}

#[tokio::test]
async fn requests_that_are_dropped_early_do_not_starve_another() {
    /// Responds after some polls.
    struct Slow;
    impl BatchSender for Slow {
        type Item = ();
        type Answer = ();
        async fn send(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<()>>> {
            let Some(items) = batch.close() else { return Ok(Vec::new()) };
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
            Ok(items.iter().map(|()| Ok(())).collect())
        }
        fn runtime(&self) -> Handle {
            Handle::current()
        }
    }
    let coalescer = Coalescer::new(Slow, Limits { max_in_flight: 2, ..ONE_CALL });
    let mut first = pin!(coalescer.send(()));
    for _ in 0..100 {
        if poll_once(first.as_mut()).await.is_ready() {
            return;
        }
        let mut dropped = Box::pin(coalescer.send_within((), Duration::from_secs(3600)));
        // After a yield, so that the first request is sent alone.
        tokio::task::yield_now().await;
        assert!(poll_once(dropped.as_mut()).await.is_pending());
    }
    panic!("the first request gets no answer while others arrive");
}
