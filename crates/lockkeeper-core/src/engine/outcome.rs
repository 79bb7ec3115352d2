//! How an acquire and a hold end.

use std::time::Duration;

use crate::error::Error;

/// What an acquire ends with.
#[derive(Debug)]
pub(crate) enum AcquireOutcome {
    Granted,
    /// Other claims held the lock for the whole time.
    NotInTime {
        waited: Duration,
    },
    Failed(Error),
}

/// How a hold, or an acquire, is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Release it in the store.
    Release,
    /// The same, because the acquire or the guard was dropped.
    Drop,
    /// Leave it in the store, to be adopted.
    Detach,
}
