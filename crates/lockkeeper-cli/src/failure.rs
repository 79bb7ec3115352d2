//! What went wrong, and the exit code that says so.

use std::fmt;

use lockkeeper::{Error, ErrorKind};

/// The command was called in a wrong way.
pub(crate) const USAGE: u8 = 64;
/// The store does not answer, or refuses.
pub(crate) const UNAVAILABLE: u8 = 69;
/// The lock was lost.
pub(crate) const LOST: u8 = 70;
/// What was to be written could not be.
pub(crate) const OUTPUT: u8 = 74;
/// Others held the lock for longer than was to be waited.
pub(crate) const CONFLICT: u8 = 75;

/// An end that is not the one hoped for.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    /// One word, for scripts.
    pub(crate) kind: &'static str,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { code: USAGE, kind: "usage", message: message.into() }
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self { code: UNAVAILABLE, kind: "unavailable", message: message.into() }
    }

    pub(crate) fn lost(message: impl Into<String>) -> Self {
        Self { code: LOST, kind: "lost", message: message.into() }
    }

    pub(crate) fn output(error: &std::io::Error) -> Self {
        let message = format!("the output could not be written: {error}");
        Self { code: OUTPUT, kind: "output", message }
    }

    /// The end by a signal, before there was a command that could have had it.
    pub(crate) fn signal(signal: rustix::process::Signal) -> Self {
        let code = by_signal(signal.as_raw());
        Self { code, kind: "signal", message: format!("ended by signal {}", signal.as_raw()) }
    }
}

/// The exit code for whatever was ended by a signal.
pub(crate) fn by_signal(signal: i32) -> u8 {
    u8::try_from(signal).unwrap_or(127).saturating_add(128)
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        // A wrong URL is a mistake of the caller. What a server or the file system has against a right
        // one has a source, and is not.
        let told_by_the_store = std::error::Error::source(&error).is_some();
        let (code, kind) = match error.kind() {
            ErrorKind::Undecided => (UNAVAILABLE, "undecided"),
            ErrorKind::Config if told_by_the_store => (UNAVAILABLE, "refused"),
            ErrorKind::Config | ErrorKind::InvalidName | ErrorKind::InvalidOption => {
                (USAGE, "usage")
            }
            ErrorKind::TimedOut => (CONFLICT, "conflict"),
            ErrorKind::Lost => (LOST, "lost"),
            ErrorKind::Unsupported => (USAGE, "unsupported"),
            // Unavailable, closed, and kinds that are added later.
            _ => (UNAVAILABLE, "unavailable"),
        };
        Self { code, kind, message: error.to_string() }
    }
}
