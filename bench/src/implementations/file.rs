//! File locks: the plain recipe (`open`, `flock`, `close`) and `fd-lock`.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use self_cell::{MutBorrow, self_cell};
use tokio::task::spawn_blocking;

use crate::implementation::{
    Fut, Held, Implementation, Kind, Lock, LockFactory, Mode, Outcome, one_line,
};

struct FileFactory {
    path: PathBuf,
    method: Method,
}

#[derive(Clone, Copy)]
enum Method {
    Raw,
    FdLock,
}

const CAVEAT: &str = "each waiter blocks a thread";

pub(super) fn raw(dir: &Path) -> Implementation {
    let dir = FileFactory { path: dir.join("raw"), method: Method::Raw };
    let implementation = Implementation::new("raw open + flock + close", Kind::Raw, dir);
    Implementation { caveats: &[CAVEAT], max_tasks: crate::THREADS, ..implementation }
}

pub(super) fn fd_lock(dir: &Path) -> Implementation {
    let dir = FileFactory { path: dir.join("fd-lock"), method: Method::FdLock };
    let implementation = Implementation::new("fd-lock", Kind::Peer, dir);
    Implementation { caveats: &[CAVEAT], max_tasks: crate::THREADS, ..implementation }
}

impl LockFactory for FileFactory {
    fn lock(&self, key: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let lock = FileLock { path: self.path.join(key), method: self.method };
        Box::pin(async {
            std::fs::create_dir_all(&self.path).map_err(one_line)?;
            Ok(Box::new(lock) as Box<dyn Lock>)
        })
    }
}

struct FileLock {
    path: PathBuf,
    method: Method,
}

impl FileLock {
    fn open(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).open(&self.path)
    }
}

impl Lock for FileLock {
    fn acquire(&self, mode: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async move {
            let file = self.open().map_err(one_line)?;
            match self.method {
                Method::Raw => raw_lock(file, mode).await,
                Method::FdLock => fd_locked(file, mode).await,
            }
        })
    }
}

async fn raw_lock(file: File, mode: Mode) -> Outcome<Box<dyn Held>> {
    let tried = match mode {
        Mode::Exclusive => file.try_lock(),
        Mode::Shared => file.try_lock_shared(),
    };
    let file = match tried {
        Ok(()) => file,
        Err(TryLockError::Error(error)) => return Err(one_line(error)),
        Err(TryLockError::WouldBlock) => {
            let wait = move || {
                match mode {
                    Mode::Exclusive => file.lock(),
                    Mode::Shared => file.lock_shared(),
                }
                .map(|()| file)
            };
            spawn_blocking(wait).await.map_err(one_line)?.map_err(one_line)?
        }
    };
    Ok(Box::new(file) as Box<dyn Held>)
}

impl Held for File {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        drop(self);
        Box::pin(async { Ok(()) })
    }
}

enum Guard<'a> {
    Write(
        #[expect(dead_code, reason = "held until it is dropped")]
        fd_lock::RwLockWriteGuard<'a, File>,
    ),
    Read(
        #[expect(dead_code, reason = "held until it is dropped")]
        fd_lock::RwLockReadGuard<'a, File>,
    ),
}

self_cell! {
    /// A held lock. The guard of `fd-lock` borrows its file.
    struct FdHeld {
        owner: MutBorrow<fd_lock::RwLock<File>>,
        #[not_covariant]
        dependent: Guard,
    }
}

async fn fd_locked(file: File, mode: Mode) -> Outcome<Box<dyn Held>> {
    let owner = MutBorrow::new(fd_lock::RwLock::new(file));
    let tried = FdHeld::try_new_or_recover(owner, |lock| {
        let lock = lock.borrow_mut();
        match mode {
            Mode::Exclusive => lock.try_write().map(Guard::Write),
            Mode::Shared => lock.try_read().map(Guard::Read),
        }
    });
    let held = match tried {
        Ok(held) => held,
        Err((owner, error)) if error.kind() == ErrorKind::WouldBlock => {
            let file = owner.into_inner();
            let wait = move || {
                FdHeld::try_new(MutBorrow::new(file), |lock| {
                    let lock = lock.borrow_mut();
                    match mode {
                        Mode::Exclusive => lock.write().map(Guard::Write),
                        Mode::Shared => lock.read().map(Guard::Read),
                    }
                })
            };
            spawn_blocking(wait).await.map_err(one_line)?.map_err(one_line)?
        }
        Err((_, error)) => return Err(one_line(error)),
    };
    Ok(Box::new(held) as Box<dyn Held>)
}

impl Held for FdHeld {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        drop(self);
        Box::pin(async { Ok(()) })
    }
}
