//! From errors of the operating system to answers and errors of the store.

use std::fs::TryLockError;
use std::io;

use lockkeeper_core::{Error, ErrorKind};

/// `None` if there is no such file.
pub(crate) fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a lock was had.
pub(crate) fn locked(result: Result<(), TryLockError>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

pub(crate) fn unavailable(error: io::Error) -> Error {
    // A fence that was refused is an error of ours already.
    if let Some(refused) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        return refused.clone();
    }
    Error::new(ErrorKind::Unavailable, error.to_string()).with_source(error)
}
