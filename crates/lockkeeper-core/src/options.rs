//! Options of a lock, checked in one place.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::name::Label;

/// The longest ttl that is taken: a thousand years. Stores count in milliseconds, in 53 bits.
const MAX_TTL: Duration = Duration::from_secs(1000 * 366 * 24 * 60 * 60);

/// The shortest ttl that is taken. Drift alone takes more than 2 ms of it, and tokio's timers are as
/// fine as a millisecond: with less, a renewal could not be in time on a perfect store.
const MIN_TTL: Duration = Duration::from_millis(10);

/// What is taken off every lease, because this machine's clock and the store's do not run at quite
/// the same speed: 1 % and 2 ms.
pub(crate) fn drift(lease: Duration) -> Duration {
    lease / 100 + Duration::from_millis(2)
}

/// How long a lock lasts, how long to wait for it and who asks.
///
/// A [`Keeper`](crate::Keeper) has defaults, each lock made by it may differ. Values are checked when
/// the lock is asked for, and what is wrong is an [`ErrorKind::InvalidOption`] before any I/O.
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

    /// The first lease to ask for.
    pub(crate) fn lease(&self) -> Result<Duration> {
        check_lease(self.ttl, self.max_hold)
    }
}

/// The ttl, unless the hold must end before.
pub(crate) fn check_lease(ttl: Duration, max_hold: Option<Duration>) -> Result<Duration> {
    let lease = check_ttl(ttl)?;
    match max_hold {
        Some(max_hold) if max_hold < MIN_TTL => Err(invalid(format!(
            "a max_hold of {max_hold:?} is too short: {MIN_TTL:?} is the least"
        ))),
        Some(max_hold) => Ok(lease.min(max_hold)),
        None => Ok(lease),
    }
}

/// A ttl that leaves something after drift is taken off.
pub(crate) fn check_ttl(ttl: Duration) -> Result<Duration> {
    if ttl < MIN_TTL {
        return Err(invalid(format!("a ttl of {ttl:?} is too short: {MIN_TTL:?} is the least")));
    }
    if ttl > MAX_TTL {
        return Err(invalid("a ttl of more than a thousand years is too long"));
    }
    Ok(ttl)
}

pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

/// The setters that a keeper and every lock have in common.
macro_rules! option_setters {
    ($($path:ident).+) => {
        /// Sets how long the lock lasts in the store without renewal (30 s if not set).
        ///
        /// While the guard lives it is renewed every third of this, so the ttl is not a limit on how
        /// long you may hold. It is how long the lock stays taken after your process died, and how
        /// long it survives a store that does not answer.
        #[must_use]
        pub fn ttl(mut self, ttl: std::time::Duration) -> Self {
            self.$($path).+.ttl = ttl;
            self
        }

        /// Sets how long to wait for other holders (for ever if not set).
        ///
        /// Zero is one attempt. The first answer of the store is awaited for at least a second even
        /// if this is shorter, so that a short wait does not turn a slow network into an error.
        ///
        /// When the time is up, the place in the queue is given up before the answer: a try that follows finds no trace of it.
        /// That takes one request. If the store does not confirm it within 100 ms, the answer comes first,
        /// and the place is given up in the background.
        #[must_use]
        pub fn max_wait(mut self, max_wait: std::time::Duration) -> Self {
            self.$($path).+.max_wait = Some(max_wait);
            self
        }

        /// Sets after how long a hold is lost even though its holder lives (never if not set).
        ///
        /// The lease is not renewed past that moment, so the guard says that it lost the lock, and
        /// the store frees it. For a job that must not block the others for ever when it hangs.
        #[must_use]
        pub fn max_hold(mut self, max_hold: std::time::Duration) -> Self {
            self.$($path).+.max_hold = Some(max_hold);
            self
        }

        /// Sets who asks, for people who inspect the lock (host, process id and program if not set).
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
