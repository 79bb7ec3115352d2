//! The clock that leases are counted on.
//!
//! A lease goes on in the store while this machine sleeps, so the deadline of a hold must too.
//! `Instant` stands still during suspend on Linux. Timers run on `Instant`'s clock, and tests pause
//! it; so a moment here is tokio's time plus the time that the machine has slept.

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
mod real {
    use std::time::Duration;

    #[cfg(target_os = "linux")]
    pub(crate) fn asleep() -> Duration {
        use rustix::time::{ClockId, clock_gettime};
        // First the clock that sleeps count on, then the one that they do not, then (in `now`) tokio's.
        // A thread may be held up for any time between two of these. In this order the sum is then a
        // moment that was, after the call began; in another it would be one that is still to come, and
        // a lease counted from there would be believed for too long.
        let boot = clock_gettime(ClockId::Boottime);
        let monotonic = clock_gettime(ClockId::Monotonic);
        let (seconds, nanos) = (boot.tv_sec - monotonic.tv_sec, boot.tv_nsec - monotonic.tv_nsec);
        let nanos = seconds * 1_000_000_000 + nanos;
        // Rounded down, so that it is the same from one reading to the next; the drift allowance covers
        // a millisecond.
        Duration::from_millis(u64::try_from(nanos.div_euclid(1_000_000)).unwrap_or(0))
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

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::time::Instant;

    use rustix::time::{ClockId, clock_gettime};

    use super::*;

    /// How long the machine has slept, at the most.
    fn at_most() -> Duration {
        let difference = || {
            let monotonic = clock_gettime(ClockId::Monotonic);
            let boot = clock_gettime(ClockId::Boottime);
            let seconds = boot.tv_sec - monotonic.tv_sec;
            seconds * 1_000_000_000 + boot.tv_nsec - monotonic.tv_nsec
        };
        let least = (0..1000).map(|_| difference()).min().unwrap_or(0);
        Duration::from_nanos(u64::try_from(least).unwrap_or(0))
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
}
