//! Maps errors of the operating system to answers and errors of the store.

use std::fs::TryLockError;
use std::io;

use lockkeeper_core::{Error, ErrorKind};

/// Returns `None` if the file does not exist.
pub(crate) fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns whether the lock was acquired.
pub(crate) fn locked(result: Result<(), TryLockError>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

pub(crate) fn unavailable(error: io::Error) -> Error {
    // A rejected fence is already an `Error` of core.
    if let Some(refused) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        return refused.clone();
    }
    Error::new(ErrorKind::Unavailable, error.to_string()).with_source(error)
}
