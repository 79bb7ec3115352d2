//! A look into the directory: who holds, whom to throw out, what to tidy up.

use std::fs;
use std::io;
use std::time::Duration;

use lockkeeper_core::{BoxFuture, Inspector, Kind, LockInfo, Mode, Name, Participant, Result};

use crate::dir::{Dir, id_at};
use crate::error::{found, locked, unavailable};
use crate::lock_file::LockFile;
use crate::names::{self, Told};
use crate::record::{self, Record, Records};
use crate::store::{Store, eventually};

/// How long a holder whose lock is broken has to let go before the next one enters.
const GRACE: Duration = Duration::from_secs(1);

impl Store {
    /// Removes the files of idle locks: see [`File::gc`](crate::File::gc).
    pub(crate) async fn gc(&self) -> Result<usize> {
        let mut removed = 0;
        let dir = &self.dir;
        for file in self.files().map_err(unavailable)? {
            let Some(bystander) = self.as_bystander().await? else { break };
            if names::is_temporary(&file) {
                // Made by one who held what we hold now, and died.
                found(dir.remove(&file)).map_err(unavailable)?;
            } else if names::is_turnstile(&file) {
                // Left by a waiting writer that was killed.
                remove_idle(dir, &file).map_err(unavailable)?;
            } else if names::told_by(&file) != Told::Nothing {
                removed += usize::from(remove_idle(dir, &file).map_err(unavailable)?);
            }
            // Between two files others have their turn, in this process and in the directory.
            drop(bystander);
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
    // The next file's fences begin with the time. One that is ahead of it would be forgotten.
    let last = Records::read(&opened.file)?.last;
    if last.is_some_and(|last| last.fence.get() >= record::now()) {
        return Ok(false);
    }
    let is_in_place = id_at(&dir.path().join(name))? == Some(opened.id());
    // Unlinked while it is locked: whoever gets this lock next finds that it is no longer in place.
    Ok(is_in_place && found(dir.remove(name))?.is_some())
}

impl Store {
    fn files(&self) -> io::Result<Vec<String>> {
        match found(self.reopen_dir())? {
            Some(()) => self.dir.files(),
            // Nobody has had a lock since it was removed.
            None => Ok(Vec::new()),
        }
    }

    /// The name of the lock that a file is of, if it is of one.
    fn name_of(&self, file: &str) -> io::Result<Option<Name>> {
        let name = match names::told_by(file) {
            Told::Name(name) => Some(name),
            Told::Cut => match self.dir.find(file)? {
                Some(opened) => {
                    record::read_name(&opened.file)?.filter(|name| names::file_name(name) == file)
                }
                None => None,
            },
            Told::Nothing => None,
        };
        Ok(name.map(Name::derived))
    }

    async fn look(&self, name: Name) -> Result<Option<LockInfo>> {
        let Some(_bystander) = self.as_bystander().await? else { return Ok(None) };
        let holder = holder(&self.dir, &names::file_name(&name)).map_err(unavailable)?;
        Ok(holder.map(|holder| LockInfo {
            name,
            kind: Kind::Lock,
            holders: vec![holder],
            waiters: Vec::new(),
        }))
    }

    async fn break_hold(&self, name: &Name) -> Result<usize> {
        let Some(bystander) = self.as_bystander().await? else { return Ok(0) };
        let Some((old, new)) = self.replace(name).map_err(unavailable)? else { return Ok(0) };
        drop(bystander);
        // The holder has been notified, if it listens. Until it has released, the new file stays locked.
        eventually(GRACE, || locked(old.try_lock())).await.map_err(unavailable)?;
        drop(new);
        Ok(1)
    }

    /// Puts a new, locked file in the place of one that is held.
    fn replace(&self, name: &Name) -> io::Result<Option<(LockFile, LockFile)>> {
        let (dir, file) = (&self.dir, names::file_name(name));
        match dir.find(&file)? {
            Some(probe) if mode_of(&probe.file)?.is_some() => {}
            _ => return Ok(None),
        }
        // Opened again, because the probe of a lock that readers hold has it, too.
        let Some(old) = dir.find(&file)?.map(|opened| opened.file) else { return Ok(None) };
        let beside = names::temporary();
        let new = dir.make_new(&beside)?;
        let made = fill(&new, &old, name).and_then(|()| dir.rename(&beside, &file));
        if let Err(error) = made {
            let _ = found(dir.remove(&beside));
            return Err(error);
        }
        // Once more: somebody may have got the old one before it was replaced. Nobody can any more.
        carry_over(&old, &new)?;
        Ok(Some((old, new)))
    }
}

/// Locks a new file and writes into it what the old one's successor has to know.
fn fill(new: &fs::File, old: &fs::File, name: &Name) -> io::Result<()> {
    if !locked(new.try_lock())? {
        return Err(io::Error::other("a file that was just made is locked"));
    }
    if names::is_cut(&names::file_name(name)) {
        record::write_name(new, 0, name)?;
    }
    carry_over(old, new)
}

/// Makes the fences of a new file go on where those of the old one are.
fn carry_over(old: &fs::File, new: &fs::File) -> io::Result<()> {
    let there = Records::read(new)?;
    match Records::read(old)?.last {
        Some(last) if there.last.as_ref() != Some(&last) => there.write(new, &last),
        _ => Ok(()),
    }
}

/// How a file is locked. Whoever asks may hold it shared until the file is closed, and must be a
/// bystander.
fn mode_of(file: &fs::File) -> io::Result<Option<Mode>> {
    Ok(if locked(file.try_lock())? {
        None
    } else if locked(file.try_lock_shared())? {
        Some(Mode::Shared)
    } else {
        Some(Mode::Exclusive)
    })
}

/// Who holds a file. Only a lock that somebody holds now counts, whatever is written in the file.
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
            // Readers leave no name: who they are, and how many, is not known.
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
                    infos.extend(self.look(name).await?);
                    tokio::task::yield_now().await;
                }
            }
            infos.sort_by(|a, b| a.name.cmp(&b.name));
            Ok(infos)
        })
    }

    fn show(&self, name: &Name) -> BoxFuture<'_, Result<Vec<LockInfo>>> {
        let name = name.clone();
        Box::pin(async move { Ok(self.look(name).await?.into_iter().collect()) })
    }

    fn break_lock(&self, name: &Name) -> BoxFuture<'_, Result<usize>> {
        let name = name.clone();
        Box::pin(async move { self.break_hold(&name).await })
    }

    fn changed(&self) -> BoxFuture<'_, ()> {
        // A look locks and closes files, so it would cause the next notice itself.
        Box::pin(std::future::pending())
    }
}
