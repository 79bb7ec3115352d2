//! A queue within the process, in front of a store.

mod inspect;
mod place;
mod queue;

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use self::place::{Hold, Place, Queues};
use self::queue::{Active, Entry, Handoff, Turn};
use crate::contract::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Holder, Inspector, Mode,
    Release, Renewal, Retry,
};
use crate::error::Result;
use crate::fence::Fence;

/// How many notices of the store a waiter follows up by itself before it leaves the next one to the engine, which
/// limits the rate. A store whose `changed` is always ready would else keep the thread.
const MAX_NOTICES: u32 = 16;

/// A store in which the waiters of one process queue locally, so that only the first of them talk to the inner store.
///
/// For stores whose waiters each need a connection or an open file. There is one queue for each name and kind, first
/// come, first served:
///
/// - The *front* talks to the inner store: the first waiter or, if that is a reader, all readers before the
///   first writer.
/// - The *look-ahead*, the waiter behind the front, is prepared for its turn, so that a hand-off does not wait for its
///   task to be scheduled and for a round trip.
/// - All others answer [`Contended`](Attempt::Contended) without I/O, and are woken when they move up. If the store has
///   failed the front, those that refresh their place get the same error.
///
/// A claim that is granted leaves the queue. A claim that asks after a release is a new one, and goes to the back. If
/// no other claim waits, a claim goes straight to the inner store. No task is spawned and no timer is set.
///
/// # Stores with and without an order of their own
///
/// - If the inner store is [`fair`](Capabilities::fair), front and look-ahead both wait in its queue, and the store
///   hands over. Tries are refused while claims of this process wait. Waiters ask the store in
///   the order of the local queue.
///   This presumes that a contended answer means a place in the store's queue; if not, use [`one_by_one`](Self::one_by_one).
/// - If it is not, a release wakes the front of this process directly, and new claims queue behind it, so a task that
///   releases and asks again does not overtake. The look-ahead only listens. It asks the store if the lock may be free
///   and the front has not asked. Tries go to the store. The order holds within the process; other processes compete.
///
/// # Waiters that are not polled
///
/// A waiter whose future lives and is not polled keeps its place, and does not keep the lock from others: the look-ahead
/// passes it over after a turn of a millisecond, and a waiter further behind when it refreshes its place,
/// every third of its TTL. So the order is that of the waiters that are polled when their turn comes. What the inner store itself has granted
/// or promised to a waiter cannot be passed over.
///
/// # For authors of stores
///
/// Wrap the raw store: `Slots::new(Arc::new(LocalQueue::new(Arc::new(raw))))`. The raw store needs no queue of its
/// own. It keeps to the [contract](Claim), and:
///
/// - [`Claim::changed`] of a queued claim may be called before its first `attempt`. A store that is not fair and declares
///   [`push`](Capabilities::push) should listen then, too: the look-ahead depends on it.
/// - `changed` may wait for a grant or a notice, and need not repeat the attempt: the combinator does, and reports
///   [`Change::Granted`] if that succeeds.
/// - [`Inspector`] may leave out waiters. Those it shows should have their owner, so that they are not listed twice.
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
    /// Puts local queues in front of a store.
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self::with_active(inner, Active::FrontAndNext)
    }

    /// Puts local queues in front of a store, of which only the first waiter talks to the store: there is no look-ahead,
    /// and readers ask one after the other.
    ///
    /// For a store that answers [`Contended`](Attempt::Contended) when it has sent a wait over a connection of its own.
    /// The waits of two claims may overtake each other on their way to the server, and would not keep the order.
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
        let inner = self.inner.claim(spec.clone())?;
        let place = Place::new(self.queues.clone(), &spec);
        Ok(Box::new(QueuedClaim { inner, place, spec, floor: None, last_answer: Answer::Store }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.inner.inspector().map(|_| self as _)
    }
}

/// Where the last answer to an attempt came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Store,
    /// Without I/O, after the last answer of the store.
    Local,
}

/// What a waiter waits for.
enum Event {
    /// It is to ask the store.
    Turn,
    /// The engine is to ask again.
    Report,
    /// The inner claim says so.
    Changed(Change),
}

struct QueuedClaim {
    /// Dropped before the place: only then is the lock free, if it was held.
    inner: Box<dyn Claim>,
    place: Place,
    spec: ClaimSpec,
    /// That of the last attempt, for those that follow a notice.
    floor: Option<Fence>,
    last_answer: Answer,
}

/// Ends an attempt, also if its future is dropped.
struct Asking<'a>(&'a Place);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.answered();
    }
}

/// Tells the next waiter of a release, also if its future is dropped: the store may have obeyed.
struct Releasing<'a> {
    place: &'a mut Place,
    is_held: bool,
}

impl Drop for Releasing<'_> {
    fn drop(&mut self) {
        if self.is_held {
            self.place.released();
        }
    }
}

impl QueuedClaim {
    async fn try_or_queue(&mut self) -> Result<Attempt> {
        if self.place.hold == Hold::None {
            let entry = if self.spec.queue {
                self.place.enter(&self.spec)
            } else if self.place.handoff() == Handoff::Store && self.place.others_wait() {
                Entry::Wait(Retry::OnNotify)
            } else {
                Entry::Ask
            };
            match entry {
                Entry::Ask => {}
                Entry::Wait(retry) => {
                    self.last_answer = Answer::Local;
                    return Ok(Attempt::Contended { retry, holder: Holder::Unknown });
                }
                Entry::Fail(error) => return Err(error),
            }
        } else {
            self.place.asks();
        }
        self.ask().await
    }

    /// Asks the inner store. The place is asking already.
    async fn ask(&mut self) -> Result<Attempt> {
        let Self { inner, place, last_answer, floor, .. } = self;
        let before = std::mem::replace(&mut place.hold, Hold::Unknown);
        *last_answer = Answer::Store;
        let asking = Asking(place);
        let answer = inner.attempt(*floor).await;
        drop(asking);
        let is_refused = matches!(answer, Ok(Attempt::Contended { .. } | Attempt::Undecided));
        if is_refused && before != Hold::None {
            self.lost();
        }
        match &answer {
            Ok(Attempt::Granted(_)) => self.granted(),
            Ok(Attempt::Contended { .. }) => {
                self.place.hold = Hold::None;
                if self.spec.queue {
                    self.place.refused(&self.spec);
                }
            }
            Ok(Attempt::Undecided) => self.place.hold = Hold::None,
            Err(error) => {
                self.place.hold = if before == Hold::Held { before } else { Hold::Unknown };
                // The first answer of a store that is down is for the caller. Claims behind this one are to get it, too.
                self.place.failed(error);
            }
        }
        answer
    }

    fn granted(&mut self) {
        self.place.hold = Hold::Held;
        self.place.granted(self.spec.mode);
    }

    async fn wait(&mut self) -> Change {
        let mut notices = 0;
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
                Event::Changed(Change::Granted(grant)) if self.last_answer == Answer::Store => {
                    self.granted();
                    return Change::Granted(grant);
                }
                // Made before the last answer, perhaps. Asked again, the store gives the same grant with a full lease.
                Event::Changed(Change::Granted(_)) => self.place.asks(),
                Event::Changed(Change::LookAgain | Change::Lost(_)) => {
                    notices += 1;
                    if self.place.handoff() == Handoff::Store || notices > MAX_NOTICES {
                        return Change::LookAgain;
                    }
                    self.place.noticed();
                    continue;
                }
            }
            match self.ask().await {
                Ok(Attempt::Granted(grant)) => return Change::Granted(grant),
                Ok(Attempt::Contended { retry, .. }) if self.can_wait(retry) => {}
                // The engine asks again and sees to the rest.
                Ok(Attempt::Contended { .. } | Attempt::Undecided) | Err(_) => {
                    return Change::LookAgain;
                }
            }
        }
    }

    /// Waits for its turn or, if it may talk to the store, for a change there.
    async fn event(&mut self) -> Event {
        let Self { inner, place, .. } = self;
        let (mut inner, mut changed) = (Some(inner), None::<BoxFuture<'_, Change>>);
        poll_fn(|cx| match place.poll(cx) {
            Turn::Ask => Poll::Ready(Event::Turn),
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
            Turn::Rest => Poll::Pending,
        })
        .await
    }

    /// Whether the engine, which was told to wait for a notice, asks again in time by itself.
    fn can_wait(&self, retry: Retry) -> bool {
        match retry {
            Retry::OnNotify => true,
            Retry::After(pause) => pause >= self.spec.ttl / 3,
            Retry::Poll => false,
        }
    }

    /// The hold ended without a release.
    fn lost(&mut self) {
        self.place.hold = Hold::None;
        self.place.released();
    }

    fn renewed(&mut self, renewal: &Result<Renewal>) {
        match renewal {
            Ok(Renewal::Renewed { .. } | Renewal::Held) => self.place.hold = Hold::Held,
            Ok(Renewal::Lost(_)) => self.lost(),
            Err(_) => {}
        }
    }
}

impl Claim for QueuedClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        self.floor = floor;
        Box::pin(self.try_or_queue())
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
            // Readers may enter beside it.
            let releasing = Releasing { place: &mut self.place, is_held: true };
            let renewal = self.inner.downgrade(ttl).await;
            drop(releasing);
            self.renewed(&renewal);
            if matches!(renewal, Ok(Renewal::Renewed { .. } | Renewal::Held)) {
                self.spec.mode = Mode::Shared;
            }
            renewal
        })
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        if self.place.handoff() == Handoff::Store {
            self.place.give_up();
        }
        Box::pin(async move {
            let was_held = self.place.hold != Hold::None;
            let mut releasing = Releasing { place: &mut self.place, is_held: true };
            let release = self.inner.release().await;
            // A hold may have been lost without notice: the next waiter rests until it is told of its end.
            releasing.is_held = was_held || !matches!(release, Ok(Release::WasNotHeld));
            // Only now: what this claim had in the store while it waited may keep the next one out.
            releasing.place.give_up();
            drop(releasing);
            if release.is_ok() {
                self.place.hold = Hold::None;
            }
            release
        })
    }
}
