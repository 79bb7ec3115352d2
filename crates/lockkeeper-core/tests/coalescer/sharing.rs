//! Which requests share a call, and when the call is made.

use std::pin::pin;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lockkeeper_core::coalescer::Limits;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use crate::store::{CALL, ONE_CALL, Store, join, open, open_with, poll_once, send_all};

#[tokio::test(start_paused = true)]
async fn while_few_requests_are_in_flight_each_caller_sends_directly() {
    let (store, coalescer) = open(Limits { max_direct: 3, ..ONE_CALL });
    let (mut one, mut two, mut three) =
        (pin!(coalescer.send(1)), pin!(coalescer.send(2)), pin!(coalescer.send(3)));
    for request in [one.as_mut(), two.as_mut(), three.as_mut()] {
        assert!(poll_once(request).await.is_pending());
    }
    // No other task has run.
    assert_eq!(store.calls(), [[1], [2], [3]]);
    assert_eq!((one.await.unwrap(), two.await.unwrap(), three.await.unwrap()), (2, 4, 6));
    assert_eq!(coalescer.send(4).await.unwrap(), 8);
    assert_eq!(Handle::current().metrics().num_alive_tasks(), 0, "there is no batch task");
}

#[tokio::test(start_paused = true)]
async fn requests_that_arrive_while_others_are_in_flight_share_a_call_in_order() {
    let (store, coalescer) = open(Limits { max_direct: 2, ..ONE_CALL });
    let tasks = send_all(&coalescer, 0..3).await;
    sleep(CALL / 2).await;
    let more = send_all(&coalescer, 3..40).await;
    join(tasks).await;
    join(more).await;
    assert_eq!(store.calls(), [vec![0], vec![1], vec![2], (3..40).collect()]);
}

#[tokio::test(start_paused = true)]
async fn max_in_flight_calls_run_concurrently_and_no_more() {
    let (store, coalescer) = open(Limits { max_in_flight: 3, max_batch: 4, ..ONE_CALL });
    let before = Instant::now();
    join(send_all(&coalescer, 0..48).await).await;
    assert_eq!(store.max_in_flight.load(Ordering::SeqCst), 3);
    assert_eq!(before.elapsed(), CALL * 4, "12 calls, 3 at a time");
}

#[tokio::test(start_paused = true)]
async fn at_most_max_batch_requests_share_a_call() {
    let (store, coalescer) = open(Limits { max_batch: 5, ..ONE_CALL });
    join(send_all(&coalescer, 0..12).await).await;
    let expected = [(0..5).collect::<Vec<_>>(), (5..10).collect(), (10..12).collect()];
    assert_eq!(store.calls(), expected);
}

#[tokio::test(start_paused = true)]
async fn a_request_lingers_for_others_up_to_the_limit() {
    let linger = Duration::from_millis(20);
    let (store, coalescer) = open(Limits { linger, max_batch: 4, ..ONE_CALL });
    let before = Instant::now();
    let first = send_all(&coalescer, [1]).await;
    sleep(linger * 19 / 20).await;
    let second = send_all(&coalescer, [2]).await;
    assert_eq!(store.calls(), Vec::<Vec<u32>>::new());
    join(first).await;
    join(second).await;
    assert_eq!(before.elapsed(), linger + CALL);
    assert_eq!(store.calls(), [[1, 2]]);
    // A full batch does not linger.
    let before = Instant::now();
    join(send_all(&coalescer, 3..7).await).await;
    assert_eq!(before.elapsed(), CALL);
    // The next linger counts from the next request.
    let before = Instant::now();
    assert_eq!(coalescer.send(8).await.unwrap(), 16);
    assert_eq!(before.elapsed(), linger + CALL);
}

#[tokio::test(start_paused = true)]
async fn the_shortest_linger_of_the_queued_requests_applies() {
    let (store, coalescer) = open(Limits { linger: Duration::from_millis(20), ..ONE_CALL });
    let before = Instant::now();
    let tasks = send_all(&coalescer, [1]).await;
    sleep(Duration::from_millis(1)).await;
    let short = coalescer.send_within(2, Duration::from_millis(2));
    assert_eq!(short.await.unwrap(), 4);
    assert_eq!(before.elapsed(), Duration::from_millis(3) + CALL);
    join(tasks).await;
    assert_eq!(store.calls(), [[1, 2]]);
    // A request that does not linger sends the queued ones with it.
    let tasks = send_all(&coalescer, [3]).await;
    let before = Instant::now();
    assert_eq!(coalescer.send_within(4, Duration::ZERO).await.unwrap(), 8);
    assert_eq!(before.elapsed(), CALL);
    join(tasks).await;
    assert_eq!(store.calls()[1..], [[3, 4]]);
}

#[tokio::test(start_paused = true)]
async fn the_next_call_starts_after_the_previous_one_has_been_sent() {
    let store = Store { connecting: CALL, ..Store::default() };
    let (store, coalescer) =
        open_with(store, Limits { max_in_flight: 4, max_batch: 2, ..ONE_CALL });
    let before = Instant::now();
    join(send_all(&coalescer, 0..6).await).await;
    assert_eq!(store.calls(), [[0, 1], [2, 3], [4, 5]]);
    assert_eq!(before.elapsed(), CALL * 4, "three connects, one after the other, and a call");
}
