//! The futures of an acquire and of a release, which drive a claim in the caller's task.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::contract::ClaimSpec;
use crate::engine::claim_driver::{AcquireOptions, ClaimDriver};
use crate::engine::claim_handle::ClaimHandle;
use crate::engine::context::KeeperContext;
use crate::engine::hold::{Hold, ReleaseOutcome};
use crate::engine::maintained::{Maintained as _, PollActivity};
use crate::engine::outcome::{AcquireOutcome, Ending};
use crate::error::Result;
use crate::fence::Fence;

/// A hold with a shorter ttl gets its background task without waiting for the next maintenance round.
const MIN_TTL_FOR_ROUNDS: Duration = Duration::from_millis(100);

/// An acquire: drives in the caller's task until there is an outcome.
///
/// Dropped before that, it leaves the claim to a background task, which releases what the store has granted or is about
/// to grant.
pub(crate) struct Acquire {
    claim: Option<Arc<ClaimHandle>>,
    registered: bool,
}

/// What an acquire ended with, if not with an error.
pub(crate) enum Acquired {
    Held(Arc<ClaimHandle>),
    NotInTime { waited: Duration },
}

impl Acquire {
    /// Prepares a claim, without any I/O. `fence` is that of the ticket, for a hold that is adopted.
    pub(crate) fn new(
        context: &Arc<KeeperContext>,
        spec: ClaimSpec,
        options: AcquireOptions,
        fence: Option<Fence>,
    ) -> Result<Self> {
        let who = (spec.name.clone(), spec.owner, spec.label.clone());
        let (mode, ttl) = (spec.mode, spec.ttl);
        let claim = context.backend.claim(spec)?;
        let hold = Arc::new(Hold::new(context.clone(), who, mode, ttl, fence));
        let claim = ClaimHandle::new(ClaimDriver { claim, hold, options });
        Ok(Self { claim: Some(claim), registered: false })
    }
}

impl Future for Acquire {
    type Output = Result<Acquired>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let claim = self.claim.clone().expect("an acquire is not polled after it was ready");
        claim.record_poll(PollActivity::Polled);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| claim.poll(cx).is_ready())) {
            // A timer panics if its runtime has been shut down. That is an error, and not a panic of the store.
            if claim.hold.context.runtime_is_gone() {
                claim.runtime_shut_down();
                self.claim = None;
                claim.record_poll(PollActivity::Over);
                return Poll::Ready(Err(KeeperContext::runtime_gone()));
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
        claim.record_poll(PollActivity::Over);
        Poll::Ready(match outcome {
            AcquireOutcome::Granted => {
                // A background task that exists already must poll again: the polls here took its wake-ups.
                if claim.hold.ttl() < MIN_TTL_FOR_ROUNDS || claim.hold.is_in_background() {
                    claim.request_repoll();
                }
                if !claim.hold.context.register_hold(claim.clone()) {
                    claim.runtime_shut_down();
                    return Poll::Ready(Err(KeeperContext::runtime_gone()));
                }
                Ok(Acquired::Held(claim))
            }
            AcquireOutcome::NotInTime { waited } => {
                claim.request_repoll();
                Ok(Acquired::NotInTime { waited })
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
            claim.record_poll(PollActivity::Over);
            claim.hold.end(Ending::Drop);
            claim.request_repoll();
        }
    }
}

/// A request of a guard: drives in the caller's task, beside the background task, until it is answered.
pub(crate) struct Requesting<'a>(&'a Arc<ClaimHandle>);

impl<'a> Requesting<'a> {
    pub(crate) fn new(claim: &'a Arc<ClaimHandle>) -> Self {
        Self(claim)
    }

    /// Drives the claim. Does not panic: if the store does, the hold is lost.
    pub(crate) fn drive(&self, cx: &mut Context<'_>) {
        if catch_unwind(AssertUnwindSafe(|| self.0.poll(cx))).is_err() {
            self.0.abandon_after_panic();
        }
    }

    /// To be called after each [`drive`](Self::drive) that brought no answer. The background task polls next and has the
    /// wake-ups again: a caller may keep its future without polling it, and renewals and the deadline do not wait for
    /// that. If the background task gets no thread, the caller is still woken.
    pub(crate) fn share(&self) {
        self.0.request_repoll();
    }
}

impl Drop for Requesting<'_> {
    fn drop(&mut self) {
        self.0.request_repoll();
    }
}

/// A release: drives in the caller's task until the store has answered once.
///
/// If it is dropped before that, or the store failed, the background task goes on.
pub(crate) struct Releasing {
    claim: Arc<ClaimHandle>,
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
