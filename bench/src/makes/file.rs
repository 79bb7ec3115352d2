//! Locked files by hand (`open`, `flock`, `close`), and by `fd-lock`.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use self_cell::{MutBorrow, self_cell};
use tokio::task::spawn_blocking;

use crate::make::{Fut, Held, Kind, Lock, Make, Mode, Outcome, Source, told};

struct Dir {
    path: PathBuf,
    way: Way,
}

#[derive(Clone, Copy)]
enum Way {
    Raw,
    FdLock,
}

const CAVEAT: &str = "waits in a thread of its own, which blocks";

pub(super) fn raw(dir: &Path) -> Make {
    let dir = Dir { path: dir.join("raw"), way: Way::Raw };
    let make = Make::new("raw open + flock + close", Kind::Raw, dir);
    Make { caveats: &[CAVEAT], most_tasks: crate::THREADS, ..make }
}

pub(super) fn fd_lock(dir: &Path) -> Make {
    let dir = Dir { path: dir.join("fd-lock"), way: Way::FdLock };
    let make = Make::new("fd-lock", Kind::Peer, dir);
    Make { caveats: &[CAVEAT], most_tasks: crate::THREADS, ..make }
}

impl Source for Dir {
    fn lock(&self, key: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let lock = FileLock { path: self.path.join(key), way: self.way };
        Box::pin(async {
            std::fs::create_dir_all(&self.path).map_err(told)?;
            Ok(Box::new(lock) as Box<dyn Lock>)
        })
    }
}

struct FileLock {
    path: PathBuf,
    way: Way,
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
            let file = self.open().map_err(told)?;
            match self.way {
                Way::Raw => raw_lock(file, mode).await,
                Way::FdLock => fd_locked(file, mode).await,
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
        Err(TryLockError::Error(error)) => return Err(told(error)),
        Err(TryLockError::WouldBlock) => {
            let wait = move || {
                match mode {
                    Mode::Exclusive => file.lock(),
                    Mode::Shared => file.lock_shared(),
                }
                .map(|()| file)
            };
            spawn_blocking(wait).await.map_err(told)?.map_err(told)?
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
    Write(#[expect(dead_code, reason = "it is held")] fd_lock::RwLockWriteGuard<'a, File>),
    Read(#[expect(dead_code, reason = "it is held")] fd_lock::RwLockReadGuard<'a, File>),
}

self_cell! {
    /// A guard of theirs borrows its file.
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
            spawn_blocking(wait).await.map_err(told)?.map_err(told)?
        }
        Err((_, error)) => return Err(told(error)),
    };
    Ok(Box::new(held) as Box<dyn Held>)
}

impl Held for FdHeld {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        drop(self);
        Box::pin(async { Ok(()) })
    }
}
