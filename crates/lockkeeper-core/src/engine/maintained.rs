//! What the maintenance task and [`Keeper::close`](crate::Keeper::close) know of a claim.

use std::sync::Arc;
use std::time::Duration;

use crate::owner::Owner;

/// A claim, as its keeper's maintenance sees it.
pub(crate) trait Maintained: Send + Sync {
    /// Gives a new hold its background task, unless it has one or has ended.
    fn run_in_background(self: Arc<Self>);

    /// Reports the hold as lost, or the acquire as failed: no task drives it any more.
    fn runtime_shut_down(&self);

    /// Returns whether the acquire was polled since the last call.
    fn take_poll_activity(&self) -> PollActivity;

    /// How long an acquire may go without being polled.
    fn ttl(&self) -> Duration;

    /// Wakes the acquire's task, even though there may be no outcome yet.
    fn wake_acquirer(&self);

    /// Ends an acquire that was not polled for too long.
    fn give_up(self: Arc<Self>);

    /// Lets an acquire find that its keeper is closed, even if it is not polled, and `close` wait for its cleanup.
    fn keeper_closed(self: Arc<Self>);

    /// The owner, if the acquire is still waiting.
    fn waiting_owner(&self) -> Option<Owner>;
}

/// What an acquire did since it was last looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum PollActivity {
    /// It was not polled.
    None,
    /// It was polled.
    Polled,
    /// It has ended, or was dropped.
    Over,
}
