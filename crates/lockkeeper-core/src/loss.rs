//! Why a lock was lost.

use std::fmt;

/// Why a hold was lost.
///
/// Stores report `SessionEnded` and `Broken`; the engine reports the others. Errors and logs use the `Display` text,
/// metric labels use [`as_str`](Self::as_str).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum LossReason {
    /// No renewal succeeded before the deadline: the store did not answer, or the process or the machine was stopped.
    Expired,
    /// The session that held the lock has ended: its connection was closed, or the server ended it.
    SessionEnded,
    /// The store no longer has the hold although its lease had not expired: it was broken or evicted, its lock file was
    /// removed, or the store lost its data.
    Broken,
    /// It was held for `max_hold`.
    MaxHold,
    /// The store's code panicked.
    StoreFailed,
    /// The runtime that renewed it was shut down.
    RuntimeShutdown,
}

impl LossReason {
    /// Returns a stable name in snake case, for metric labels and fields.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::SessionEnded => "session_ended",
            Self::Broken => "broken",
            Self::MaxHold => "max_hold",
            Self::StoreFailed => "store_failed",
            Self::RuntimeShutdown => "runtime_shutdown",
        }
    }
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "its lease expired",
            Self::SessionEnded => "its session ended",
            Self::Broken => "the store no longer has it",
            Self::MaxHold => "it was held for max_hold",
            Self::StoreFailed => "the store panicked",
            Self::RuntimeShutdown => "its runtime was shut down",
        })
    }
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_serialized_as_its_stable_name() {
        for reason in [
            LossReason::Expired,
            LossReason::SessionEnded,
            LossReason::Broken,
            LossReason::MaxHold,
            LossReason::StoreFailed,
            LossReason::RuntimeShutdown,
        ] {
            assert_eq!(serde_json::json!(reason), reason.as_str());
        }
    }
}
