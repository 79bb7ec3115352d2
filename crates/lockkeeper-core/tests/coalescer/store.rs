//! A store that records its calls.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use lockkeeper_core::coalescer::{Batch, BatchSender, Coalescer, Limits};
use lockkeeper_core::{Error, ErrorKind, Result};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::sleep;

/// The duration of a call.
pub(crate) const CALL: Duration = Duration::from_millis(10);
/// A request that fails without failing its call.
pub(crate) const FAILS: u32 = 1000;
/// A request whose call fails after it was sent.
pub(crate) const BREAKS: u32 = 1001;
/// A request whose call panics after it was sent.
pub(crate) const PANICS: u32 = 1002;

/// A store that answers a number with its double and records its calls.
#[derive(Default)]
pub(crate) struct Store {
    /// The requests of each call, in the order in which the calls were sent.
    pub(crate) calls: Mutex<Vec<Vec<u32>>>,
    pub(crate) in_flight: AtomicUsize,
    pub(crate) max_in_flight: AtomicUsize,
    /// The time that each call needs to connect.
    pub(crate) connecting: Duration,
    /// The outcome of connecting.
    pub(crate) connects: Mutex<Connects>,
    pub(crate) runtime: Option<Handle>,
    /// Whether each call sends its requests twice.
    pub(crate) repeats: bool,
}

#[derive(Default, Clone, Copy, PartialEq)]
pub(crate) enum Connects {
    #[default]
    Succeeds,
    Fails,
    Panics,
}

pub(crate) struct Sender(Arc<Store>);

/// Counts the calls in flight.
pub(crate) struct InFlight<'a>(&'a Store);

impl<'a> InFlight<'a> {
    fn begin(store: &'a Store) -> Self {
        let now = store.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        store.max_in_flight.fetch_max(now, Ordering::SeqCst);
        Self(store)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

impl BatchSender for Sender {
    type Item = u32;
    type Answer = u32;

    async fn send(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<u32>>> {
        if !self.0.connecting.is_zero() {
            sleep(self.0.connecting).await;
        }
        let connects = *self.0.connects.lock().unwrap();
        match connects {
            Connects::Succeeds => {}
            Connects::Fails => return Err(failed("no connection")),
            Connects::Panics => panic!("connecting panics"),
        }
        let Some(items) = batch.close() else { return Ok(Vec::new()) };
        self.0.calls.lock().unwrap().push(items.to_vec());
        let _in_flight = InFlight::begin(&self.0);
        sleep(CALL).await;
        if self.0.repeats {
            let Some(items) = batch.retain_awaited() else { return Ok(Vec::new()) };
            self.0.calls.lock().unwrap().push(items.to_vec());
            sleep(CALL).await;
        }
        let items = batch.items().unwrap();
        assert!(!items.contains(&PANICS), "this call panics");
        if items.contains(&BREAKS) {
            return Err(failed("the connection broke"));
        }
        let answer =
            |item: &u32| if *item == FAILS { Err(failed("refused")) } else { Ok(item * 2) };
        Ok(items.iter().map(answer).collect())
    }

    fn runtime(&self) -> Handle {
        self.0.runtime.clone().unwrap_or_else(Handle::current)
    }
}

pub(crate) fn failed(message: &str) -> Error {
    Error::new(ErrorKind::Unavailable, message)
}

pub(crate) fn open(limits: Limits) -> (Arc<Store>, Coalescer<Sender>) {
    open_with(Store::default(), limits)
}

pub(crate) fn open_with(store: Store, limits: Limits) -> (Arc<Store>, Coalescer<Sender>) {
    let store = Arc::new(store);
    (store.clone(), Coalescer::new(Sender(store), limits))
}

/// No direct sends, and one call at a time.
pub(crate) const ONE_CALL: Limits =
    Limits { max_direct: 0, max_in_flight: 1, max_batch: 64, linger: Duration::ZERO };

impl Store {
    pub(crate) fn calls(&self) -> Vec<Vec<u32>> {
        self.calls.lock().unwrap().clone()
    }
}

/// Sends each request in a separate task, in this order.
pub(crate) async fn send_all(
    coalescer: &Coalescer<Sender>,
    items: impl IntoIterator<Item = u32>,
) -> JoinSet<(u32, Result<u32>)> {
    let mut tasks = JoinSet::new();
    for item in items {
        let coalescer = coalescer.clone();
        tasks.spawn(async move { (item, coalescer.send(item).await) });
    }
    tokio::task::yield_now().await;
    tasks
}

/// Waits for all requests and checks their answers.
pub(crate) async fn join(tasks: JoinSet<(u32, Result<u32>)>) {
    for (item, answer) in tasks.join_all().await {
        assert_eq!(answer.unwrap(), item * 2);
    }
}

/// Waits until no other task is left. The batch task checks for more requests before it ends.
pub(crate) async fn batch_task_ends() {
    tokio::time::timeout(CALL, async {
        while Handle::current().metrics().num_alive_tasks() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await
    .expect("the batch task has ended");
}

pub(crate) async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}
