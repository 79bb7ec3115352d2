//! The kinds of loss of the lock of a running command.

use std::fmt;

/// Why the command must be stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Renewals fail, and the lease ends soon. The store still keeps the lock, so the command gets TERM, and KILL
    /// before the lease ends.
    LeaseEnding,
    /// The store no longer keeps the lock: it was broken, or its session ended. The next holder may already run, so the
    /// command is killed at once, unless `--overlap-grace` allows more time.
    Dropped,
    /// The lease ended while this process was stopped or stalled. The command is killed at once.
    Expired,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Loss::LeaseEnding => "it could not be renewed in time",
            Loss::Dropped => "it was broken, or its session ended",
            Loss::Expired => "its lease expired while lockkeeper was stopped or stalled",
        })
    }
}
