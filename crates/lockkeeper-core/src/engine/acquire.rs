//! A claim that several tasks can poll, and the futures that poll it in the caller's task: acquire, request, release.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::EnterGuard;

use crate::contract::ClaimSpec;
use crate::engine::claim_driver::{AcquireOptions, ClaimDriver};
use crate::engine::context::KeeperContext;
use crate::engine::hold::{Hold, ReleaseOutcome};
use crate::engine::maintenance::{Maintained, PollActivity};
use crate::engine::observe;
use crate::engine::outcome::{AcquireOutcome, Ending};
use crate::engine::shared_future::{Abandoned, BackgroundTask, SharedFuture, SharedFutureOwner};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Fence;
use crate::loss::LossReason;
use crate::owner::Owner;

/// Holds with a shorter TTL get their background task at once, instead of in the next maintenance round.
const MIN_TTL_FOR_ROUNDS: Duration = Duration::from_millis(100);

/// A claim: its state, and the future that drives it. The acquire, the guard and a background task poll that future.
pub(crate) struct ClaimHandle {
    pub(crate) hold: Arc<Hold>,
    future: SharedFuture,
    /// Whether the acquire has been polled since the maintenance task last checked.
    polled: AtomicBool,
    /// Whether the acquire has ended or was dropped.
    acquire_ended: AtomicBool,
}

impl ClaimHandle {
    fn new(driver: ClaimDriver) -> Arc<Self> {
        let hold = driver.hold.clone();
        let future = SharedFuture::new(Box::pin(driver.drive()));
        let (polled, acquire_ended) = (AtomicBool::new(true), AtomicBool::new(false));
        Arc::new(Self { hold, future, polled, acquire_ended })
    }

    /// Drives the claim in the caller's task.
    fn poll(self: &Arc<Self>, cx: &mut Context<'_>) -> Poll<()> {
        SharedFuture::poll(self, cx)
    }

    /// Polls the driver once, and leaves the rest to the background task. Neither blocks nor panics.
    pub(crate) fn poll_once(self: &Arc<Self>) {
        SharedFuture::poll_once(self);
    }

    /// Makes the background task poll the driver, and spawns it if there is none. Never blocks. Must be called after each
    /// request that is not followed by a poll.
    pub(crate) fn request_repoll(self: &Arc<Self>) {
        SharedFuture::request_repoll(self);
    }
}

impl SharedFutureOwner for ClaimHandle {
    /// Enters the keeper's runtime, so that the driver's timers belong to it. The runtime of the current caller may be shut
    /// down while the driver continues in the background.
    type Scope<'a> = Option<EnterGuard<'a>>;

    fn shared_future(&self) -> &SharedFuture {
        &self.future
    }

    fn enter(&self) -> Option<EnterGuard<'_>> {
        self.hold.context.enter()
    }

    fn spawn(&self, task: BackgroundTask<Self>) {
        self.hold.set_in_background();
        self.hold.context.spawn(task);
    }

    fn completed_in_foreground(&self) {
        self.hold.context.maintenance.forget_hold(self);
    }

    fn abandoned(&self, cause: Abandoned) {
        self.hold.abandoned(match cause {
            Abandoned::Panicked => LossReason::StoreFailed,
            Abandoned::RuntimeShutdown => LossReason::RuntimeShutdown,
        });
    }
}

impl Maintained for ClaimHandle {
    fn run_in_background(self: Arc<Self>) {
        SharedFuture::run_in_background(&self);
    }

    fn runtime_shut_down(&self) {
        SharedFuture::abandon(self, Abandoned::RuntimeShutdown);
    }

    fn take_poll_activity(&self) -> PollActivity {
        if self.acquire_ended.load(Ordering::Relaxed) {
            return PollActivity::Ended;
        }
        let polled = self.polled.swap(false, Ordering::Relaxed);
        if polled { PollActivity::Polled } else { PollActivity::None }
    }

    fn ttl(&self) -> Duration {
        self.hold.ttl()
    }

    fn wake_acquirer(&self) {
        self.hold.wake_acquirer();
    }

    fn abandon_unpolled(self: Arc<Self>) {
        let ttl = self.hold.ttl();
        let message = format!("abandoned: its future was not polled for {ttl:.1?}");
        let error = self.hold.error("lock", Error::new(ErrorKind::Unavailable, message));
        if self.hold.fail_from_other_task(error) {
            self.request_repoll();
            observe::abandoned_unpolled(self.hold.subject(), ttl);
        }
    }

    fn keeper_closed(self: Arc<Self>) {
        if self.hold.keeper_closed() {
            self.request_repoll();
        }
    }

    fn waiting_owner(&self) -> Option<Owner> {
        self.hold.is_waiting().then_some(self.hold.owner)
    }
}

/// An acquire: drives the claim in the caller's task until it has an outcome.
///
/// If it is dropped earlier, a background task continues to drive the claim, and releases the lock if the store has granted
/// it or still grants it.
pub(crate) struct Acquire {
    /// `None` after the outcome was returned.
    claim: Option<Arc<ClaimHandle>>,
    /// Whether the acquire is registered with the maintenance task as waiting.
    registered: bool,
}

/// The outcome of an acquire that did not fail.
pub(crate) enum Acquired {
    Held(Arc<ClaimHandle>),
    NotAcquired { waited: Duration },
}

impl Acquire {
    /// Creates a claim, without I/O. `fence` is the fence of the ticket if a hold is adopted.
    pub(crate) fn new(
        context: &Arc<KeeperContext>,
        spec: ClaimSpec,
        options: AcquireOptions,
        fence: Option<Fence>,
    ) -> Result<Self> {
        let hold = Arc::new(Hold::new(context.clone(), &spec, fence));
        let claim = context.backend.claim(spec)?;
        let claim = ClaimHandle::new(ClaimDriver { claim, hold, options });
        Ok(Self { claim: Some(claim), registered: false })
    }
}

impl Future for Acquire {
    type Output = Result<Acquired>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let claim = self.claim.clone().expect("an acquire is not polled after it was ready");
        claim.polled.store(true, Ordering::Relaxed);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| claim.poll(cx).is_ready())) {
            // A timer panics if its runtime has been shut down. The caller gets an error instead of that panic.
            if claim.hold.context.runtime_is_gone() {
                claim.runtime_shut_down();
                self.claim = None;
                claim.acquire_ended.store(true, Ordering::Relaxed);
                return Poll::Ready(Err(KeeperContext::runtime_gone_error()));
            }
            resume_unwind(panic);
        }
        let Some(outcome) = claim.hold.take_acquire_outcome(cx.waker()) else {
            if !self.registered {
                self.registered = true;
                claim.hold.context.register_pending(&claim);
            }
            return Poll::Pending;
        };
        self.claim = None;
        claim.acquire_ended.store(true, Ordering::Relaxed);
        Poll::Ready(match outcome {
            AcquireOutcome::Granted => {
                // The polls of this task replaced the waker of an existing background task, so it must poll again.
                if claim.hold.ttl() < MIN_TTL_FOR_ROUNDS || claim.hold.is_in_background() {
                    claim.request_repoll();
                }
                if !claim.hold.context.register_hold(claim.clone()) {
                    claim.runtime_shut_down();
                    return Poll::Ready(Err(KeeperContext::runtime_gone_error()));
                }
                Ok(Acquired::Held(claim))
            }
            AcquireOutcome::NotAcquired { waited } => {
                claim.request_repoll();
                Ok(Acquired::NotAcquired { waited })
            }
            AcquireOutcome::Failed(error) => {
                claim.request_repoll();
                Err(error)
            }
        })
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        if let Some(claim) = self.claim.take() {
            claim.acquire_ended.store(true, Ordering::Relaxed);
            claim.hold.end(Ending::Drop);
            claim.request_repoll();
        }
    }
}

/// A request of a guard. The caller's task drives the claim until the request is answered; the background task continues
/// to poll, too.
pub(crate) struct Requesting<'a>(&'a Arc<ClaimHandle>);

impl<'a> Requesting<'a> {
    pub(crate) fn new(claim: &'a Arc<ClaimHandle>) -> Self {
        Self(claim)
    }

    /// Drives the claim. Does not panic: if the store panics, or a timer does because its runtime has been shut down, the
    /// hold is lost.
    pub(crate) fn drive(&self, cx: &mut Context<'_>) {
        if catch_unwind(AssertUnwindSafe(|| self.0.poll(cx))).is_err() {
            let gone = self.0.hold.context.runtime_is_gone();
            let cause = if gone { Abandoned::RuntimeShutdown } else { Abandoned::Panicked };
            SharedFuture::abandon(&**self.0, cause);
        }
    }

    /// Makes the background task poll next, with its own waker. Must be called after each [`drive`](Self::drive) without
    /// an answer: the caller may stop polling its future without dropping it, and renewals and the deadline must not depend
    /// on that.
    pub(crate) fn repoll_in_background(&self) {
        self.0.request_repoll();
    }
}

impl Drop for Requesting<'_> {
    fn drop(&mut self) {
        self.0.request_repoll();
    }
}

/// A release: drives the claim in the caller's task until the store has answered once.
///
/// If it is dropped earlier, or if the store fails, the background task continues.
pub(crate) struct Releasing {
    claim: Arc<ClaimHandle>,
    /// Whether the driver has completed.
    done: bool,
}

impl Releasing {
    pub(crate) fn new(claim: Arc<ClaimHandle>) -> Self {
        Self { claim, done: false }
    }
}

impl Future for Releasing {
    type Output = Result<ReleaseOutcome>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.done = self.claim.poll(cx).is_ready();
        match self.claim.hold.take_release_outcome(cx.waker()) {
            Some(outcome) => Poll::Ready(outcome),
            None => Poll::Pending,
        }
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        if !self.done {
            self.claim.request_repoll();
        }
    }
}
