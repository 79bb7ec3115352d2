//! Inspection of the directory, breaking of locks, and garbage collection.

use std::fs;
use std::io;
use std::time::Duration;

use lockkeeper_core::{BoxFuture, Inspector, Kind, LockInfo, Mode, Name, Participant, Result};

use crate::dir::Dir;
use crate::error::{found, locked, unavailable};
use crate::lock_file::LockFile;
use crate::names::{self, FileName};
use crate::record::{self, Record, Records};
use crate::store::{Store, poll_until};

/// How long the holder of a broken lock has to release it before the next claim can acquire it.
const GRACE: Duration = Duration::from_secs(1);

impl Store {
    /// Removes the files of idle locks: see [`File::gc`](crate::File::gc).
    pub(crate) async fn gc(&self) -> Result<usize> {
        let mut removed = 0;
        let dir = &self.dir;
        for file in self.files().map_err(unavailable)? {
            let Some(inspecting) = self.lock_for_inspection().await? else { break };
            if names::is_temporary(&file) {
                // Inspection creates it while it holds the lock that this holds now, so its creator has died.
                found(dir.remove(&file)).map_err(unavailable)?;
            } else if names::is_turnstile(&file) {
                // Left by a writer that was killed. The turnstile of a live writer is locked, and stays.
                remove_idle(dir, &file).map_err(unavailable)?;
            } else if names::parse(&file) != FileName::Other {
                removed += usize::from(remove_idle(dir, &file).map_err(unavailable)?);
            }
            // Between two files, other tasks and other processes can proceed.
            drop(inspecting);
            tokio::task::yield_now().await;
        }
        Ok(removed)
    }
}

fn remove_idle(dir: &Dir, name: &str) -> io::Result<bool> {
    let Some(opened) = dir.find(name)? else { return Ok(false) };
    if !locked(opened.file.try_lock())? {
        return Ok(false);
    }
    // The fences of a new file start at the current time, so a file whose fence is ahead of the clock must stay.
    let last = Records::read(&opened.file)?.last;
    if last.is_some_and(|last| last.fence.get() >= record::now()) {
        return Ok(false);
    }
    let is_in_place = dir.id_of(name)? == Some(opened.id());
    // Removed while it is locked: the next claim that locks this file finds that it is no longer in place.
    Ok(is_in_place && found(dir.remove(name))?.is_some())
}

impl Store {
    fn files(&self) -> io::Result<Vec<String>> {
        match found(self.reopen_dir())? {
            Some(()) => self.dir.files(),
            // The directory was removed, and no lock was acquired since.
            None => Ok(Vec::new()),
        }
    }

    /// Returns the name of the lock of a file, if it is a lock file.
    fn name_of(&self, file: &str) -> io::Result<Option<Name>> {
        let name = match names::parse(file) {
            FileName::Lock(name) => Some(name),
            FileName::HashedLock => match self.dir.find(file)? {
                Some(opened) => {
                    record::read_name(&opened.file)?.filter(|name| names::file_name(name) == file)
                }
                None => None,
            },
            FileName::Other => None,
        };
        Ok(name.map(Name::derived))
    }

    async fn inspect(&self, name: Name) -> Result<Option<LockInfo>> {
        let Some(_inspecting) = self.lock_for_inspection().await? else { return Ok(None) };
        let holder = holder(&self.dir, &names::file_name(&name)).map_err(unavailable)?;
        Ok(holder.map(|holder| LockInfo {
            name,
            kind: Kind::Lock,
            holders: vec![holder],
            waiters: Vec::new(),
        }))
    }

    async fn break_hold(&self, name: &Name) -> Result<usize> {
        let Some(inspecting) = self.lock_for_inspection().await? else { return Ok(0) };
        let Some((old, new)) = self.replace(name).map_err(unavailable)? else { return Ok(0) };
        drop(inspecting);
        // inotify notifies the holder. Until it has closed the old file, the new one stays locked.
        poll_until(GRACE, || locked(old.try_lock())).await.map_err(unavailable)?;
        drop(new);
        Ok(1)
    }

    /// Replaces the file of a held lock with a new, locked one.
    fn replace(&self, name: &Name) -> io::Result<Option<(LockFile, LockFile)>> {
        let (dir, file) = (&self.dir, names::file_name(name));
        match dir.find(&file)? {
            Some(probe) if mode_of(&probe.file)?.is_some() => {}
            _ => return Ok(None),
        }
        // Opened again, because the probe may hold a shared lock beside the readers.
        let Some(old) = dir.find(&file)?.map(|opened| opened.file) else { return Ok(None) };
        let beside = names::temporary();
        let new = dir.make_new(&beside)?;
        let made = fill(&new, &old, name).and_then(|()| dir.rename(&beside, &file));
        if let Err(error) = made {
            let _ = found(dir.remove(&beside));
            return Err(error);
        }
        // Again: another claim may have acquired the old file before it was replaced. From now on no claim can.
        carry_over(&old, &new)?;
        Ok(Some((old, new)))
    }
}

/// Locks a new file and copies the name and the last record into it.
fn fill(new: &fs::File, old: &fs::File, name: &Name) -> io::Result<()> {
    if !locked(new.try_lock())? {
        return Err(io::Error::other(
            "another process has locked the file that replaces the broken one",
        ));
    }
    if names::is_hashed(&names::file_name(name)) {
        record::write_name(new, 0, name)?;
    }
    carry_over(old, new)
}

/// Copies the last record, so that the fences of the new file continue.
fn carry_over(old: &fs::File, new: &fs::File) -> io::Result<()> {
    let there = Records::read(new)?;
    match Records::read(old)?.last {
        Some(last) if there.last.as_ref() != Some(&last) => there.write(new, &last),
        _ => Ok(()),
    }
}

/// Returns how a file is locked. The caller may hold a shared lock afterwards, until the file is closed, and must hold the
/// lock for inspection.
fn mode_of(file: &fs::File) -> io::Result<Option<Mode>> {
    Ok(if locked(file.try_lock())? {
        None
    } else if locked(file.try_lock_shared())? {
        Some(Mode::Shared)
    } else {
        Some(Mode::Exclusive)
    })
}

/// Returns the holder of a file. The record counts only if the file is locked now.
fn holder(dir: &Dir, name: &str) -> io::Result<Option<Participant>> {
    let Some(file) = dir.find(name)?.map(|opened| opened.file) else { return Ok(None) };
    let Some(mode) = mode_of(&file)? else { return Ok(None) };
    let last = Records::read(&file)?.last;
    let fence = last.as_ref().map(|last| last.fence);
    Ok(Some(match last {
        Some(Record { owner, since, label, .. }) if mode == Mode::Exclusive => {
            let age = Some(Duration::from_micros(record::now().saturating_sub(since)));
            Participant {
                owner: Some(owner),
                label: Some(label),
                mode,
                fence,
                age,
                remaining: None,
            }
        }
        _ => {
            // Readers write no record, so neither their owners nor their number is known.
            Participant { owner: None, label: None, mode, fence, age: None, remaining: None }
        }
    }))
}

impl Inspector for Store {
    fn list(&self, prefix: &str) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let prefix = prefix.to_owned();
        Box::pin(async move {
            let mut infos = Vec::new();
            for file in self.files().map_err(unavailable)? {
                let name = self.name_of(&file).map_err(unavailable)?;
                if let Some(name) = name.filter(|name| name.starts_with(&prefix)) {
                    infos.extend(self.inspect(name).await?);
                    tokio::task::yield_now().await;
                }
            }
            infos.sort_by(|a, b| a.name.cmp(&b.name));
            Ok(infos)
        })
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let name = name.clone();
        Box::pin(async move { Ok(self.inspect(name).await?.into_iter().collect()) })
    }

    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let name = name.clone();
        Box::pin(async move { self.break_hold(&name).await })
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        // Never notifies: inspection closes files, so each one would trigger the next.
        Box::pin(std::future::pending())
    }
}
