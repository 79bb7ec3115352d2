//! Runs work while its locks are held.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

/// Polls `work` until it completes. Drops it and returns `None` when its locks are lost.
///
/// `lost` completes when a loss is reported, and wakes the task. `is_lost` compares the deadline with the clock. It is
/// called before every poll of the work, because a process that was stopped may poll the work before the task that
/// reports the loss. It is also called after the last poll, because output that was produced after a loss does not count.
pub(crate) async fn run_while_held<F: Future>(
    is_lost: impl Fn() -> bool,
    lost: impl Future<Output = ()>,
    work: F,
) -> Option<F::Output> {
    let (mut lost, mut work) = (pin!(lost), pin!(work));
    let output = poll_fn(|cx| {
        if lost.as_mut().poll(cx).is_ready() || is_lost() {
            return Poll::Ready(None);
        }
        work.as_mut().poll(cx).map(Some)
    });
    output.await.filter(|_| !is_lost())
}
