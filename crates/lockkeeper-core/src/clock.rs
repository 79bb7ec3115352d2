//! The clock for leases.
//!
//! A lease runs in the store while this machine is suspended, so the deadline of a hold must include that time. Timers
//! use `Instant`, which tests can pause. So [`Moment`] is tokio's time plus the time that the machine was suspended:
//! the difference between a clock that includes suspend and `Instant`.
//!
//! | system | `Instant` includes suspend | the clock that does |
//! |---|---|---|
//! | Linux, Android | no: `CLOCK_MONOTONIC` | `CLOCK_BOOTTIME` (`clock_gettime(2)`) |
//! | macOS, iOS | no: `CLOCK_UPTIME_RAW` | `CLOCK_MONOTONIC` ("will continue to increment while the system is asleep", `clock_gettime(3)`) |
//! | Windows | yes: `QueryPerformanceCounter` ("including the time when the machine was in a sleep state", Microsoft, "Acquiring high-resolution time stamps"; rust-lang/rust#79462) | not needed |
//! | OpenBSD | yes: `CLOCK_MONOTONIC` (`clock_gettime(2)`) | not needed |
//! | FreeBSD | no | none ("we do not have a monotonic clock that counts suspended time", FreeBSD 108de784513d, 2023): a hold that expired may be reported as held for as long as the machine was suspended |
//!
//! Only Linux is tested. No guest clock includes the time for which the host pauses a virtual machine.

use std::sync::OnceLock;
use std::time::{Duration, Instant as StdInstant};

use tokio::time::Instant;

const HOUR: Duration = Duration::from_secs(60 * 60);

/// A point in time on a clock that includes suspend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(Duration);

impl Moment {
    pub(crate) fn now() -> Self {
        static EPOCH: OnceLock<StdInstant> = OnceLock::new();
        // The order matters: see `asleep`.
        let asleep = asleep();
        let now = Instant::now().into_std();
        // Well before now, because the clocks of paused runtimes start at different times.
        let epoch = *EPOCH.get_or_init(|| now.checked_sub(HOUR).unwrap_or(now));
        Self(now.saturating_duration_since(epoch) + asleep)
    }

    /// Returns the moment later by a duration, or `None` on overflow.
    pub(crate) fn checked_add(self, duration: Duration) -> Option<Self> {
        self.0.checked_add(duration).map(Self)
    }

    /// Returns the moment later by a duration. Saturates.
    pub(crate) fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }

    /// Returns the time since an earlier moment; zero if that is in the future.
    pub(crate) fn since(self, earlier: Moment) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Returns the same moment on the standard library's clock, if the machine is not suspended before it.
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

/// Sleeps until the given time, or forever if there is none.
///
/// A suspension of the machine delays the timer by its length. So a task that waits for a deadline must also wait for the
/// keeper's maintenance task, which notices suspensions.
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

/// How long the machine was suspended, counted from an arbitrary point: only differences have a meaning.
mod real {
    #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
    pub(crate) use counted::asleep;

    /// `Instant` includes suspend, or no clock does.
    #[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
    pub(crate) fn asleep() -> std::time::Duration {
        std::time::Duration::ZERO
    }

    #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
    pub(super) mod counted {
        use std::sync::OnceLock;
        use std::time::{Duration, Instant};

        use rustix::time::{ClockId, clock_gettime};

        /// The clock that includes suspend.
        #[cfg(not(target_vendor = "apple"))]
        const CONTINUOUS: ClockId = ClockId::Boottime;
        #[cfg(target_vendor = "apple")]
        const CONTINUOUS: ClockId = ClockId::Monotonic;

        /// Larger than what a clock that NTP slews down (by at most 500 ppm) loses in five years of uptime.
        const MARGIN: Duration = Duration::from_secs(24 * 60 * 60);

        pub(crate) fn asleep() -> Duration {
            // First the clock that includes suspend, then the one that does not, then (in `now`) tokio's. A thread may
            // be preempted for any time between two of these. In this order the sum is then a time in the past, after
            // the call began. In another order it would be in the future, and a lease that counts from there would be
            // trusted for too long.
            let continuous = continuous();
            slept(continuous, running())
        }

        pub(in super::super) fn continuous() -> Duration {
            // Neither clock is ever negative.
            clock_gettime(CONTINUOUS).try_into().unwrap_or_default()
        }

        /// Returns how long `Instant`'s clock has run since the first call.
        pub(in super::super) fn running() -> Duration {
            static BASE: OnceLock<Instant> = OnceLock::new();
            BASE.get_or_init(Instant::now).elapsed()
        }

        /// Returns what one clock has gained on the other. Apple's continuous clock is slewed by NTP and the other is not,
        /// so it may also fall behind. The margin keeps the difference positive: a saturated difference would hide a
        /// suspension.
        pub(in super::super) fn slept(continuous: Duration, running: Duration) -> Duration {
            let slept = (MARGIN + continuous).saturating_sub(running);
            // Rounded down, so that successive readings are equal. The drift allowance covers a millisecond.
            Duration::from_millis(u64::try_from(slept.as_millis()).unwrap_or(u64::MAX))
        }
    }
}

/// A suspension that tests can simulate, on their own thread only.
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

#[cfg(all(test, any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
mod tests {
    use std::time::Instant;

    use super::real::counted::{continuous, running, slept};
    use super::*;

    /// Returns an upper bound of the time suspended: reads the clocks in the other order.
    fn at_most() -> Duration {
        let difference = || {
            let running = running();
            slept(continuous(), running)
        };
        (0..1000).map(|_| difference()).min().unwrap_or_default()
    }

    #[test]
    fn a_thread_that_is_preempted_between_two_clocks_reads_no_future_moment() {
        let at_most = at_most();
        // More threads than cores, so that they are preempted everywhere.
        let threads: Vec<_> = (0..8)
            .map(|_| {
                std::thread::spawn(move || {
                    let start = Instant::now();
                    while start.elapsed() < Duration::from_millis(300) {
                        let asleep = real::asleep();
                        assert!(asleep <= at_most, "{asleep:?} is more than {at_most:?}");
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_suspension_is_counted_in_full_for_any_drift_between_the_clocks() {
        const SLEEP: Duration = Duration::from_secs(31);
        // The uptime at the first reading, and what the slewed clock has gained or lost since.
        for uptime in [Duration::ZERO, HOUR * 24 * 365] {
            for (gained, lost) in [(0, 0), (60, 0), (0, 60), (0, 23 * 60 * 60)] {
                let running = HOUR * 24 * 30;
                let continuous = uptime + running + Duration::from_secs(gained);
                let continuous = continuous.checked_sub(Duration::from_secs(lost)).unwrap();
                let before = slept(continuous, running);
                let second = Duration::from_secs(1);
                let after = slept(continuous + second + SLEEP, running + second);
                assert_eq!(
                    after.abs_diff(before),
                    SLEEP,
                    "uptime {uptime:?}, gained {gained}, lost {lost}"
                );
            }
        }
    }
}
