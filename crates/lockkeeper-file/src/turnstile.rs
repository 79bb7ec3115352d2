//! Blocks new readers while a writer waits for the current ones.
//!
//! Overlapping readers would starve a writer, since the lock is never free. So a writer that waits for readers takes the
//! *turnstile*, an exclusive lock on a second file, and new readers wait while it is taken. It is a
//! `flock` like the lock itself, and ends with its process.
//!
//! Only writers that wait for readers use it. An uncontended writer does not touch it, and a reader makes
//! one more system call to find that the file is missing. The writer removes the file when it acquires the lock or gives up. The
//! file of a killed writer is not locked and blocks no reader; the next waiting writer or `gc` removes it.

use std::io;

use crate::dir::Dir;
use crate::error::locked;
use crate::lock_file::LockFile;
use crate::store::Store;

/// How often the file may be removed between opening and locking.
const MAX_REMOVED: u32 = 10;

/// A taken turnstile. Dropping it removes the file.
#[derive(Debug)]
pub(crate) struct Turnstile {
    /// Holds the lock.
    _file: LockFile,
    store: Store,
    name: String,
}

impl Turnstile {
    /// Takes the turnstile. Returns `None` if another writer has it, or a reader is checking it.
    pub(crate) fn take(store: &Store, name: &str) -> io::Result<Option<Self>> {
        for _ in 0..MAX_REMOVED {
            let opened = store.dir.make(name)?;
            if !locked(opened.file.try_lock())? {
                return Ok(None);
            }
            if store.dir.id_of(name)? == Some(opened.id()) {
                let (store, name) = (store.clone(), name.to_owned());
                return Ok(Some(Self { _file: opened.file, store, name }));
            }
        }
        Ok(None)
    }

    /// Returns whether a writer has the turnstile.
    pub(crate) fn is_taken(dir: &Dir, name: &str) -> io::Result<bool> {
        match dir.find(name)? {
            Some(opened) => Ok(!locked(opened.file.try_lock_shared())?),
            None => Ok(false),
        }
    }
}

impl Drop for Turnstile {
    fn drop(&mut self) {
        // Removed while it is locked: a writer that has opened it finds that it is no longer in place.
        let _ = self.store.dir.remove(&self.name);
    }
}
