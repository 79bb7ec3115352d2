//! Releases that are repeated until the store confirms them, and the bounded waits that this takes.

use std::time::Duration;

use crate::backoff::Backoff;
use crate::clock::{Moment, sleep_until};
use crate::contract::{Claim, Release};
use crate::error::Error;
use crate::futures::{at_once, boxed, within};

/// How long "not acquired" may be held up until the store has confirmed that nothing of the attempt is left.
/// Longer than a round trip to another continent, and short beside any wait that is worth a queue.
pub(crate) const LEAVE_WITHIN: Duration = Duration::from_millis(100);

/// How long the answer to one release is awaited.
pub(crate) fn release_patience(ttl: Duration) -> Duration {
    ttl.clamp(Duration::from_secs(1), Duration::from_secs(10))
}

/// Releases a claim until the store confirms it or any lease must have expired. Reports each failure to `failed`.
///
/// A release that gets no answer is sent again: it is idempotent, and the store may be back.
pub(crate) async fn release_until_confirmed(
    claim: &mut dyn Claim,
    ttl: Duration,
    failed: impl Fn(&Error),
) -> Option<Release> {
    let patience = release_patience(ttl);
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
