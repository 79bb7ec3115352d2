//! Why a command has to end before it is done, and how much time is left for it.

use std::fmt;

/// Why the lock no longer protects the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Renewals fail, and the lease ends soon. The store still keeps the lock: the command gets TERM, and KILL before
    /// the lease ends.
    Foreseen,
    /// The store no longer has the hold: it was broken, or its session ended. The next holder may already run, so the
    /// command is killed at once, unless `--overlap-grace` allows it more.
    Certain,
    /// The lease ended while this process was stopped or stuck. The command is killed at once.
    Late,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Loss::Foreseen => "the lock could not be renewed",
            Loss::Certain => "the lock was lost (it was broken, or its session ended)",
            Loss::Late => "the lock was not renewed in time",
        })
    }
}
