//! Small helpers for futures.

use std::task::Poll;

use crate::clock::{Moment, sleep_until};
use crate::contract::BoxFuture;

/// Returns all outputs, in the order of the futures.
pub(crate) async fn join_all<T>(mut futures: Vec<BoxFuture<'_, T>>) -> Vec<T> {
    let mut outputs: Vec<Option<T>> = futures.iter().map(|_| None).collect();
    std::future::poll_fn(|cx| {
        for (future, output) in futures.iter_mut().zip(&mut outputs) {
            if output.is_none()
                && let Poll::Ready(ready) = future.as_mut().poll(cx)
            {
                *output = Some(ready);
            }
        }
        if outputs.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs.into_iter().flatten().collect()
}

/// Returns the first output. Never ready if there is no future.
pub(crate) async fn first<T>(mut futures: Vec<BoxFuture<'_, T>>) -> T {
    std::future::poll_fn(|cx| {
        for future in &mut futures {
            if let Poll::Ready(output) = future.as_mut().poll(cx) {
                return Poll::Ready(output);
            }
        }
        Poll::Pending
    })
    .await
}

/// Boxes a future that is rarely needed, so that the future of each claim does not reserve memory for it.
pub(crate) fn boxed<'a, T>(step: impl Future<Output = T> + Send + 'a) -> BoxFuture<'a, T> {
    Box::pin(step)
}

/// Polls a future once, and returns its output if it is ready. A caller that gets the output needs no timer.
pub(crate) async fn at_once<T>(future: &mut BoxFuture<'_, T>) -> Option<T> {
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// Returns the output of a future that is ready before `end`.
pub(crate) async fn within<T>(future: &mut BoxFuture<'_, T>, end: Moment) -> Option<T> {
    // `select!` creates the sleep only after the future was polled once.
    tokio::select! {
        biased;
        output = future => Some(output),
        () = sleep_until(Some(end)) => None,
    }
}
