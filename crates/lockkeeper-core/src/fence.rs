//! Fencing tokens.

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use crate::error::{Error, ErrorKind};

/// A fencing token: a number from 1 to 2^63 - 1 that rises with every exclusive grant of a name.
///
/// Send it with each write to the resource that the lock protects, and let the resource reject a write whose fence is
/// lower than the highest it has seen. Then a holder that was paused past its lease, and does not know it, cannot
/// overwrite newer data.
///
/// It fits a signed 64-bit column in any database.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u64", into = "u64"))]
pub struct Fence(NonZeroU64);

impl Fence {
    /// The highest fence.
    pub const MAX: Fence = Fence(NonZeroU64::new((1 << 63) - 1).expect("is not zero"));

    /// How far a fence may be ahead of the clock that a store takes its fences from.
    ///
    /// A fence is ahead of that clock after the clock was set back, or after a failover to a server whose clock is behind:
    /// by seconds, or by minutes without time synchronization. More than an hour is a mistake that must not spread. So a
    /// store refuses a floor that is further ahead, unless it has granted such a fence itself. It remembers a fence that
    /// is ahead for no longer than this after its last use.
    pub const MAX_AHEAD: Duration = Duration::from_secs(60 * 60);

    /// Creates a fence from its number. Returns `None` for 0 and for 2^63 or more.
    pub fn new(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self).filter(|fence| *fence <= Self::MAX)
    }

    /// Returns the error of a store that refuses this floor because it is more than [`MAX_AHEAD`](Self::MAX_AHEAD) ahead of
    /// the clock it takes its fences from. Both are in microseconds since 1970.
    pub fn refused(self, clock: u64) -> Error {
        let ahead = Duration::from_micros(self.get().saturating_sub(clock)).as_secs();
        let message = format!(
            "the next fence must be at least {self}, which is {ahead} s ahead of the store's clock, {clock}: that clock \
             was set back, or a server whose clock is behind was promoted. Correct the clock, or open a new keeper, \
             which accepts lower fences at once (this one accepts them an hour after its last grant of the name)"
        );
        Error::new(ErrorKind::Config, message)
    }

    /// Returns the error of a store that has no fence left above this one.
    pub fn exhausted(self) -> Error {
        let message =
            format!("no fence is left above {self}: the attempt fails rather than repeat a fence");
        Error::new(ErrorKind::Config, message)
    }

    /// Returns its number.
    pub fn get(self) -> u64 {
        self.0.get()
    }

    /// Returns the next higher fence; `MAX` for `MAX`.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1)).min(Self::MAX)
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fence({self})")
    }
}

impl From<Fence> for u64 {
    fn from(fence: Fence) -> u64 {
        fence.get()
    }
}

impl TryFrom<u64> for Fence {
    type Error = Error;

    fn try_from(number: u64) -> Result<Self, Error> {
        Self::new(number).ok_or_else(|| {
            Error::new(ErrorKind::Config, "not a fence: it must be a number from 1 to 2^63 - 1")
        })
    }
}
