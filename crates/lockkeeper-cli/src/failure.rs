//! Failures, and the exit codes for them.

use std::fmt;

use lockkeeper::{Error, ErrorKind};

/// Invalid usage or store URL.
pub(crate) const USAGE: u8 = 64;
/// The store is unavailable or refuses access.
pub(crate) const UNAVAILABLE: u8 = 69;
/// The lock was lost.
pub(crate) const LOST: u8 = 70;
/// Writing to stdout failed.
pub(crate) const OUTPUT: u8 = 74;
/// The lock was not acquired in time.
pub(crate) const CONFLICT: u8 = 75;

/// A failure: its exit code, its kind, and a message of one line.
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
        let message = format!("cannot write to stdout: {error}");
        Self { code: OUTPUT, kind: "output", message }
    }

    /// A signal that arrived when no command was running to forward it to.
    pub(crate) fn signal(signal: rustix::process::Signal) -> Self {
        let number = signal.as_raw();
        let name = nix::sys::signal::Signal::try_from(number).map_or("a signal", |s| s.as_str());
        let message = format!("interrupted by {name}");
        Self { code: signal_exit_code(number), kind: "signal", message }
    }

    /// The failure to register signal handlers.
    pub(crate) fn signal_handlers(error: &std::io::Error) -> Self {
        Self::unavailable(format!("cannot register signal handlers: {error}"))
    }
}

/// Returns the exit code of a process that a signal ended.
pub(crate) fn signal_exit_code(signal: i32) -> u8 {
    u8::try_from(signal).unwrap_or(127).saturating_add(128)
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        // A configuration error without a source is a mistake in the URL. With a source, the server or the file system has
        // refused access.
        let has_source = std::error::Error::source(&error).is_some();
        let (code, kind) = match error.kind() {
            ErrorKind::Undecided => (UNAVAILABLE, "undecided"),
            ErrorKind::Config if has_source => (UNAVAILABLE, "refused"),
            ErrorKind::Config | ErrorKind::InvalidName | ErrorKind::InvalidOption => {
                (USAGE, "usage")
            }
            ErrorKind::TimedOut => (CONFLICT, "conflict"),
            ErrorKind::Lost => (LOST, "lost"),
            ErrorKind::Unsupported => (USAGE, "unsupported"),
            // `Unavailable`, `Closed`, and kinds that are added later.
            _ => (UNAVAILABLE, "unavailable"),
        };
        Self { code, kind, message: error.to_string() }
    }
}
