//! A FIFO queue within the process, in front of a store.

mod inspect;
mod place;
mod queue;

use std::future::{Future, poll_fn, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use self::place::{Place, Queues};
use self::queue::{Active, Entry, Handoff, Leave, Queue, Turn};
use crate::contract::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Holder, Inspector, Mode,
    Release, Renewal, Retry,
};
use crate::error::Result;
use crate::fence::Fence;

/// The number of store notifications that one `changed` call follows up with an attempt. It returns the next one to the
/// engine, which limits the rate. Otherwise a store whose `changed` is always ready would block the thread.
const MAX_NOTIFICATIONS: u32 = 16;

/// A store in which the waiters of one process queue locally, so that only the first of them talk to the inner store.
///
/// For stores whose waiters each need a connection or an open file. Each name and kind has one FIFO queue:
///
/// - The *front* talks to the inner store. It is the first waiter or, if that is a reader, all readers before the
///   first writer.
/// - The *look-ahead* is the waiter behind the front. It prepares for its turn, so that a hand-off waits neither for its
///   task to be scheduled nor for a round trip.
/// - All other waiters get [`Contended`](Attempt::Contended) without I/O and are woken when they move up. If the store
///   fails the front, the others get the same error when they refresh their place.
///
/// A granted claim leaves the queue. An attempt after a release joins at the back. While no claim of the process
/// waits for the name, an attempt goes straight to the inner store. The combinator spawns no task and sets no timer.
///
/// # Fair and unfair stores
///
/// - If the inner store is [`fair`](Capabilities::fair), front and look-ahead both wait in the store's queue, and the
///   store hands off the lock. Attempts reach the store in the order of the local queue. A try is refused while claims of
///   this process wait. This requires that a contended attempt has a place in the store's queue when it returns. If
///   it does not, use [`one_by_one`](Self::one_by_one).
/// - If the inner store is not fair, a release in this process wakes the local front. New claims queue behind it, so a
///   task that releases and locks again does not overtake. The look-ahead only listens for notifications. It sends an
///   attempt if the lock may be free and the front does not send one. Tries go to the store. The order holds within the
///   process; processes compete.
///
/// # Waiters that are not polled
///
/// A waiter whose future is alive but not polled keeps its place and does not block the others. The look-ahead passes it
/// after 1 ms, and a waiter further back when it refreshes its place, every third of its TTL. The order is therefore
/// that of the waiters that are polled. The combinator cannot pass a waiter that the inner store
/// has already granted the lock or queued.
///
/// # For authors of stores
///
/// Wrap the raw store: `Slots::new(Arc::new(LocalQueue::new(Arc::new(raw))))`. The raw store needs no queue of its
/// own. It implements the [contract](Claim), and:
///
/// - [`Claim::changed`] of a queued claim may be called before its first `attempt`. If the store is not fair and declares
///   [`push`](Capabilities::push), the claim should already listen in that call: the look-ahead depends on it.
/// - `changed` may just wait for a grant or a notification. The combinator repeats the attempt, and reports
///   [`Change::Granted`] if it succeeds.
/// - [`Inspector`] may omit waiters. Those that it lists should have an owner, so that they are not listed twice.
///
/// # Examples
///
/// ```
/// # use lockkeeper_core as lockkeeper;
/// use std::sync::Arc;
/// use lockkeeper::{Keeper, LocalQueue, Memory};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// let keeper = Keeper::new(LocalQueue::new(Arc::new(Memory::new())));
/// let guard = keeper.mutex("orders").lock().await?;
/// assert!(keeper.mutex("orders").try_lock().await?.is_none());
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct LocalQueue {
    inner: Arc<dyn Backend>,
    queues: Arc<Queues>,
}

impl LocalQueue {
    /// Wraps a store.
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self::with_active(inner, Active::FrontAndLookAhead)
    }

    /// Wraps a store to which only the first waiter of each queue talks. There is no look-ahead, and readers send their
    /// attempts one after the other.
    ///
    /// For a store that answers [`Contended`](Attempt::Contended) as soon as it has sent a wait over a connection of its
    /// own. The waits of two claims may then reach the server in the wrong order.
    pub fn one_by_one(inner: Arc<dyn Backend>) -> Self {
        Self::with_active(inner, Active::First)
    }

    fn with_active(inner: Arc<dyn Backend>, active: Active) -> Self {
        let handoff = if inner.capabilities().fair { Handoff::Store } else { Handoff::Local };
        Self { inner, queues: Arc::new(Queues::new(handoff, active)) }
    }
}

impl Backend for LocalQueue {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        let place = Place::new(self.queues.clone(), &spec);
        let inner = self.inner.claim(spec)?;
        Ok(Box::new(QueuedClaim { inner, place, floor: None, last_answer: AnsweredBy::Store }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.inner.inspector().map(|_| self as _)
    }
}

/// The origin of the last answer to an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AnsweredBy {
    Store,
    /// The local queue, without I/O, after the last answer of the store.
    Queue,
}

/// The event that ends a wait.
enum Event {
    /// The waiter must send an attempt.
    Turn,
    /// The engine must repeat the attempt.
    Report,
    /// The inner claim reported a change.
    Changed(Change),
}

struct QueuedClaim {
    /// Dropped before `place`, which notifies the next waiter: a held lock must be free by then.
    inner: Box<dyn Claim>,
    place: Place,
    /// The floor of the last attempt, also used for the attempts that `changed` sends.
    floor: Option<Fence>,
    last_answer: AnsweredBy,
}

/// An attempt that was sent to the inner store.
struct AttemptInFlight<'a> {
    /// Dropped before `place`: a cancelled attempt must have ended by then.
    attempt: BoxFuture<'a, Result<Attempt>>,
    place: InFlight<'a>,
    may_have_held: bool,
    /// The number of releases before the attempt was sent.
    releases: usize,
}

/// Ends the attempt in the queue, also if the future is dropped.
struct InFlight<'a>(&'a mut Place);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.with(Queue::attempt_ended);
    }
}

impl Future for AttemptInFlight<'_> {
    type Output = Result<Attempt>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { attempt, place: InFlight(place), may_have_held, releases } = &mut *self;
        let Poll::Ready(answer) = attempt.as_mut().poll(cx) else {
            if !*may_have_held {
                place.join_in_flight(*releases);
            }
            return Poll::Pending;
        };
        place.with(Queue::attempt_ended);
        place.may_hold = !matches!(answer, Ok(Attempt::Contended { .. } | Attempt::Undecided));
        if *may_have_held && !place.may_hold {
            place.released();
        }
        match &answer {
            Ok(Attempt::Granted(_)) => place.leave(Leave::Granted),
            Ok(Attempt::Contended { .. }) => place.refused(*releases),
            Ok(Attempt::Undecided) => {}
            Err(error) => place.failed(error),
        }
        Poll::Ready(answer)
    }
}

/// Notifies the next waiter of a release, also if the future is dropped: the store may have released the lock.
struct Releasing<'a> {
    place: &'a mut Place,
    notifies: bool,
}

impl Drop for Releasing<'_> {
    fn drop(&mut self) {
        if self.notifies {
            self.place.released();
        }
    }
}

impl QueuedClaim {
    /// Sends an attempt to the inner store. If the claim is queued, its stage is `InFlight` already.
    fn attempt_now(&mut self) -> AttemptInFlight<'_> {
        let Self { inner, place, floor, last_answer } = self;
        *last_answer = AnsweredBy::Store;
        let may_have_held = std::mem::replace(&mut place.may_hold, true);
        let (releases, place) = (place.releases(), InFlight(place));
        AttemptInFlight { attempt: inner.attempt(*floor), place, may_have_held, releases }
    }

    async fn wait(&mut self) -> Change {
        let mut notifications = 0;
        loop {
            if !self.place.is_queued() {
                let change = self.inner.changed().await;
                if matches!(change, Change::Lost(_)) {
                    self.lost();
                }
                return change;
            }
            match self.event().await {
                Event::Turn => {}
                Event::Report => return Change::LookAgain,
                Event::Changed(Change::Granted(grant)) if self.last_answer == AnsweredBy::Store => {
                    self.place.may_hold = true;
                    self.place.leave(Leave::Granted);
                    return Change::Granted(grant);
                }
                // The engine counts the lease from the last answer, and the grant may be older. The store answers another
                // attempt with the same grant and a full lease.
                Event::Changed(Change::Granted(_)) => self.place.begin_attempt(),
                Event::Changed(Change::LookAgain | Change::Lost(_)) => {
                    notifications += 1;
                    if self.place.handoff() == Handoff::Store || notifications > MAX_NOTIFICATIONS {
                        return Change::LookAgain;
                    }
                    self.place.with(Queue::store_notified);
                    continue;
                }
            }
            match self.attempt_now().await {
                Ok(Attempt::Granted(grant)) => return Change::Granted(grant),
                Ok(Attempt::Contended { retry, .. }) if self.can_wait(retry) => {}
                // The engine repeats the attempt and handles its answer.
                Ok(Attempt::Contended { .. } | Attempt::Undecided) | Err(_) => {
                    return Change::LookAgain;
                }
            }
        }
    }

    /// Waits for the turn of this waiter and, if it is active, for a change in the store.
    async fn event(&mut self) -> Event {
        let Self { inner, place, .. } = self;
        let (mut inner, mut changed) = (Some(inner), None::<BoxFuture<'_, Change>>);
        poll_fn(|cx| match place.poll(cx) {
            Turn::Attempt => Poll::Ready(Event::Turn),
            Turn::Report => Poll::Ready(Event::Report),
            Turn::Listen => {
                if let Some(inner) = inner.take() {
                    changed = Some(inner.changed());
                }
                match &mut changed {
                    Some(changed) => changed.as_mut().poll(cx).map(Event::Changed),
                    None => Poll::Pending,
                }
            }
            Turn::Sleep => Poll::Pending,
        })
        .await
    }

    /// Returns whether the wait can continue after this answer. The engine does not get the answer, and attempts again after a
    /// third of the TTL.
    fn can_wait(&self, retry: Retry) -> bool {
        match retry {
            Retry::OnNotify => true,
            Retry::After(pause) => pause >= self.place.spec.ttl / 3,
            Retry::Poll => false,
        }
    }

    /// Records that the hold ended without a release.
    fn lost(&mut self) {
        self.place.may_hold = false;
        self.place.released();
    }

    fn renewed(&mut self, renewal: &Result<Renewal>) {
        match renewal {
            Ok(Renewal::Renewed { .. } | Renewal::Held) => self.place.may_hold = true,
            Ok(Renewal::Lost(_)) => self.lost(),
            Err(_) => {}
        }
    }
}

impl Claim for QueuedClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        self.floor = floor;
        let answer = match self.place.enter() {
            Entry::Attempt => return Box::pin(self.attempt_now()),
            Entry::Wait(retry) => Ok(Attempt::Contended { retry, holder: Holder::Unknown }),
            Entry::Fail(error) => Err(error),
        };
        self.last_answer = AnsweredBy::Queue;
        Box::pin(ready(answer))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(self.wait())
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(async move {
            let renewal = self.inner.renew(ttl).await;
            self.renewed(&renewal);
            renewal
        })
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        Box::pin(async move {
            // Waiting readers may acquire the lock beside this claim.
            let releasing = Releasing { place: &mut self.place, notifies: true };
            let renewal = self.inner.downgrade(ttl).await;
            drop(releasing);
            self.renewed(&renewal);
            if matches!(renewal, Ok(Renewal::Renewed { .. } | Renewal::Held)) {
                self.place.spec.mode = Mode::Shared;
            }
            renewal
        })
    }

    fn set_fence(&mut self, fence: Fence) {
        self.inner.set_fence(fence);
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        if self.place.handoff() == Handoff::Store {
            self.place.leave(Leave::GaveUp);
        }
        Box::pin(async move {
            let may_have_held = self.place.may_hold;
            let mut releasing = Releasing { place: &mut self.place, notifies: true };
            let release = self.inner.release().await;
            // If the hold was lost without a notification, the next waiter still sleeps: wake it.
            releasing.notifies = may_have_held || !matches!(release, Ok(Release::WasNotHeld));
            // Only now: anything that this waiter had in the store may have blocked the next one.
            releasing.place.leave(Leave::GaveUp);
            drop(releasing);
            self.place.may_hold &= release.is_err();
            release
        })
    }
}
