//! The directory of a store, which is checked when it is opened.
//!
//! Lock files are opened relative to the open directory and without following links, so that another user who can
//! write to the directory, or to one above it, cannot make this process write to a file elsewhere. Whether a file is
//! still in place is checked by its full path: of two processes that have different directories open, only one may hold
//! a lock.

use std::ffi::CStr;
use std::fmt;
use std::fs::{self, DirBuilder};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::path::Arg;

use crate::error::found;
use crate::lock_file::{Id, LockFile};
use crate::names::temporary;

const STICKY: u32 = 0o1000;
const OTHERS_WRITE: u32 = 0o022;

/// A directory or file that is not safe to use, with advice.
#[derive(Debug)]
pub(crate) struct Unsafe {
    pub(crate) what: String,
    pub(crate) advice: String,
}

impl fmt::Display for Unsafe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.advice)
    }
}

impl std::error::Error for Unsafe {}

impl From<Unsafe> for io::Error {
    fn from(reason: Unsafe) -> Self {
        io::Error::new(io::ErrorKind::InvalidInput, reason)
    }
}

/// An open file and its `fstat` result.
pub(crate) struct Opened {
    pub(crate) file: LockFile,
    pub(crate) stat: Stat,
}

impl Opened {
    pub(crate) fn id(&self) -> Id {
        Id::of(&self.stat)
    }
}

/// An open directory.
#[derive(Debug)]
pub(crate) struct Dir {
    path: PathBuf,
    open: RwLock<OwnedFd>,
}

impl Dir {
    /// Opens a directory, creates it with mode 0700 if it is missing, and checks that it is safe and writable.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        // Removes a trailing slash or dot, with which `lstat` would follow a link.
        let given: PathBuf = path.components().collect();
        check_link(&given)?;
        match fs::metadata(&given) {
            Ok(at_path) if !at_path.is_dir() => return Err(io::ErrorKind::NotADirectory.into()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => create(&given)?,
            Err(error) => return Err(error),
        }
        // Absolute: the process may change its working directory.
        let path = given.canonicalize()?;
        let open = open_checked(&path)?;
        check_unchanged(&given, &open)?;
        let dir = Self { path, open: RwLock::new(open) };
        let probe = temporary();
        dir.make_new(&probe)?;
        // A concurrent `gc` may have removed it already.
        let _ = dir.remove(&probe);
        Ok(dir)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of a file.
    pub(crate) fn path_of(&self, file: &str) -> PathBuf {
        let mut path = PathBuf::with_capacity(self.path.as_os_str().len() + 1 + file.len());
        path.extend([self.path.as_path(), Path::new(file)]);
        path
    }

    /// Returns the identity of the file at the path of `file`, without following a link.
    pub(crate) fn id_of(&self, file: &str) -> io::Result<Option<Id>> {
        // On the stack, because every uncontended lock makes this call.
        let mut path = [0; 512];
        let mut rest = &mut path[..];
        let mut write = |bytes| rest.write_all(bytes);
        let written = write(self.path.as_os_str().as_bytes())
            .and_then(|()| write(b"/"))
            .and_then(|()| write(file.as_bytes()));
        match CStr::from_bytes_until_nul(&path) {
            Ok(path) if written.is_ok() => id_at(path),
            _ => id_at(self.path_of(file)),
        }
    }

    fn fd(&self) -> RwLockReadGuard<'_, OwnedFd> {
        self.open.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reopens the directory if it was removed, moved or replaced, and creates it if it is missing. Returns whether it was
    /// reopened.
    pub(crate) fn refresh(&self) -> io::Result<bool> {
        match self.reopen() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                create(&self.path)?;
                self.reopen()
            }
            reopened => reopened,
        }
    }

    /// As [`refresh`](Self::refresh), but does not create the directory.
    ///
    /// # Errors
    ///
    /// `NotFound` if the directory is missing.
    pub(crate) fn reopen(&self) -> io::Result<bool> {
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        if id_at(&self.path)? == Some(Id::of(&rustix::fs::fstat(&*open)?)) {
            return Ok(false);
        }
        *open = open_checked(&self.path)?;
        let dir = self.path.display();
        tracing::warn!(%dir, "the lock directory was removed or replaced: reopened it");
        Ok(true)
    }

    /// Opens the directory again, to lock it.
    pub(crate) fn to_lock(&self) -> io::Result<LockFile> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(LockFile::new(rustix::fs::openat(&*self.fd(), ".", flags, Mode::empty())?))
    }

    /// Opens a lock file. Creates it if it is missing.
    ///
    /// # Errors
    ///
    /// `NotFound` if the directory itself was removed.
    pub(crate) fn make(&self, file: &str) -> io::Result<Opened> {
        self.open_file(file, OFlags::CREATE)
    }

    /// Creates a file.
    ///
    /// # Errors
    ///
    /// `AlreadyExists` if there is a file of that name.
    pub(crate) fn make_new(&self, file: &str) -> io::Result<LockFile> {
        self.open_file(file, OFlags::CREATE | OFlags::EXCL).map(|opened| opened.file)
    }

    /// Opens a lock file, if it exists.
    pub(crate) fn find(&self, file: &str) -> io::Result<Option<Opened>> {
        found(self.open_file(file, OFlags::empty()))
    }

    /// Opens a file for writing, because inotify reports `CLOSE_WRITE` only then. A new file has mode 0600. The file is
    /// closed on `exec`, and opening a FIFO does not block.
    fn open_file(&self, file: &str, flags: OFlags) -> io::Result<Opened> {
        let flags = flags
            | OFlags::RDWR
            | OFlags::CLOEXEC
            | OFlags::NOFOLLOW
            | OFlags::NONBLOCK
            | OFlags::NOCTTY;
        let mode = Mode::RUSR | Mode::WUSR;
        let opened = match rustix::fs::openat(&*self.fd(), file, flags, mode) {
            Ok(opened) => LockFile::new(opened),
            // FreeBSD returns `EMLINK` (open(2)).
            Err(Errno::LOOP | Errno::MLINK) => {
                return Err(self.not_ours(file, "is a symbolic link"));
            }
            Err(Errno::ISDIR) => return Err(self.not_ours(file, "is a directory")),
            Err(Errno::NXIO) => return Err(self.not_ours(file, "is not a regular file")),
            Err(error) => return Err(error.into()),
        };
        let stat = rustix::fs::fstat(&*opened)?;
        match objection_to_file(&stat) {
            Some(objection) => Err(self.not_ours(file, &objection)),
            None => Ok(Opened { file: opened, stat }),
        }
    }

    fn not_ours(&self, file: &str, objection: &str) -> io::Error {
        let dir = self.path.display();
        Unsafe {
            what: format!("\"{dir}/{file}\" {objection}"),
            advice: "remove it, and check who can write to the directory".to_owned(),
        }
        .into()
    }

    pub(crate) fn remove(&self, file: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&*self.fd(), file, AtFlags::empty())?)
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let dir = self.fd();
        Ok(rustix::fs::renameat(&*dir, from, &*dir, to)?)
    }

    /// Returns the names of all files that may be lock files, sorted. Skips names that are not UTF-8.
    pub(crate) fn files(&self) -> io::Result<Vec<String>> {
        let dir = self.fd();
        let mut files = Vec::new();
        for entry in rustix::fs::Dir::read_from(&*dir)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            let stat = rustix::fs::statat(&*dir, name, AtFlags::SYMLINK_NOFOLLOW);
            if let Some(stat) = found(stat.map_err(io::Error::from))?
                && objection_to_file(&stat).is_none()
            {
                files.push(name.to_owned());
            }
        }
        files.sort_unstable();
        Ok(files)
    }
}

/// Returns the identity of the file at a path, without following a link.
fn id_at(path: impl Arg) -> io::Result<Option<Id>> {
    Ok(found(rustix::fs::lstat(path).map_err(io::Error::from))?.map(|stat| Id::of(&stat)))
}

fn create(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn open_checked(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = rustix::fs::open(path, flags, Mode::empty())?;
    match objection_to_directory(&rustix::fs::fstat(&open)?, path) {
        Some(reason) => Err(reason.into()),
        None => Ok(open),
    }
}

/// Rejects a symbolic link of another user, who could point it at any directory.
fn check_link(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(link) if link.is_symlink() && !is_trusted(link.uid()) => Err(Unsafe {
            what: format!("it is a symbolic link that belongs to user {}", link.uid()),
            advice: "name the directory itself".to_owned(),
        }
        .into()),
        _ => Ok(()),
    }
}

/// Rejects a path that another user replaced by a link between [`check_link`] and the open. Only one `lstat` is made,
/// because two could return different files.
fn check_unchanged(path: &Path, open: &OwnedFd) -> io::Result<()> {
    let found = rustix::fs::lstat(path)?;
    let is_link = FileType::from_raw_mode(found.st_mode) == FileType::Symlink;
    let unchanged = if is_link {
        is_trusted(found.st_uid)
    } else {
        Id::of(&found) == Id::of(&rustix::fs::fstat(open)?)
    };
    if unchanged {
        return Ok(());
    }
    let what = "it was replaced while it was being opened".to_owned();
    Err(Unsafe { what, advice: "check who can write to the directory above it".to_owned() }.into())
}

/// Returns whether a user may own the files that this process relies on: its own user and root may.
pub(crate) fn is_trusted(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

/// Returns why other users can replace the lock files of a directory, if they can. Members of its group count as other
/// users.
fn objection_to_directory(stat: &Stat, path: &Path) -> Option<Unsafe> {
    let (owner, mode) = (stat.st_uid, mode_of(stat));
    let path = path.display();
    if !is_trusted(owner) {
        let user = rustix::process::geteuid().as_raw();
        return Some(Unsafe {
            what: format!("it belongs to user {owner}, who can replace lock files"),
            advice: format!("run `chown {user} {path}`, or use a directory of user {user}"),
        });
    }
    if mode & OTHERS_WRITE != 0 && mode & STICKY == 0 {
        let who = if mode & 0o002 == 0 { "its group" } else { "every user" };
        return Some(Unsafe {
            what: format!("{who} may write to it (mode {mode:04o}), and so replace lock files"),
            advice: format!(
                "run `chmod go-w {path}`, or `chmod +t {path}` if several users share it on purpose"
            ),
        });
    }
    None
}

/// Returns why a lock file is not safe, if it is not: a write would change a file elsewhere, or another user can change
/// its content.
fn objection_to_file(stat: &Stat) -> Option<String> {
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Some("is not a regular file".to_owned());
    }
    if stat.st_nlink > 1 {
        return Some(format!("has other names ({} hard links)", stat.st_nlink));
    }
    (!is_trusted(stat.st_uid)).then(|| format!("belongs to user {}", stat.st_uid))
}

/// Returns the permission bits, including set-id and sticky.
pub(crate) fn mode_of(stat: &Stat) -> u32 {
    #[allow(clippy::useless_conversion, reason = "other systems have other types")]
    let mode = u32::from(stat.st_mode);
    mode & 0o7777
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_and_files_of_root_and_this_user_are_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "").unwrap();
        let user = rustix::process::geteuid().as_raw();
        let mut directory = rustix::fs::stat(dir.path()).unwrap();
        let mut file = rustix::fs::stat(&path).unwrap();
        for (owner, trusted) in [(user, true), (0, true), (user + 1, false), (65_534, false)] {
            (directory.st_uid, file.st_uid) = (owner, owner);
            let objection = objection_to_directory(&directory, dir.path());
            assert_eq!(objection.is_none(), trusted, "{owner}: {objection:?}");
            let objection = objection_to_file(&file);
            assert_eq!(objection.is_none(), trusted, "{owner}: {objection:?}");
        }
    }
}
