//! Pauses between tries.

use std::time::Duration;

/// Growing pauses with full jitter: each is drawn between nothing and a limit that doubles, so that
/// those who failed together do not come back together.
#[derive(Debug)]
pub(crate) struct Backoff {
    limit: Duration,
    cap: Duration,
}

impl Backoff {
    const SHORTEST: Duration = Duration::from_millis(1);

    /// Pauses of at most `first`, then twice that, and so on up to `cap`.
    pub(crate) fn new(first: Duration, cap: Duration) -> Self {
        Self { limit: first.min(cap), cap }
    }

    /// The next pause.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = self.limit.mul_f64(fastrand::f64());
        self.limit = self.limit.saturating_mul(2).min(self.cap);
        pause.max(Self::SHORTEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_cap_and_are_never_nothing() {
        let mut backoff = Backoff::new(Duration::from_millis(4), Duration::from_millis(50));
        let mut limit = 4;
        for _ in 0..100 {
            let pause = backoff.next();
            assert!(pause >= Backoff::SHORTEST);
            assert!(pause <= Duration::from_millis(limit), "{pause:?} is over {limit} ms");
            limit = (limit * 2).min(50);
        }
    }
}
