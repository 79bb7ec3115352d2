//! Requests that arrive while others are in flight share one call.
//!
//! A store that gets many small requests at the same time (attempts, releases, renewals) can often serve them with one
//! call: one script, one statement, one flush. [`Coalescer`] decides which requests share a call; the store's
//! [`BatchSender`] says how a call is made.
//!
//! - While few requests are in flight, each is sent *directly*: the caller's own task makes the call, with no hop to
//!   another task.
//! - From then on requests queue up, and a *batch task* sends what has queued up with one call. The task is spawned when
//!   the first request has to queue and ends when nothing is left to do. Shared calls do not depend on any caller
//!   being polled.
//!
//! # What it guarantees
//!
//! 1. **Order.** Requests are sent in the order in which [`Coalescer::send`] was first polled. No request is sent
//!    directly while the batch task runs, so none overtakes a queued one. Requests of one claim therefore reach
//!    the store in order, provided that a claim drops one request before it sends the next.
//! 2. **Cancellation.** A request that is dropped before it was sent is never sent, and is freed at once. One that is
//!    dropped after that has its answer discarded.
//! 3. **Every request is answered.** If the batch sender fails or panics, or the runtime is shut down, the requests
//!    fail with an error. None waits without end.
//!
//! # What it does not guarantee
//!
//! It sets no timeout. A batch sender that never returns keeps its requests waiting, and after
//! [`max_in_flight`](Limits::max_in_flight) of them those that queue up behind.
//!
//! # Examples
//!
//! ```
//! use lockkeeper_core::Result;
//! use lockkeeper_core::coalescer::{Batch, BatchSender, Coalescer, Limits};
//! use tokio::runtime::Handle;
//!
//! /// Doubles numbers, many with one call.
//! struct Doubler;
//!
//! impl BatchSender for Doubler {
//!     type Item = u32;
//!     type Answer = u32;
//!
//!     async fn send(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<u32>>> {
//!         // Get a connection first: until the batch is closed, more requests may join it.
//!         let Some(numbers) = batch.close() else { return Ok(Vec::new()) };
//!         Ok(numbers.iter().map(|number| Ok(number * 2)).collect())
//!     }
//!
//!     fn runtime(&self) -> Handle {
//!         Handle::current()
//!     }
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<()> {
//! let coalescer = Coalescer::new(Doubler, Limits { max_direct: 1, ..Limits::default() });
//! let (four, six) = tokio::join!(coalescer.send(2), coalescer.send(3));
//! assert_eq!((four?, six?), (4, 6));
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::error::{Error, ErrorKind, Result};

mod batch;
mod queue;

pub use batch::Batch;
use queue::Queue;

/// Makes the calls of a [`Coalescer`]. Implemented by a store.
pub trait BatchSender: Sized + Send + Sync + 'static {
    /// A request.
    type Item: Send + Sync + 'static;
    /// The answer to a request.
    type Answer: Send + 'static;

    /// Makes one call for all requests of a batch. Returns their answers in the order of the requests; each may be an
    /// error of its own. An error instead of answers is the error of every request.
    ///
    /// The sender first gets what it needs to send, such as a connection, then [closes](Batch::close) the batch, and
    /// then sends without awaiting anything in between. The next call starts when the poll that closed the batch
    /// returns: a sender that awaits after `close` and before it sends breaks the order of requests. If it fails before
    /// it has closed the batch, all requests that wait at that moment fail.
    ///
    /// A sender that sends some requests again, for example one after the other because they cannot share a call, asks
    /// [`retain_awaited`](Batch::retain_awaited) before that: the next request of the same claim may be in flight.
    fn send(
        &self,
        batch: &mut Batch<Self>,
    ) -> impl Future<Output = Result<Vec<Result<Self::Answer>>>> + Send;

    /// The runtime to send shared calls on. A store returns the runtime of its connection: if that hangs or ends, no
    /// more requests fail than would anyway.
    fn runtime(&self) -> Handle;
}

/// When requests share a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How many requests may be in flight that were sent directly, each by its caller. Zero sends all requests by
    /// the batch task.
    pub max_direct: usize,
    /// How many shared calls may be in flight. Requests that arrive while there are as many wait, and share the next.
    pub max_in_flight: usize,
    /// How many requests share a call.
    pub max_batch: usize,
    /// How long a request waits for others to share its call, unless there are `max_batch` of them before. Requests
    /// that are sent directly do not wait.
    pub linger: Duration,
}

impl Default for Limits {
    /// Sends up to 8 requests directly; then has 4 calls in flight of up to 64 requests, without linger.
    fn default() -> Self {
        Self { max_direct: 8, max_in_flight: 4, max_batch: 64, linger: Duration::ZERO }
    }
}

/// Lets requests that arrive at the same time share calls. Cheap to clone; clones share their calls.
///
/// See the [module](self) for what it guarantees.
pub struct Coalescer<S: BatchSender> {
    shared: Arc<Shared<S>>,
}

struct Shared<S: BatchSender> {
    sender: S,
    limits: Limits,
    state: Mutex<State<S>>,
    /// Wakes the batch task when a request was queued that it may be able to send, or when none is queued any more.
    queue_changed: Notify,
}

struct State<S: BatchSender> {
    /// The requests that have not been sent, in the order of their arrival.
    queue: Queue<Waiting<S>>,
    /// When the queue is to be sent; `None` is at once.
    due: Option<Instant>,
    /// How many requests are in flight that were sent directly.
    direct: usize,
    has_task: bool,
    /// Whether the batch task could start a call when it last looked.
    has_room: bool,
    /// Whether a call has started that has not closed its batch.
    is_open: bool,
}

struct Waiting<S: BatchSender> {
    item: S::Item,
    answer: oneshot::Sender<Result<S::Answer>>,
}

/// How a request is sent.
enum Admitted<'a, S: BatchSender> {
    Direct(Batch<S>, Direct<'a, S>),
    Queued(Queued<'a, S>, oneshot::Receiver<Result<S::Answer>>),
}

impl<S: BatchSender> Coalescer<S> {
    /// Creates a coalescer. Limits of zero requests or calls count as one, except
    /// [`max_direct`](Limits::max_direct).
    pub fn new(sender: S, mut limits: Limits) -> Self {
        limits.max_in_flight = limits.max_in_flight.max(1);
        limits.max_batch = limits.max_batch.max(1);
        let state = State {
            queue: Queue::new(),
            due: None,
            direct: 0,
            has_task: false,
            has_room: false,
            is_open: false,
        };
        let (state, queue_changed) = (Mutex::new(state), Notify::new());
        Self { shared: Arc::new(Shared { sender, limits, state, queue_changed }) }
    }

    /// The sender that makes the calls.
    pub fn sender(&self) -> &S {
        &self.shared.sender
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Cancel safety
    ///
    /// Dropped before the request was sent, it is never sent. Dropped after that, its answer is discarded; the
    /// store may have obeyed.
    ///
    /// # Errors
    ///
    /// Those of the [`BatchSender`]; [`Unavailable`](ErrorKind::Unavailable) if it panicked or its runtime was shut
    /// down.
    pub fn send(&self, item: S::Item) -> impl Future<Output = Result<S::Answer>> + Send {
        self.send_within(item, self.shared.limits.linger)
    }

    /// Sends a request as [`send`](Self::send) does, with a linger of its own. The shortest linger of the requests
    /// that wait decides when their call is made.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send).
    pub async fn send_within(&self, item: S::Item, linger: Duration) -> Result<S::Answer> {
        match self.admit(item, linger) {
            Admitted::Direct(mut batch, direct) => direct.send(&mut batch).await,
            Admitted::Queued(mut queued, answered) => {
                let answer = answered.await;
                queued.id = None;
                answer.unwrap_or_else(|_| Err(shut_down()))
            }
        }
    }

    fn admit(&self, item: S::Item, linger: Duration) -> Admitted<'_, S> {
        let (shared, limits) = (&*self.shared, &self.shared.limits);
        let mut state = shared.state();
        // Not while there is a batch task: a request of the same claim may be queued, or taken and not yet written.
        if !state.has_task && state.direct < limits.max_direct {
            state.direct += 1;
            drop(state);
            let batch = Batch { items: vec![item], answers: Vec::new(), open: None };
            return Admitted::Direct(batch, Direct(shared));
        }
        let (answer, answered) = oneshot::channel();
        let due = if linger.is_zero() { None } else { Instant::now().checked_add(linger) };
        // `None` comes before every instant.
        let is_earlier = state.queue.is_empty() || due < state.due;
        if is_earlier {
            state.due = due;
        }
        let id = state.queue.push(Waiting { item, answer });
        let spawns = !std::mem::replace(&mut state.has_task, true);
        let wakes = state.has_room
            && (is_earlier || state.due.is_none() || state.queue.len() >= limits.max_batch);
        drop(state);
        let queued = Queued { shared, id: Some(id) };
        if spawns {
            // Created before anything can fail: dropped, it lets the next request spawn another.
            let task = BatchTask { shared: self.shared.clone(), has_ended: false };
            shared.sender.runtime().spawn(task.run());
        } else if wakes {
            shared.queue_changed.notify_one();
        }
        Admitted::Queued(queued, answered)
    }
}

impl<S: BatchSender> Clone for Coalescer<S> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<S: BatchSender> fmt::Debug for Coalescer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state();
        f.debug_struct("Coalescer")
            .field("limits", &self.shared.limits)
            .field("queued", &state.queue.len())
            .field("direct", &state.direct)
            .field("has_task", &state.has_task)
            .finish()
    }
}

impl<S: BatchSender> Shared<S> {
    fn state(&self) -> MutexGuard<'_, State<S>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the call for a batch, and answers its requests.
    async fn call(self: Arc<Self>) {
        let mut batch = Batch { items: Vec::new(), answers: Vec::new(), open: Some(self.clone()) };
        let answers = caught(pin!(async { self.sender.send(&mut batch).await })).await;
        // All that wait have waited for what has failed.
        batch.close_with(usize::MAX);
        batch.answer(answers);
    }

    /// Starts a call, if requests wait that may be sent, with so many calls in flight.
    fn next_call(self: &Arc<Self>, in_flight: usize) -> Option<Call> {
        let mut state = self.state();
        state.has_room = in_flight < self.limits.max_in_flight && !state.is_open;
        if !state.has_room || state.queue.is_empty() {
            return None;
        }
        let is_due = state.due.is_none_or(|due| due <= Instant::now());
        if !is_due && state.queue.len() < self.limits.max_batch {
            return None;
        }
        state.is_open = true;
        drop(state);
        Some(Box::pin(self.clone().call()))
    }
}

/// A request in flight that its caller sends.
struct Direct<'a, S: BatchSender>(&'a Shared<S>);

impl<S: BatchSender> Direct<'_, S> {
    async fn send(self, batch: &mut Batch<S>) -> Result<S::Answer> {
        let answers = caught(pin!(async { self.0.sender.send(batch).await })).await?;
        let count = answers.len();
        answers
            .into_iter()
            .next()
            .filter(|_| count == 1)
            .unwrap_or_else(|| Err(miscounted(count, 1)))
    }
}

impl<S: BatchSender> Drop for Direct<'_, S> {
    fn drop(&mut self) {
        self.0.state().direct -= 1;
    }
}

/// A request in the queue. Dropped while it is there, it leaves.
struct Queued<'a, S: BatchSender> {
    shared: &'a Shared<S>,
    /// `None` when it was answered.
    id: Option<u64>,
}

impl<S: BatchSender> Drop for Queued<'_, S> {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        let mut state = self.shared.state();
        let removed = state.queue.remove(id);
        // The batch task need not linger for a queue that is empty.
        let wakes = removed.is_some() && state.has_room && state.queue.is_empty();
        drop(state);
        // With the state unlocked: dropping a request may run any code.
        drop(removed);
        if wakes {
            self.shared.queue_changed.notify_one();
        }
    }
}

/// A call in flight.
type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Sends the requests that share calls, for as long as there are any.
struct BatchTask<S: BatchSender> {
    shared: Arc<Shared<S>>,
    has_ended: bool,
}

impl<S: BatchSender> BatchTask<S> {
    async fn run(mut self) {
        let mut calls: Vec<Call> = Vec::new();
        loop {
            // Tasks that were just answered, or began at the same time, may have their next request ready.
            tokio::task::yield_now().await;
            let mut has_started = false;
            while let Some(mut call) = self.shared.next_call(calls.len()) {
                let polled = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx)));
                if polled.await.is_pending() {
                    has_started = true;
                    calls.push(call);
                }
            }
            let due = {
                let mut state = self.shared.state();
                if calls.is_empty() && state.queue.is_empty() {
                    state.queue.shrink();
                    state.has_task = false;
                    self.has_ended = true;
                    return;
                }
                state.due.filter(|_| state.has_room && !state.queue.is_empty())
            };
            tokio::select! {
                // A queued request need not poll all calls. If it started none, they come first: requests that are
                // queued and dropped again and again would keep them from being polled.
                biased;
                () = self.shared.queue_changed.notified(), if has_started => {}
                () = progress(&self.shared, &mut calls) => {}
                () = self.shared.queue_changed.notified(), if !has_started => {}
                () = sleep_until(due) => {}
            }
        }
    }
}

impl<S: BatchSender> Drop for BatchTask<S> {
    /// Fails the requests that wait, if the runtime is shut down.
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let mut state = self.shared.state();
        (state.has_task, state.is_open) = (false, false);
        let waiting = state.queue.take_all();
        drop(state);
        // With the state unlocked: their callers wake, and may send again at once.
        drop(waiting);
    }
}

/// Returns when a call has ended, or has closed its batch, so that another may start.
async fn progress<S: BatchSender>(shared: &Shared<S>, calls: &mut Vec<Call>) {
    let was_open = shared.state().is_open;
    poll_fn(|cx| {
        let before = calls.len();
        calls.retain_mut(|call| call.as_mut().poll(cx).is_pending());
        if calls.len() < before || (was_open && !shared.state().is_open) {
            return Poll::Ready(());
        }
        Poll::Pending
    })
    .await;
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// Turns a panic into an error: the requests of other callers depend on it. The call is pinned by the caller: as an
/// argument it would be stored twice, and futures of direct calls are moved.
async fn caught<T>(mut call: Pin<&mut impl Future<Output = Result<T>>>) -> Result<T> {
    poll_fn(|cx| {
        let polled = catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(cx)));
        polled.unwrap_or_else(|_| Poll::Ready(Err(unavailable("the call panicked"))))
    })
    .await
}

fn unavailable(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, message)
}

fn shut_down() -> Error {
    unavailable("the runtime that sends the request was shut down")
}

fn miscounted(answers: usize, requests: usize) -> Error {
    unavailable(format!("{answers} answers to {requests} requests"))
}
