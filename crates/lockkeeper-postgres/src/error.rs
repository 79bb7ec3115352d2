//! Translates errors of the driver into errors of the store: one line each, with advice.

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

/// Returns the message of an error with those of its causes.
fn with_causes(error: &tokio_postgres::Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    // The cause says why, and the caller adds the address.
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

/// Returns the kind of an error that the server sent, and advice.
fn classify(code: &SqlState) -> (ErrorKind, &'static str) {
    match *code {
        SqlState::INVALID_PASSWORD | SqlState::INVALID_AUTHORIZATION_SPECIFICATION => {
            (ErrorKind::Config, ": check the user and the password in the URL")
        }
        SqlState::INVALID_CATALOG_NAME => {
            (ErrorKind::Config, ": create the database, or name another in the URL")
        }
        SqlState::INSUFFICIENT_PRIVILEGE => {
            (ErrorKind::Config, ": grant the privilege to this role")
        }
        SqlState::OUT_OF_MEMORY => (
            ErrorKind::Unavailable,
            ": the lock table of the server is full: hold fewer locks, or raise its \
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
        ": set sslrootcert to the certificate of the authority, or turn TLS off with sslmode=disable"
    } else if message.contains("password missing") {
        ": the server requires a password, and the URL has none"
    } else {
        ""
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns whether the server ended a wait because of `lock_timeout` or a cancel request.
pub(crate) fn is_wait_over(error: &tokio_postgres::Error) -> bool {
    matches!(error.code(), Some(&SqlState::LOCK_NOT_AVAILABLE | &SqlState::QUERY_CANCELED))
}

/// Returns whether the server ended a statement because of a cancel request.
pub(crate) fn is_cancelled(error: &Error) -> bool {
    code(error) == Some(&SqlState::QUERY_CANCELED)
}

/// Returns the code of an error that the server sent.
pub(crate) fn code(error: &Error) -> Option<&SqlState> {
    error.source()?.downcast_ref::<tokio_postgres::Error>()?.code()
}

/// Adds the address of the server to an error. An error with a source, which comes from the server or the driver, keeps it.
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
