//! Keeps new readers out while a writer waits for those inside.
//!
//! Readers that overlap would starve a writer, since the lock is never free. So a waiting writer that finds readers
//! inside takes the *turnstile*, an exclusive lock on a second file, and readers do not enter while it is taken. It is a
//! `flock` like the lock itself: it ends with the process that has it.
//!
//! Only writers that wait behind readers use it. An uncontended writer does not touch it, and a reader that finds
//! no such file makes one system call more. The writer removes the file when it leaves. A file that a killed
//! writer leaves behind is not locked and stops no reader; the next writer that waits removes it, or `gc`.

use std::io;
use std::sync::Arc;

use crate::dir::{Dir, id_at};
use crate::error::locked;
use crate::lock_file::LockFile;

/// How often a file may be removed between being opened and being locked.
const MAX_REMOVED: u32 = 10;

/// The turnstile, taken by a waiting writer until this is dropped.
#[derive(Debug)]
pub(crate) struct Turnstile {
    /// Held for its lock.
    _file: LockFile,
    dir: Arc<Dir>,
    name: String,
}

impl Turnstile {
    /// Takes the turnstile; `None` if another writer has it, or a reader is just looking at it.
    pub(crate) fn take(dir: &Arc<Dir>, name: &str) -> io::Result<Option<Self>> {
        for _ in 0..MAX_REMOVED {
            let opened = dir.make(name)?;
            if !locked(opened.file.try_lock())? {
                return Ok(None);
            }
            if id_at(&dir.path().join(name))? == Some(opened.id()) {
                let (dir, name) = (dir.clone(), name.to_owned());
                return Ok(Some(Self { _file: opened.file, dir, name }));
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
        // Removed while it is locked, so that a writer that opened it meanwhile notices.
        let _ = self.dir.remove(&self.name);
    }
}
