//! From the client's errors to ours.

use lockkeeper_core::{Error, ErrorKind, Fence};
use redis::{ErrorKind as RedisKind, RedisError, ServerErrorKind};

/// What an error means for the connection it came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The connection is of no use any more.
    Broken,
    /// The server refused this request; the next may go well.
    Refused,
}

pub(crate) fn verdict(error: &RedisError) -> Verdict {
    let broken = match error.kind() {
        // The last two: it was the master and is a replica now.
        RedisKind::Io
        | RedisKind::Parse
        | RedisKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown) => true,
        _ => error.is_unrecoverable_error() || error.is_connection_dropped(),
    };
    if broken { Verdict::Broken } else { Verdict::Refused }
}

/// An error of ours, in one line, with what to do where something can be done.
pub(crate) fn translate(error: RedisError) -> Error {
    let code = error.code().unwrap_or_default();
    let detail = || one_line(&error);
    let (kind, message) = match (error.kind(), code) {
        (_, "WRONGPASS") | (RedisKind::AuthenticationFailed, _) => (
            ErrorKind::Config,
            "the server refuses the user name or the password: check them in the URL".to_owned(),
        ),
        (_, "NOAUTH") => (
            ErrorKind::Config,
            "the server wants a password: put it into the URL, as in \"redis://:password@host/\""
                .to_owned(),
        ),
        (RedisKind::Server(ServerErrorKind::NoPerm), _) | (_, "NOPERM") => (
            ErrorKind::Config,
            format!("the user lacks a permission that locks need: {}", detail()),
        ),
        (_, "OOM") => (
            ErrorKind::Unavailable,
            "the server is out of memory (maxmemory reached, nothing to evict): give it more, or \
             give the locks a server of their own"
                .to_owned(),
        ),
        (RedisKind::Server(ServerErrorKind::ReadOnly), _) => (
            ErrorKind::Unavailable,
            "the server is a read-only replica: give the address of the master, or use \
             redis+sentinel://"
                .to_owned(),
        ),
        (_, "FENCEAHEAD" | "FENCEEND") => return fence(code, &error).with_source(error),
        (_, "WRONGTYPE") => (
            ErrorKind::Config,
            "a key of the lock has been used for something else: choose another prefix".to_owned(),
        ),
        _ if detail().contains("DB index is out of range") => (
            ErrorKind::Config,
            "the server has no database of that number: check the one after the host in the URL"
                .to_owned(),
        ),
        _ if error.is_timeout() => (ErrorKind::Unavailable, "no answer in time".to_owned()),
        _ => (ErrorKind::Unavailable, detail()),
    };
    Error::new(kind, message).with_source(error)
}

/// The error of a script that refuses a floor, or has no fence left.
fn fence(code: &str, error: &RedisError) -> Error {
    let detail = error.detail().unwrap_or_default();
    let mut numbers = detail.split(' ').map_while(|word| word.parse().ok());
    let fence = numbers.next().and_then(Fence::new).unwrap_or(Fence::MAX);
    match (code, numbers.next()) {
        ("FENCEAHEAD", Some(clock)) => fence.refused(clock),
        _ => fence.exhausted(),
    }
}

/// What the error says, without line breaks and without the script that a server may quote.
fn one_line(error: &RedisError) -> String {
    let text = error.to_string();
    let text = text.split(['\n', '\r']).next().unwrap_or_default();
    let mut text: String = text.chars().take(300).collect();
    if text.is_empty() {
        text.push_str("the connection failed");
    }
    text
}

/// The same, for one of the operating system.
pub(crate) fn io(error: std::io::Error) -> Error {
    translate(error.into())
}

pub(crate) fn unavailable(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, message)
}

pub(crate) fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, message)
}
