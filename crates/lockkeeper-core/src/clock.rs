//! The clock that leases are counted on.
//!
//! A lease goes on in the store while this machine sleeps, so the deadline of a hold must too.
//! `Instant` stands still during suspend on Linux. Timers run on `Instant`'s clock, and tests pause
//! it; so a moment here is tokio's time plus the time that the machine has slept.

use std::sync::OnceLock;
use std::time::{Duration, Instant as StdInstant};

use tokio::time::Instant;

/// A moment on a clock that goes on while the machine sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(Duration);

impl Moment {
    pub(crate) fn now() -> Self {
        static EPOCH: OnceLock<StdInstant> = OnceLock::new();
        let now = Instant::now().into_std();
        let epoch = *EPOCH.get_or_init(|| now);
        Self(now.saturating_duration_since(epoch) + asleep())
    }

    /// The moment later by a duration; `None` if that is past the end of time.
    pub(crate) fn checked_add(self, duration: Duration) -> Option<Self> {
        self.0.checked_add(duration).map(Self)
    }

    /// The moment later by a duration that options have checked to be a sane one.
    pub(crate) fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }

    /// How long ago an earlier moment was; zero if it is still to come.
    pub(crate) fn since(self, earlier: Moment) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The same moment on the standard library's clock, if the machine does not sleep before it.
    pub(crate) fn to_instant(self) -> StdInstant {
        let (now, base) = (Self::now(), Instant::now().into_std());
        if self >= now {
            // A thousand years fit into an instant on every platform with 64-bit time.
            base.checked_add(self.since(now)).unwrap_or(base)
        } else {
            base.checked_sub(now.since(self)).unwrap_or(base)
        }
    }
}

/// Sleeps until a moment; for ever if there is none.
///
/// After the machine slept, the timer is late by as much: whoever waits for a deadline must also
/// listen to the keeper, whose steward notices.
pub(crate) async fn sleep_until(moment: Option<Moment>) {
    let Some(moment) = moment else { return std::future::pending().await };
    loop {
        let left = moment.since(Moment::now());
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left).await;
    }
}

#[cfg(not(test))]
pub(crate) use real::asleep;
#[cfg(test)]
pub(crate) use simulated::asleep;

/// How long the machine has slept since it was started.
#[cfg_attr(test, allow(dead_code, reason = "tests simulate it"))]
mod real {
    use std::time::Duration;

    #[cfg(target_os = "linux")]
    pub(crate) fn asleep() -> Duration {
        use rustix::time::{ClockId, clock_gettime};
        let (monotonic, boot) =
            (clock_gettime(ClockId::Monotonic), clock_gettime(ClockId::Boottime));
        let (seconds, nanos) = (boot.tv_sec - monotonic.tv_sec, boot.tv_nsec - monotonic.tv_nsec);
        let millis = seconds * 1000 + nanos / 1_000_000;
        // The two clocks are read one after the other; rounding keeps the difference the same from
        // one reading to the next, so that it does not look like a tiny sleep. Down would claim less
        // sleep than there was, by at most a millisecond: the drift allowance covers that.
        Duration::from_millis(u64::try_from(millis).unwrap_or(0))
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn asleep() -> Duration {
        Duration::ZERO
    }
}

/// A sleep that tests can make happen, on their own thread only.
#[cfg(test)]
pub(crate) mod simulated {
    use std::cell::Cell;
    use std::time::Duration;

    thread_local! {
        static ASLEEP: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    pub(crate) fn asleep() -> Duration {
        ASLEEP.get()
    }

    pub(crate) fn sleep_machine(duration: Duration) {
        ASLEEP.set(ASLEEP.get() + duration);
    }
}
