//! Coalesces concurrent requests: those that arrive while others are in flight share one call.
//!
//! A store that gets many small requests at the same time (attempts, releases, renewals) can often serve them with one
//! call: one script, one statement, one flush. [`Coalescer`] decides which requests share a call. The store's
//! [`BatchSender`] makes the call.
//!
//! - While few requests are in flight, each is sent *directly*: the caller's own task makes the call.
//! - Further requests are queued, and a *batch task* sends them with shared calls. The task is spawned when the first
//!   request is queued, and ends when no request is queued and no shared call is in flight. A shared call does not depend
//!   on the polling of any caller.
//!
//! # What it guarantees
//!
//! 1. **Order.** Queued requests are sent in the order in which [`Coalescer::send`] was first polled. No request is sent
//!    directly while the batch task runs, so none overtakes a queued one. Direct requests that are in flight at the same
//!    time have no order. So requests of one claim reach the store in order, provided that the claim drops one request
//!    before it sends the next.
//! 2. **Cancellation.** If the future of a request is dropped before the request was sent, it is never sent, and is freed
//!    at once. If it is dropped later, its answer is discarded.
//! 3. **Every request is answered.** If the batch sender fails or panics, or the runtime is shut down, the requests
//!    fail with an error.
//!
//! # What it does not guarantee
//!
//! It sets no timeout. If a call never returns, its requests wait without limit. If
//! [`max_in_flight`](Limits::max_in_flight) calls never return, all queued requests do.
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

use crate::clock::{Moment, sleep_until};
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

    /// Makes one call for all requests of a batch. Returns their answers in the order of the requests. Each answer may be
    /// an error. If the call itself fails, all its requests fail with that error.
    ///
    /// A sender first gets its resources, such as a connection, then [closes](Batch::close) the batch, and then sends. It
    /// must not await between `close` and the send: the next call may start when that poll returns, and would overtake this
    /// one. If the sender fails before it has closed the batch, all requests that are queued at that time fail.
    ///
    /// Before a sender sends requests a second time, for example one by one because they cannot share a call, it must call
    /// [`retain_awaited`](Batch::retain_awaited): the claim of a dropped request may have sent its next one.
    fn send(
        &self,
        batch: &mut Batch<Self>,
    ) -> impl Future<Output = Result<Vec<Result<Self::Answer>>>> + Send;

    /// Returns the runtime that runs the batch task. A store returns the runtime of its connection, because without that
    /// runtime the requests fail in any case.
    fn runtime(&self) -> Handle;
}

/// When requests share a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The maximum number of direct requests in flight. With zero, the batch task sends all requests.
    pub max_direct: usize,
    /// The maximum number of shared calls in flight. Requests that arrive beyond that share a later call.
    pub max_in_flight: usize,
    /// The maximum number of requests in a shared call.
    pub max_batch: usize,
    /// How long a queued request waits for others to share its call. It waits less if `max_batch` requests are queued.
    /// Direct requests do not wait.
    pub linger: Duration,
}

impl Default for Limits {
    /// Up to 8 direct requests; beyond that, up to 4 calls in flight of up to 64 requests each, without linger.
    fn default() -> Self {
        Self { max_direct: 8, max_in_flight: 4, max_batch: 64, linger: Duration::ZERO }
    }
}

/// Makes concurrent requests share calls. Cheap to clone; the requests of all clones share calls.
///
/// The [module documentation](self) states what it guarantees.
pub struct Coalescer<S: BatchSender> {
    shared: Arc<Shared<S>>,
}

struct Shared<S: BatchSender> {
    sender: S,
    limits: Limits,
    state: Mutex<State<S>>,
    /// Wakes the batch task when a request was queued that it may be able to send, or when the queue became empty.
    queue_changed: Notify,
}

struct State<S: BatchSender> {
    /// The requests that have not been sent, in the order of their arrival.
    queue: Queue<Waiting<S>>,
    /// When to send the queue; `None` is at once.
    due: Option<Moment>,
    /// The number of direct requests in flight.
    direct: usize,
    has_task: bool,
    /// Whether the batch task could start a call at its last check.
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
    /// Creates a coalescer. A [`max_in_flight`](Limits::max_in_flight) or [`max_batch`](Limits::max_batch) of zero counts
    /// as one.
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

    /// Returns the sender that makes the calls.
    pub fn sender(&self) -> &S {
        &self.shared.sender
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped before the request was sent, it is never sent. If it is dropped later, the answer is
    /// discarded; the store may have executed the request.
    ///
    /// # Errors
    ///
    /// Those of the [`BatchSender`]; [`Unavailable`](ErrorKind::Unavailable) if it panicked or its runtime was shut
    /// down.
    pub fn send(&self, item: S::Item) -> impl Future<Output = Result<S::Answer>> + Send {
        self.send_within(item, self.shared.limits.linger)
    }

    /// Sends a request as [`send`](Self::send) does, with another linger. The shortest linger of the queued requests
    /// decides when their call is made.
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
                let shut_down = || unavailable("the runtime that sends the request was shut down");
                answer.unwrap_or_else(|_| Err(shut_down()))
            }
        }
    }

    fn admit(&self, item: S::Item, linger: Duration) -> Admitted<'_, S> {
        let (shared, limits) = (&*self.shared, &self.shared.limits);
        let mut state = shared.state();
        // Not while there is a batch task: an earlier request of the same claim may be queued, or in a call that has not
        // sent it yet.
        if !state.has_task && state.direct < limits.max_direct {
            state.direct += 1;
            drop(state);
            let batch = Batch { items: vec![item], answers: Vec::new(), open: None };
            return Admitted::Direct(batch, Direct(shared));
        }
        let (answer, answered) = oneshot::channel();
        let due = if linger.is_zero() { None } else { Moment::now().checked_add(linger) };
        // `None` is less than every moment.
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
            // Created before `runtime` can panic: if it is dropped, the next request spawns another task.
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
        let answers = catch_panic(pin!(async { self.sender.send(&mut batch).await })).await;
        // If the call failed before it closed the batch, it fails all queued requests.
        batch.close_with(usize::MAX);
        batch.answer(answers);
    }

    /// Starts a call if queued requests may be sent, given the number of calls in flight.
    fn next_call(self: &Arc<Self>, in_flight: usize) -> Option<Call> {
        let mut state = self.state();
        state.has_room = in_flight < self.limits.max_in_flight && !state.is_open;
        if !state.has_room || state.queue.is_empty() {
            return None;
        }
        let is_due = state.due.is_none_or(|due| due <= Moment::now());
        if !is_due && state.queue.len() < self.limits.max_batch {
            return None;
        }
        state.is_open = true;
        drop(state);
        Some(Box::pin(self.clone().call()))
    }
}

/// A direct request in flight.
struct Direct<'a, S: BatchSender>(&'a Shared<S>);

impl<S: BatchSender> Direct<'_, S> {
    async fn send(self, batch: &mut Batch<S>) -> Result<S::Answer> {
        let answers = catch_panic(pin!(async { self.0.sender.send(batch).await })).await?;
        let [answer] =
            answers.try_into().map_err(|answers: Vec<_>| miscounted(answers.len(), 1))?;
        answer
    }
}

impl<S: BatchSender> Drop for Direct<'_, S> {
    fn drop(&mut self) {
        self.0.state().direct -= 1;
    }
}

/// A queued request. Dropping it removes the request from the queue.
struct Queued<'a, S: BatchSender> {
    shared: &'a Shared<S>,
    /// `None` after the answer.
    id: Option<u64>,
}

impl<S: BatchSender> Drop for Queued<'_, S> {
    fn drop(&mut self) {
        let Some(id) = self.id else { return };
        let mut state = self.shared.state();
        let removed = state.queue.remove(id);
        // Ends the batch task's linger, because there is nothing left to send.
        let wakes = removed.is_some() && state.has_room && state.queue.is_empty();
        drop(state);
        // With the state unlocked: dropping a request runs foreign code.
        drop(removed);
        if wakes {
            self.shared.queue_changed.notify_one();
        }
    }
}

/// A call in flight.
type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Sends queued requests with shared calls, until no request is queued or in flight.
struct BatchTask<S: BatchSender> {
    shared: Arc<Shared<S>>,
    has_ended: bool,
}

impl<S: BatchSender> BatchTask<S> {
    async fn run(mut self) {
        let mut calls: Vec<Call> = Vec::new();
        loop {
            // Lets other tasks queue requests first, so that these share the next call.
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
                // If the last iteration started a call, a new request is handled without polling all calls. Otherwise the
                // calls are polled first: requests that are queued and dropped repeatedly would starve them.
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
    /// Fails the queued requests if the task is dropped early, because its runtime is shut down.
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let mut state = self.shared.state();
        (state.has_task, state.is_open) = (false, false);
        let waiting = state.queue.take_all();
        drop(state);
        // With the state unlocked: the callers wake, and may send again at once.
        drop(waiting);
    }
}

/// Polls all calls until one has ended or has closed its batch, so that another may start.
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

/// Turns a panic into an error, because the requests of several callers depend on the call. The caller of this function
/// pins the call: a future that is passed by value is stored twice.
async fn catch_panic<T>(mut call: Pin<&mut impl Future<Output = Result<T>>>) -> Result<T> {
    poll_fn(|cx| {
        let polled = catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(cx)));
        polled.unwrap_or_else(|_| Poll::Ready(Err(unavailable("the call panicked"))))
    })
    .await
}

fn unavailable(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, message)
}

fn miscounted(answers: usize, requests: usize) -> Error {
    unavailable(format!("the call returned {answers} answers to {requests} requests"))
}
