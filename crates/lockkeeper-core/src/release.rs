//! Releases that are retried until the store confirms them, and their timeouts.

use std::time::Duration;

use crate::backoff::Backoff;
use crate::clock::{Moment, sleep_until};
use crate::contract::{Claim, Release};
use crate::error::Error;
use crate::futures::{at_once, boxed, within};

/// How long an acquire that timed out waits for the store to confirm that it has left the queue. Longer than a round trip
/// to another continent, and short compared to a wait in a queue.
pub(crate) const LEAVE_WITHIN: Duration = Duration::from_millis(100);

/// Returns the timeout of one release.
pub(crate) fn release_timeout(ttl: Duration) -> Duration {
    ttl.clamp(Duration::from_secs(1), Duration::from_secs(10))
}

/// Sends releases until the store confirms one, or until any lease must have expired. Calls `failed` with each failure.
///
/// Releases are idempotent, so one without an answer is sent again.
pub(crate) async fn release_until_confirmed(
    claim: &mut dyn Claim,
    ttl: Duration,
    failed: impl Fn(&Error),
) -> Option<Release> {
    let timeout = release_timeout(ttl);
    let mut pauses = Backoff::new(Duration::from_millis(50), Duration::from_secs(10).min(ttl));
    let mut end = None;
    loop {
        let mut release = claim.release();
        let answer = match at_once(&mut release).await {
            Some(answer) => Some(answer),
            None => boxed(within(&mut release, Moment::now().add(timeout))).await,
        };
        let error = match answer {
            Some(Ok(release)) => return Some(release),
            Some(Err(error)) => error,
            None => Error::no_answer(timeout),
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
