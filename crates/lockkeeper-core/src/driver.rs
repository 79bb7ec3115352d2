//! The engine: ask, wait, hold, renew, release or lose. Written once, for every store.
//!
//! The whole life of a claim is one future, [`drive`]. It does not care who polls it:
//!
//! - until there is a guard, the caller's own task does, so an uncontended lock costs one answer of
//!   the store and no hop to another task;
//! - while the guard lives, a task of the keeper's runtime does (the [`Tender`](crate::polling));
//! - `release().await` polls it right in the releasing task, again without a hop;
//! - if an acquire or a release is dropped half way, the tender takes it from there, in whatever state
//!   it is: an attempt in flight is awaited and what it was granted is released.
//!
//! So cancellation is not a case of its own in the code below: it is an [`Ending`](crate::hold::Ending) that the driver
//! finds at the next step.

mod acquire;
mod keep;

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use self::keep::Pulse;
use crate::backend::{BoxFuture, Capabilities, Claim, Grant, Release};
use crate::backoff::Backoff;
use crate::clock::{Moment, sleep_until};
use crate::error::Error;
use crate::hold::{Hold, ReleaseOutcome, Verdict};
use crate::observe;

/// How an acquire goes about it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// How long to wait for other holders: `None` is for ever, zero is one attempt.
    pub(crate) wait: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    /// The owner holds already: renew instead of asking.
    pub(crate) adopt: bool,
}

/// The shortest pause between two questions of the same kind.
const LEAST_PAUSE: Duration = Duration::from_millis(1);

/// How long "not acquired" may be held up until the store has confirmed that nothing of the attempt is left.
/// Longer than a round trip to another continent, and short beside any wait that is worth a queue.
pub(crate) const LEAVE_WITHIN: Duration = Duration::from_millis(100);

/// A claim on its way.
pub(crate) struct Job {
    pub(crate) claim: Box<dyn Claim>,
    pub(crate) hold: Arc<Hold>,
    pub(crate) plan: Plan,
}

/// What the store may have of this claim when the driver is through with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// Something that is to be released.
    Something,
    /// Nothing, or something that is to stay.
    Nothing,
    /// A place in the queue of a caller whose time is up: it is left before the caller is told.
    Place {
        /// How long the caller has waited.
        waited: Duration,
    },
}

/// A grant, and from when it counts.
struct Granted {
    sent: Moment,
    grant: Grant,
}

/// Drives a claim through its whole life.
pub(crate) async fn drive(mut job: Job) {
    let acquired = if job.plan.adopt { boxed(job.adopt()).await } else { job.acquire().await };
    let left = match acquired {
        Ok(granted) => {
            job.hold.succeed();
            let lease = granted.grant.valid_for.unwrap_or(Duration::MAX).min(job.hold.ttl());
            let pulse = Pulse::new(granted.sent, lease);
            leave_to_the_next_poll(&job.hold).await;
            job.keep(pulse).await
        }
        Err(left) => left,
    };
    match left {
        Left::Something => {
            leave_to_the_next_poll(&job.hold).await;
            job.settle().await;
        }
        Left::Place { waited } => boxed(job.leave(waited)).await,
        Left::Nothing => {}
    }
    let Job { claim, hold, .. } = job;
    drop(claim);
    hold.finished();
}

impl Job {
    fn capabilities(&self) -> Capabilities {
        self.hold.shared.capabilities
    }

    /// Leaves the queue, then tells the caller that its time is up.
    ///
    /// In this order, since a place in the queue can be handed the lock, and can make the tries of others fail. A lock
    /// that is handed over in the meantime is released with it. If the store does not confirm in time, the
    /// caller is told first, and the release goes on in the background.
    async fn leave(&mut self, waited: Duration) {
        let hold = self.hold.clone();
        let end = Moment::now().add(LEAVE_WITHIN);
        let mut leaving = boxed(self.settle());
        let left = within(&mut leaving, end).await.is_some();
        hold.fail(Verdict::NotInTime { waited });
        if !left {
            leave_to_the_next_poll(&hold).await;
            leaving.await;
        }
    }

    /// Releases until the store confirms it, or until any lease has run out by itself.
    async fn settle(&mut self) {
        self.hold.settling();
        let release = settle(&mut *self.claim, self.hold.ttl(), |error| {
            let error = self.hold.error("release", error.clone());
            self.hold.released(Err(error));
        });
        let outcome = match release.await {
            Some(Release::Released) => ReleaseOutcome::Released,
            Some(Release::WasNotHeld) => ReleaseOutcome::AlreadyLost,
            None => {
                observe::release_unconfirmed(&self.hold);
                return;
            }
        };
        self.hold.released(Ok(outcome));
    }
}

/// Releases a claim until the store confirms it or any lease must have run out, and tells of each
/// failure.
///
/// A release that gets no answer is sent again: it is idempotent, and the store may be back.
pub(crate) async fn settle(
    claim: &mut dyn Claim,
    ttl: Duration,
    failed: impl Fn(&Error),
) -> Option<Release> {
    let patience = ttl.clamp(Duration::from_secs(1), Duration::from_secs(10));
    let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_secs(10).min(ttl));
    let mut end = None;
    loop {
        let mut release = claim.release();
        let answer = match at_once(&mut release).await {
            Some(answer) => Some(answer),
            None => boxed(within(&mut release, Moment::now().add(patience))).await,
        };
        let error = match answer {
            Some(Ok(release)) => return Some(release),
            Some(Err(error)) => error,
            None => Error::no_answer(patience),
        };
        drop(release);
        failed(&error);
        let now = Moment::now();
        let end = *end.get_or_insert(now.add(ttl));
        let again = now.add(pauses.next());
        if again >= end || !error.is_retryable() {
            return None;
        }
        boxed(sleep_until(Some(again))).await;
    }
}

/// Puts a step that is taken now and then into memory of its own, so that a hold does not keep room for
/// it all the while: ten thousand holds are ten thousand drivers.
fn boxed<'a, T>(step: impl Future<Output = T> + Send + 'a) -> BoxFuture<'a, T> {
    Box::pin(step)
}

/// A future's output, if it is there already: then no timer need be made.
async fn at_once<T>(future: &mut BoxFuture<'_, T>) -> Option<T> {
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// A future's output, if it comes before the moment.
async fn within<T>(future: &mut BoxFuture<'_, T>, end: Moment) -> Option<T> {
    // The sleep is not even made before the future has been polled once.
    tokio::select! {
        biased;
        output = future => Some(output),
        () = sleep_until(Some(end)) => None,
    }
}

/// Ready when the guard has asked for something. Registers no waker: whoever asks also polls the
/// driver, or nudges the tender.
async fn asked(hold: &Hold) {
    std::future::poll_fn(|_| if hold.is_asked() { Poll::Ready(()) } else { Poll::Pending }).await;
}

/// Ready when the hold is to end; like [`asked`].
async fn ended(hold: &Hold) {
    std::future::poll_fn(|_| match hold.ending() {
        Some(_) => Poll::Ready(()),
        None => Poll::Pending,
    })
    .await;
}

/// Stops this poll, so that whoever polls can take the verdict, and lets the next poll go on.
///
/// Without this the first poll would already set up timers that a short hold never needs. Registers
/// no waker: an acquire that finds a verdict hands the driver to a tender. If nobody
/// waits for a verdict any more, or the tender drives, this does nothing.
async fn leave_to_the_next_poll(hold: &Hold) {
    let mut left = false;
    std::future::poll_fn(|_| {
        if left || !hold.has_verdict() || hold.is_tended() {
            return Poll::Ready(());
        }
        left = true;
        Poll::Pending
    })
    .await;
}
