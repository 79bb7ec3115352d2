//! An open file that can be locked, and what identifies it.

use std::fs;
use std::ops::Deref;
use std::os::fd::OwnedFd;

/// A file that is locked now and then, and unlocked before it is closed.
///
/// Closing would do, if nobody else had it open. But while another thread starts a program, that has a copy
/// of every open file for a moment, between `fork` and `exec`, and the lock would stay with it.
#[derive(Debug)]
pub(crate) struct LockFile {
    file: fs::File,
    unlock: bool,
}

impl LockFile {
    pub(crate) fn new(file: OwnedFd) -> Self {
        Self { file: file.into(), unlock: true }
    }

    /// Closes without unlocking: programs that inherited the file keep the lock until they end.
    pub(crate) fn leave_to_programs(&mut self) {
        self.unlock = false;
    }
}

impl Deref for LockFile {
    type Target = fs::File;

    fn deref(&self) -> &fs::File {
        &self.file
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        if self.unlock {
            let _ = self.file.unlock();
        }
    }
}

/// Which file it is, whatever its name: its device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Id(u64, u64);

impl Id {
    /// From what `stat` says. (Not std's `metadata`, which asks for more and takes longer.)
    #[allow(
        clippy::unnecessary_cast,
        clippy::cast_sign_loss,
        reason = "other systems have other types"
    )]
    pub(crate) fn of(stat: &rustix::fs::Stat) -> Self {
        Self(stat.st_dev as u64, stat.st_ino as u64)
    }
}
