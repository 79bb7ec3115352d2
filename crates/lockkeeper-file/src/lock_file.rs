//! An open file that can be locked, and its identity.

use std::fs;
use std::ops::Deref;
use std::os::fd::OwnedFd;

/// A file that is unlocked before it is closed.
///
/// Closing alone would leave it locked while another thread starts a program: between `fork` and `exec`, the child
/// has a copy of every open file.
#[derive(Debug)]
pub(crate) struct LockFile {
    file: fs::File,
    unlock: bool,
}

impl LockFile {
    pub(crate) fn new(file: OwnedFd) -> Self {
        Self { file: file.into(), unlock: true }
    }

    /// Makes the drop close the file without unlocking it. Programs that inherited the file keep the lock until they end.
    pub(crate) fn leave_locked(&mut self) {
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

/// The identity of a file: its device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Id(u64, u64);

impl Id {
    /// Takes a `stat` result. std's `metadata` calls `statx`, which is slower.
    #[allow(
        clippy::unnecessary_cast,
        clippy::cast_sign_loss,
        reason = "other systems have other types"
    )]
    pub(crate) fn of(stat: &rustix::fs::Stat) -> Self {
        Self(stat.st_dev as u64, stat.st_ino as u64)
    }
}
