//! A claim that can be polled: its hold, and the future that drives it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::EnterGuard;

use crate::engine::claim_driver::ClaimDriver;
use crate::engine::hold::Hold;
use crate::engine::maintained::{Maintained, PollActivity};
use crate::engine::observe;
use crate::engine::shared_future::{Abandoned, BackgroundTask, SharedFuture, SharedFutureOwner};
use crate::error::{Error, ErrorKind};
use crate::loss::LossReason;
use crate::owner::Owner;

/// A claim's state, and the future that drives it, which its acquire, its guard and a background task poll.
pub(crate) struct ClaimHandle {
    pub(crate) hold: Arc<Hold>,
    future: SharedFuture,
    /// What the acquire did since the maintenance task last looked: a [`PollActivity`].
    poll_activity: AtomicU8,
}

impl ClaimHandle {
    pub(crate) fn new(driver: ClaimDriver) -> Arc<Self> {
        let hold = driver.hold.clone();
        let future = SharedFuture::new(Box::pin(driver.drive()));
        let poll_activity = AtomicU8::new(PollActivity::Polled as u8);
        Arc::new(Self { hold, future, poll_activity })
    }

    /// Drives the claim, in the caller's task.
    pub(crate) fn poll(self: &Arc<Self>, cx: &mut Context<'_>) -> Poll<()> {
        SharedFuture::poll(self, cx)
    }

    /// Drives the claim as far as possible without waiting, and leaves the rest to the background task. Neither blocks
    /// nor panics.
    pub(crate) fn poll_once(self: &Arc<Self>) {
        SharedFuture::poll_once(self);
    }

    /// Has the background task drive the claim, because something was requested or another poller has left. Never
    /// blocks.
    pub(crate) fn request_repoll(self: &Arc<Self>) {
        SharedFuture::request_repoll(self);
    }

    /// Ends the claim after a poll of it panicked. A timer panics if its runtime has been shut down; any other panic is
    /// the store's.
    pub(crate) fn abandon_after_panic(&self) {
        let gone = self.hold.context.runtime_is_gone();
        let cause = if gone { Abandoned::RuntimeShutdown } else { Abandoned::Panicked };
        SharedFuture::abandon(self, cause);
    }

    /// Records what the acquire does, for the maintenance task.
    pub(crate) fn record_poll(&self, activity: PollActivity) {
        self.poll_activity.store(activity as u8, Ordering::Relaxed);
    }
}

impl SharedFutureOwner for ClaimHandle {
    /// Timers must belong to the keeper's runtime: the task that polls later may outlive the runtime that polls now.
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
        self.hold.context.forget_hold(self);
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
        let (polled, none) = (PollActivity::Polled as u8, PollActivity::None as u8);
        let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
        match self.poll_activity.compare_exchange(polled, none, success, failure) {
            Ok(_) => PollActivity::Polled,
            Err(now) if now == none => PollActivity::None,
            Err(_) => PollActivity::Over,
        }
    }

    fn ttl(&self) -> Duration {
        self.hold.ttl()
    }

    fn wake_acquirer(&self) {
        self.hold.wake_acquirer();
    }

    fn give_up(self: Arc<Self>) {
        let ttl = self.hold.ttl();
        let message = format!("abandoned: its future was not polled for {ttl:.1?}");
        let error = self.hold.error("lock", Error::new(ErrorKind::Unavailable, message));
        if self.hold.fail_from_outside(error) {
            self.request_repoll();
            observe::given_up(self.hold.subject(), ttl);
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
