//! What went wrong, in one line, and what to do about it.

use std::error::Error as _;

use lockkeeper_core::{Error, ErrorKind};
use tokio_postgres::error::SqlState;

/// An error of the driver, as ours. It never has a password in it.
pub(crate) fn translate(error: tokio_postgres::Error) -> Error {
    let (kind, message) = if let Some(db) = error.as_db_error() {
        let (kind, advice) = judge(db.code());
        (kind, format!("{}{advice}", one_line(db.message())))
    } else {
        let message = with_causes(&error);
        (ErrorKind::Unavailable, format!("{}{}", one_line(&message), hint(&message)))
    };
    Error::new(kind, message).with_source(error)
}

/// What the driver was doing, and what happened.
fn with_causes(error: &tokio_postgres::Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        cause = inner.source();
    }
    message
}

/// Which kind an error of the server is, and what to do.
fn judge(code: &SqlState) -> (ErrorKind, &'static str) {
    match *code {
        SqlState::INVALID_PASSWORD | SqlState::INVALID_AUTHORIZATION_SPECIFICATION => {
            (ErrorKind::Config, ": check the user and the password in the URL")
        }
        SqlState::INVALID_CATALOG_NAME => {
            (ErrorKind::Config, ": create the database, or name another in the URL")
        }
        SqlState::INSUFFICIENT_PRIVILEGE => (ErrorKind::Config, ": grant it to this role"),
        SqlState::OUT_OF_MEMORY => (
            ErrorKind::Unavailable,
            ": the server has no room for more locks: hold fewer, or raise its \
             max_locks_per_transaction",
        ),
        SqlState::T_R_DEADLOCK_DETECTED => (
            ErrorKind::Unavailable,
            ": another waits for what this one holds: roll back, and lock names in the same order \
             everywhere",
        ),
        SqlState::TOO_MANY_CONNECTIONS => (
            ErrorKind::Unavailable,
            ": raise the server's max_connections, or lower the one in the URL",
        ),
        _ => (ErrorKind::Unavailable, ""),
    }
}

fn hint(message: &str) -> &'static str {
    if message.contains("invalid peer certificate") {
        ": name the authority's certificate with sslrootcert=, or do without TLS by sslmode=disable"
    } else if message.contains("password missing") {
        ": the server wants a password, and the URL has none"
    } else {
        ""
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether the server gave a wait up: its time was over, or it was told to.
pub(crate) fn gave_up(error: &tokio_postgres::Error) -> bool {
    matches!(error.code(), Some(&SqlState::LOCK_NOT_AVAILABLE | &SqlState::QUERY_CANCELED))
}

/// Whether the server ended a statement because it was told to.
pub(crate) fn is_cancelled(error: &Error) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<tokio_postgres::Error>());
    source.is_some_and(|source| source.code() == Some(&SqlState::QUERY_CANCELED))
}

pub(crate) fn unavailable(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, message)
}

pub(crate) fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, message)
}
