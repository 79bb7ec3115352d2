//! Options of a lock, validated in one place.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::name::Label;

/// The longest TTL: a thousand years. Stores count milliseconds in 53 bits.
const MAX_TTL: Duration = Duration::from_secs(1000 * 366 * 24 * 60 * 60);

/// The shortest TTL. Drift takes more than 2 ms of it, and tokio's timers have a resolution of a millisecond: with less,
/// renewals would be late even on a store without latency.
const MIN_TTL: Duration = Duration::from_millis(10);

/// Returns what is subtracted from a lease because this machine's clock and the store's run at slightly different speeds:
/// 1 % and 2 ms.
pub(crate) fn drift(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

/// The options of a lock.
///
/// A [`Keeper`](crate::Keeper) has defaults, which each of its locks may override. An acquire validates them before any
/// I/O, and fails with [`ErrorKind::InvalidOption`].
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) ttl: Duration,
    pub(crate) max_wait: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    label: Option<Result<Label>>,
}

impl Default for Options {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(30), max_wait: None, max_hold: None, label: None }
    }
}

impl Options {
    pub(crate) fn set_label(&mut self, label: impl Into<Arc<str>>) {
        self.label = Some(Label::new(label));
    }

    pub(crate) fn label(&self) -> Result<Label> {
        self.label.clone().unwrap_or_else(|| Ok(Label::default()))
    }

    /// Returns the first lease to request.
    pub(crate) fn lease(&self) -> Result<Duration> {
        check_lease(self.ttl, self.max_hold)
    }
}

/// Returns the TTL, or `max_hold` if that is shorter.
pub(crate) fn check_lease(ttl: Duration, max_hold: Option<Duration>) -> Result<Duration> {
    let lease = check_ttl(ttl)?;
    match max_hold {
        Some(max_hold) if max_hold < MIN_TTL => Err(invalid(format!(
            "a max_hold of {max_hold:?} is too short: the minimum is {MIN_TTL:?}"
        ))),
        Some(max_hold) => Ok(lease.min(max_hold)),
        None => Ok(lease),
    }
}

/// Checks that a TTL is between the minimum and the maximum.
pub(crate) fn check_ttl(ttl: Duration) -> Result<Duration> {
    if ttl < MIN_TTL {
        return Err(invalid(format!("a ttl of {ttl:?} is too short: the minimum is {MIN_TTL:?}")));
    }
    if ttl > MAX_TTL {
        return Err(invalid("a ttl of more than a thousand years is too long: use a shorter one"));
    }
    Ok(ttl)
}

pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

/// The setters of keepers and locks.
macro_rules! option_setters {
    ($($path:ident).+) => {
        /// Sets how long the lock lasts in the store without renewal (30 s by default).
        ///
        /// While the guard lives, the lock is renewed every third of the TTL, so the TTL does not limit how long the lock
        /// can be held. It is how long the lock stays held after its process died, and how long it survives a store
        /// that does not answer.
        #[must_use]
        pub fn ttl(mut self, ttl: std::time::Duration) -> Self {
            self.$($path).+.ttl = ttl;
            self
        }

        /// Sets how long to wait for other holders (without limit by default).
        ///
        /// Zero is one attempt. The client waits for the first answer of the store for at least a second even
        /// if this is shorter, so that a short wait does not turn a slow network into an error.
        ///
        /// When the time is over, the client leaves the queue and then returns, so that a following try finds no queue
        /// entry. That takes one request. If the store does not confirm it within 100 ms, the call returns first, and
        /// the client leaves the queue in the background.
        #[must_use]
        pub fn max_wait(mut self, max_wait: std::time::Duration) -> Self {
            self.$($path).+.max_wait = Some(max_wait);
            self
        }

        /// Sets the maximum time of a hold (unlimited by default).
        ///
        /// The lease is not renewed past that time: the guard reports the loss of the lock, and the store frees it. Use it
        /// for a job that may hang, so that it cannot block other clients without limit.
        #[must_use]
        pub fn max_hold(mut self, max_hold: std::time::Duration) -> Self {
            self.$($path).+.max_hold = Some(max_hold);
            self
        }

        /// Sets the human-readable holder that inspection shows (host, process id and program by default).
        #[must_use]
        pub fn label(mut self, label: impl Into<std::sync::Arc<str>>) -> Self {
            self.$($path).+.set_label(label);
            self
        }
    };
}
pub(crate) use option_setters;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ttl_is_at_least_ten_milliseconds_and_at_most_a_thousand_years() {
        for bad in [Duration::ZERO, Duration::from_millis(9), MAX_TTL * 2, Duration::MAX] {
            assert_eq!(check_ttl(bad).unwrap_err().kind(), ErrorKind::InvalidOption, "{bad:?}");
        }
        let century = Duration::from_secs(100 * 366 * 24 * 60 * 60);
        for good in [MIN_TTL, Duration::from_secs(30), century, MAX_TTL] {
            assert_eq!(check_ttl(good).unwrap(), good);
        }
    }
}
