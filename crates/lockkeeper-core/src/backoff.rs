//! Pauses between retries.

use std::time::Duration;

/// Exponential backoff with full jitter. Each pause is drawn between zero and a limit that doubles, so that clients that
/// failed at the same time do not retry at the same time.
#[derive(Debug)]
pub(crate) struct Backoff {
    limit: Duration,
    cap: Duration,
}

impl Backoff {
    const MIN: Duration = Duration::from_millis(1);

    /// Creates a backoff whose limit starts at `first` and doubles up to `cap`.
    pub(crate) fn new(first: Duration, cap: Duration) -> Self {
        Self { limit: first.min(cap), cap }
    }

    /// Returns the next pause.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = self.limit.mul_f64(fastrand::f64());
        self.limit = self.limit.saturating_mul(2).min(self.cap);
        pause.max(Self::MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_cap_and_are_never_zero() {
        let mut backoff = Backoff::new(Duration::from_millis(4), Duration::from_millis(50));
        let mut limit = 4;
        for _ in 0..100 {
            let pause = backoff.next();
            assert!(pause >= Backoff::MIN);
            assert!(pause <= Duration::from_millis(limit), "{pause:?} is over {limit} ms");
            limit = (limit * 2).min(50);
        }
    }
}
