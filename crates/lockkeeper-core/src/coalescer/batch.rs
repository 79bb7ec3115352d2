//! The requests that share a call.

use std::fmt;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::{BatchSender, Shared, Waiting, miscounted};
use crate::error::Result;

/// The requests that share a call.
///
/// The batch of a shared call is open at first: requests may join and leave it until the sender [closes](Self::close) it.
/// The batch of a direct request is closed from the start.
pub struct Batch<S: BatchSender> {
    pub(super) items: Vec<S::Item>,
    /// Empty for a direct request: its caller gets the answer from the call.
    pub(super) answers: Vec<oneshot::Sender<Result<S::Answer>>>,
    /// The coalescer whose queue the requests come from, until the batch is closed.
    pub(super) open: Option<Arc<Shared<S>>>,
}

impl<S: BatchSender> Batch<S> {
    /// Closes the batch and returns its requests. From now on, they count as sent. Returns `None` if all of them were
    /// dropped.
    pub fn close(&mut self) -> Option<&[S::Item]> {
        let max = self.open.as_ref().map_or(0, |shared| shared.limits.max_batch);
        self.close_with(max);
        self.items()
    }

    pub(super) fn close_with(&mut self, max: usize) {
        let Some(shared) = self.open.take() else { return };
        let mut state = shared.state();
        state.is_open = false;
        let count = state.queue.len().min(max);
        self.items.reserve_exact(count);
        self.answers.reserve_exact(count);
        for _ in 0..count {
            let Some(Waiting { item, answer }) = state.queue.pop() else { break };
            self.items.push(item);
            self.answers.push(answer);
        }
    }

    /// Returns the requests of a closed batch, or `None` if there are none.
    pub fn items(&self) -> Option<&[S::Item]> {
        Some(self.items.as_slice()).filter(|items| !items.is_empty())
    }

    /// Removes requests whose callers no longer wait for an answer, and returns the others. Returns `None` if there are
    /// none.
    pub fn retain_awaited(&mut self) -> Option<&[S::Item]> {
        let dropped: Vec<bool> = self.answers.iter().map(oneshot::Sender::is_closed).collect();
        let mut is_dropped = dropped.iter();
        self.items.retain(|_| is_dropped.next() != Some(&true));
        let mut is_dropped = dropped.iter();
        self.answers.retain(|_| is_dropped.next() != Some(&true));
        self.items()
    }

    /// Returns whether the caller of a request still waits for its answer.
    pub fn is_awaited(&self, index: usize) -> bool {
        // A direct request has no entry in `answers`. Its caller waits for as long as the call exists.
        self.answers.get(index).is_none_or(|answer| !answer.is_closed())
    }

    pub(super) fn answer(self, answers: Result<Vec<Result<S::Answer>>>) {
        let error = match answers {
            Ok(answers) if answers.len() == self.answers.len() => {
                for (waiting, answer) in self.answers.into_iter().zip(answers) {
                    let _ = waiting.send(answer);
                }
                return;
            }
            Ok(answers) => miscounted(answers.len(), self.answers.len()),
            Err(error) => error,
        };
        for waiting in self.answers {
            let _ = waiting.send(Err(error.clone()));
        }
    }
}

impl<S: BatchSender> fmt::Debug for Batch<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("items", &self.items.len())
            .field("is_open", &self.open.is_some())
            .finish_non_exhaustive()
    }
}
