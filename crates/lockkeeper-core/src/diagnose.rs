//! What an examination of a store finds.

/// Whether something is well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Severity {
    /// It is well.
    Ok,
    /// Locks work, and may go wrong in a way that somebody should have decided to accept.
    Warn,
    /// Locks do not work, or go wrong.
    Fail,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Finding {
    /// Whether it is well.
    pub severity: Severity,
    /// What was found.
    pub what: String,
    /// What to do, where something is to be done.
    pub advice: Option<String>,
}

impl Finding {
    /// It is well.
    pub fn ok(what: impl Into<String>) -> Self {
        Self { severity: Severity::Ok, what: what.into(), advice: None }
    }

    /// It may go wrong.
    pub fn warn(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { severity: Severity::Warn, what: what.into(), advice: Some(advice.into()) }
    }

    /// It is wrong.
    pub fn fail(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { severity: Severity::Fail, what: what.into(), advice: Some(advice.into()) }
    }
}
