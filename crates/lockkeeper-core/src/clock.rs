//! The clock that leases are counted on.
//!
//! A lease goes on in the store while this machine sleeps, so the deadline of a hold must too. Timers run on `Instant`'s
//! clock, and tests pause it; so a moment here is tokio's time plus the time that the machine has slept: what a
//! clock that counts sleep has gained on `Instant`.
//!
//! | system | `Instant` counts sleep | the clock that does |
//! |---|---|---|
//! | Linux, Android | no: `CLOCK_MONOTONIC` | `CLOCK_BOOTTIME` (`clock_gettime(2)`) |
//! | macOS, iOS | no: `CLOCK_UPTIME_RAW` | `CLOCK_MONOTONIC` ("will continue to increment while the system is asleep", `clock_gettime(3)`) |
//! | Windows | yes: `QueryPerformanceCounter` ("including the time when the machine was in a sleep state", Microsoft, "Acquiring high-resolution time stamps"; rust-lang/rust#79462) | not needed |
//! | OpenBSD | yes: `CLOCK_MONOTONIC` (`clock_gettime(2)`) | not needed |
//! | FreeBSD | no | none ("we do not have a monotonic clock that counts suspended time", FreeBSD 108de784513d, 2023): a hold may be believed in for as long as the machine slept |
//!
//! Only Linux is tested. No guest clock counts the time for which a virtual machine is paused by its host.

use std::sync::OnceLock;
use std::time::{Duration, Instant as StdInstant};

use tokio::time::Instant;

const HOUR: Duration = Duration::from_secs(60 * 60);

/// A moment on a clock that goes on while the machine sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(Duration);

impl Moment {
    pub(crate) fn now() -> Self {
        static EPOCH: OnceLock<StdInstant> = OnceLock::new();
        // The order matters: see `asleep`.
        let asleep = asleep();
        let now = Instant::now().into_std();
        // Well before now, because the clocks of paused runtimes begin apart.
        let epoch = *EPOCH.get_or_init(|| now.checked_sub(HOUR).unwrap_or(now));
        Self(now.saturating_duration_since(epoch) + asleep)
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

/// Sleeps until a moment; without end if there is none.
///
/// After a suspension of the machine the timer is late by as much: a task that waits for a deadline must also listen to the
/// keeper's maintenance task, which notices.
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

/// How long the machine has slept, counted from an arbitrary point: only differences have a meaning.
mod real {
    #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
    pub(crate) use counted::asleep;

    /// `Instant` counts sleep, or no clock does.
    #[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
    pub(crate) fn asleep() -> std::time::Duration {
        std::time::Duration::ZERO
    }

    #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
    pub(super) mod counted {
        use std::sync::OnceLock;
        use std::time::{Duration, Instant};

        use rustix::time::{ClockId, clock_gettime};

        /// The clock that counts sleep.
        #[cfg(not(target_vendor = "apple"))]
        const CONTINUOUS: ClockId = ClockId::Boottime;
        #[cfg(target_vendor = "apple")]
        const CONTINUOUS: ClockId = ClockId::Monotonic;

        /// Larger than what a clock that NTP slews down (by at most 500 ppm) loses in five years of uptime.
        const MARGIN: Duration = Duration::from_secs(24 * 60 * 60);

        pub(crate) fn asleep() -> Duration {
            // First the clock that counts sleep, then the one that does not, then (in `now`) tokio's. A thread may be
            // held up for any time between two of these. In this order the sum is then a moment that was, after the
            // call began; in another it would be one that is still to come, and a lease counted from there would be
            // believed for too long.
            let continuous = continuous();
            slept(continuous, running())
        }

        pub(in super::super) fn continuous() -> Duration {
            // Neither clock is ever negative.
            clock_gettime(CONTINUOUS).try_into().unwrap_or_default()
        }

        /// How long `Instant`'s clock has run since the first call.
        pub(in super::super) fn running() -> Duration {
            static BASE: OnceLock<Instant> = OnceLock::new();
            BASE.get_or_init(Instant::now).elapsed()
        }

        /// What one clock has gained on the other. Apple's continuous clock is slewed by NTP and the other is not, so it
        /// may also fall behind: the margin keeps the difference positive, or a sleep would be hidden by the loss
        /// before it.
        pub(in super::super) fn slept(continuous: Duration, running: Duration) -> Duration {
            let slept = (MARGIN + continuous).saturating_sub(running);
            // Rounded down, so that it is the same from one reading to the next; the drift allowance covers a
            // millisecond.
            Duration::from_millis(u64::try_from(slept.as_millis()).unwrap_or(u64::MAX))
        }
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

#[cfg(all(test, any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
mod tests {
    use std::time::Instant;

    use super::real::counted::{continuous, running, slept};
    use super::*;

    /// How long the machine has slept, at the most: the clocks are read in the other order.
    fn at_most() -> Duration {
        let difference = || {
            let running = running();
            slept(continuous(), running)
        };
        (0..1000).map(|_| difference()).min().unwrap_or_default()
    }

    #[test]
    fn a_thread_that_is_held_up_between_two_clocks_does_not_read_the_future() {
        let at_most = at_most();
        // More threads than cores, so that they are interrupted everywhere.
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
    fn a_sleep_is_counted_in_full_whatever_the_clocks_have_drifted_apart_before() {
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
