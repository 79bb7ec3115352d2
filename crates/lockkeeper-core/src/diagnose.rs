//! Findings of a store's diagnosis.

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Severity {
    /// No problem.
    Ok,
    /// Locks work, with a risk that an operator should accept or remove.
    Warn,
    /// Locks do not work, or are not safe.
    Fail,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Finding {
    /// Its severity.
    pub severity: Severity,
    /// What was found.
    pub what: String,
    /// What to do about it.
    pub advice: Option<String>,
}

impl Finding {
    /// Creates a finding without a problem.
    pub fn ok(what: impl Into<String>) -> Self {
        Self { severity: Severity::Ok, what: what.into(), advice: None }
    }

    /// Creates a warning.
    pub fn warn(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { severity: Severity::Warn, what: what.into(), advice: Some(advice.into()) }
    }

    /// Creates a finding of a failure.
    pub fn fail(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { severity: Severity::Fail, what: what.into(), advice: Some(advice.into()) }
    }
}
