//! Several futures at once, without a task for each.

use std::task::Poll;

use crate::backend::BoxFuture;

/// All outputs, in the order of the futures.
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

/// The first output; for ever pending if there is no future.
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
