//! Errors of the driver as errors of the store: one line, and what to do.

use std::error::Error as _;

use lockkeeper_core::{Error, ErrorKind};
use tokio_postgres::error::SqlState;

/// Translates an error of the driver. The result never contains a password.
pub(crate) fn translate(error: tokio_postgres::Error) -> Error {
    let (kind, message) = if let Some(db) = error.as_db_error() {
        let (kind, advice) = classify(db.code());
        (kind, format!("{}{advice}", one_line(db.message())))
    } else {
        let message = with_causes(&error);
        (ErrorKind::Unavailable, format!("{}{}", one_line(&message), hint(&message)))
    };
    Error::new(kind, message).with_source(error)
}

/// Returns what the driver was doing, and the causes of its error.
fn with_causes(error: &tokio_postgres::Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    // The cause says it, and the address is added.
    if message == "error connecting to server"
        && let Some(inner) = cause
    {
        (message, cause) = (inner.to_string(), inner.source());
    }
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        cause = inner.source();
    }
    message
}

/// Returns the kind of a server's error, and what to do about it.
fn classify(code: &SqlState) -> (ErrorKind, &'static str) {
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
            ": another transaction waits for a lock that this one holds: roll back, and lock names in the same order \
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

/// Returns whether the server ended a wait because its time was over, or because it was cancelled.
pub(crate) fn is_wait_over(error: &tokio_postgres::Error) -> bool {
    matches!(error.code(), Some(&SqlState::LOCK_NOT_AVAILABLE | &SqlState::QUERY_CANCELED))
}

/// Returns whether the server ended a statement because it was cancelled.
pub(crate) fn is_cancelled(error: &Error) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<tokio_postgres::Error>());
    source.is_some_and(|source| source.code() == Some(&SqlState::QUERY_CANCELED))
}

/// Adds the address of the server that an error is about. Only an error of the server or the driver has a source.
pub(crate) fn at(address: &str, error: &Error) -> Error {
    let located = Error::new(error.kind(), format!("{address}: {error}"));
    if error.source().is_some() { located.with_source(error.clone()) } else { located }
}

pub(crate) fn unavailable(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Unavailable, message)
}

pub(crate) fn config(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Config, message)
}
