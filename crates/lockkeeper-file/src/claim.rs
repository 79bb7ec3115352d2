//! A claim: an open file, locked or not.

use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::time::{Duration, Instant};

use lockkeeper_core::{
    Attempt, BoxFuture, Change, Claim, ClaimSpec, Error, ErrorKind, Fence, Grant, Holder,
    LossReason, Mode, Release, Renewal, Result, Retry,
};

use crate::backend::{Id, LockFile, PATIENCE, Store, locked, unavailable};
use crate::dir::id_at;
use crate::line::Place;
use crate::names;
use crate::record::{self, Record, Records};
use crate::turnstile::Turnstile;
use crate::watch::{Listener, Wake};

/// How often the file of a claim may be removed under its hands before it says so.
const MOST_REMOVED: u32 = 1000;
/// How long a reader leaves a free lock to a writer that has the turnstile: its process may be stopped.
const WRITER_GRACE: Duration = Duration::from_millis(50);
/// The same where nothing tells the writer that the lock is free. The engine polls at least every half second.
const POLLING_WRITER_GRACE: Duration = Duration::from_secs(1);

/// The way of one owner to one file.
///
/// Its file is opened with the first attempt and stays open until the release. So each claim has a lock
/// of its own, also against others of its process; and a waiter that looks again does not close the file,
/// which would wake all the other waiters, and they it.
///
/// A file may be removed or replaced at any time. So a lock counts only if its file is the one at the
/// path *after* it was locked and written to: whoever removes a file that is not locked has locked it
/// before, and whoever replaces one that is reads its fence afterwards.
///
/// A writer that waits for readers keeps new ones out: see [`Turnstile`].
///
/// Those who lock a file only to look at it or to tidy up hold a lock on the directory meanwhile. A try
/// that fails keeps them out and tries once more, so that it is never refused because of them.
pub(crate) struct FileClaim {
    store: Store,
    spec: ClaimSpec,
    file_name: String,
    path: PathBuf,
    /// While it waits for readers to leave: keeps new ones out. Dropped before the file is closed, since that wakes
    /// the readers that wait for it.
    turnstile: Option<Turnstile>,
    file: Option<Open>,
    /// What it was granted, for as long as it holds.
    held: Option<Grant>,
    /// Not lower than this is any fence that it is granted.
    floor: Option<Fence>,
    listener: Option<Listening>,
    /// While it waits to have the lock for itself: its place among those of this process who do.
    place: Option<Place>,
    /// For how long it leaves the lock to another of this process, whose turn it was when it last looked. It must look
    /// again after that: nobody else may.
    left_to_another: Option<Duration>,
    /// Since when a reader has waited for a writer that has the turnstile, without hearing that a holder has left.
    behind_writer: Option<tokio::time::Instant>,
    /// Whether that reader found readers inside, and listens: it looks again when one of them leaves, and needs no timer.
    readers_inside: bool,
}

struct Open {
    file: LockFile,
    id: Id,
}

/// Hears of the claim's file.
struct Listening {
    listener: Listener,
    id: Id,
    /// How often it had rung when the claim asked last; `None` if the claim did not listen yet.
    heard: Option<u64>,
}

impl FileClaim {
    pub(crate) fn new(store: Store, spec: ClaimSpec) -> Self {
        let file_name = names::file_name(&spec.name);
        let path = store.dir.path().join(&file_name);
        Self {
            store,
            spec,
            file_name,
            path,
            turnstile: None,
            file: None,
            held: None,
            floor: None,
            listener: None,
            place: None,
            left_to_another: None,
            behind_writer: None,
            readers_inside: false,
        }
    }

    fn close(&mut self) -> Option<Grant> {
        self.listener = None;
        self.behind_writer = None;
        self.turnstile = None;
        // That unlocks it, too.
        self.file = None;
        // After that: it may call the next.
        self.place = None;
        self.held.take()
    }

    /// Whether the claim's file is still the one at its path.
    fn is_in_place(&self) -> io::Result<bool> {
        match &self.file {
            Some(open) => Ok(id_at(&self.path)? == Some(open.id)),
            None => Ok(false),
        }
    }

    /// Looks whether the hold is still there.
    fn still_held(&mut self) -> io::Result<bool> {
        if self.held.is_some() && !self.is_in_place()? {
            if let Some(open) = self.file.as_mut().filter(|_| self.store.inherit) {
                // The process that broke the lock waits for them: see `throw_out`.
                open.file.leave_to_programs();
            }
            self.close();
        }
        Ok(self.held.is_some())
    }

    /// Asks once: `None` if others hold it.
    fn ask(&mut self) -> io::Result<Option<Grant>> {
        self.raise()?;
        if self.still_held()? {
            return Ok(self.held);
        }
        let asked = self.lock();
        if asked.is_err() {
            self.close();
        }
        asked
    }

    fn lock(&mut self) -> io::Result<Option<Grant>> {
        for _ in 0..MOST_REMOVED {
            if self.file.is_some() && !self.is_in_place()? {
                self.close();
                // The directory may have been removed or replaced, too.
                self.store.refresh_dir()?;
            }
            self.open()?;
            self.left_to_another = self.left_to_another();
            if self.left_to_another.is_some() {
                return Ok(None);
            }
            if self.yields_to_writer()? || !(self.try_lock()? || self.keeps_readers_out()?) {
                if let Some(place) = &self.place {
                    place.came_in_vain();
                }
                return Ok(None);
            }
            let fence = self.fence()?;
            if self.is_in_place()? {
                let grant = Grant { fence, valid_for: None };
                self.held = Some(grant);
                self.turnstile = None;
                if let Some(place) = self.place.take() {
                    place.served();
                }
                return Ok(Some(grant));
            }
        }
        Err(io::Error::other("the lock file is removed again and again"))
    }

    /// Opens the claim's file, unless it is open.
    fn open(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            let open = self.file.insert(open(&self.file_name, &self.store, &self.spec)?);
            if self.store.inherit {
                rustix::io::fcntl_setfd(&*open.file, rustix::io::FdFlags::empty())?;
            }
        }
        Ok(())
    }

    fn try_lock(&self) -> io::Result<bool> {
        let Some(open) = &self.file else { return Ok(false) };
        locked(match self.spec.mode {
            Mode::Shared => open.file.try_lock_shared(),
            Mode::Exclusive | Mode::Permits { .. } => open.file.try_lock(),
        })
    }

    /// Whether a reader has to wait, since a writer waits for the readers inside to leave.
    ///
    /// A reader that finds nobody inside may enter if it does not wait, or if the writer has not come for a while. To
    /// find out it takes the exclusive lock, which [`try_lock`](Self::try_lock) then turns into a shared one.
    fn yields_to_writer(&mut self) -> io::Result<bool> {
        if self.spec.mode != Mode::Shared {
            return Ok(false);
        }
        // Fairness only: where a turnstile cannot be opened there is none.
        let turnstile = names::turnstile_of(&self.file_name);
        self.readers_inside = false;
        if !Turnstile::is_taken(&self.store.dir, &turnstile).unwrap_or(false) {
            self.behind_writer = None;
            return Ok(false);
        }
        let now = tokio::time::Instant::now();
        let since = *self.behind_writer.get_or_insert(now);
        if self.spec.queue && now - since < self.writer_grace() {
            return Ok(true);
        }
        let Some(open) = &self.file else { return Ok(true) };
        if locked(open.file.try_lock())? {
            return Ok(false);
        }
        self.behind_writer = Some(now);
        self.readers_inside = self.listener.is_some();
        Ok(true)
    }

    fn writer_grace(&self) -> Duration {
        if self.listener.is_some() { WRITER_GRACE } else { POLLING_WRITER_GRACE }
    }

    /// Takes the turnstile if this is a writer that waits and there are readers inside. Returns whether the
    /// writer got the lock itself meanwhile.
    fn keeps_readers_out(&mut self) -> io::Result<bool> {
        let Some(open) = self.file.as_ref().filter(|_| self.waits_alone()) else {
            return Ok(false);
        };
        if self.turnstile.is_some() || !locked(open.file.try_lock_shared())? {
            return Ok(false);
        }
        // Readers are inside, or were a moment ago. Another waiter that was refused because of the shared lock misses
        // nothing: either this claim has the lock now, or a reader has it whose close will wake that waiter.
        if locked(open.file.try_lock())? {
            return Ok(true);
        }
        // On Linux a conversion that fails gives the lock up (flock(2)); other systems may keep it.
        open.file.unlock()?;
        let turnstile = names::turnstile_of(&self.file_name);
        self.turnstile = Turnstile::take(&self.store.dir, &turnstile).ok().flatten();
        Ok(false)
    }

    /// Whether it waits to have the lock for itself.
    fn waits_alone(&self) -> bool {
        self.held.is_none() && self.spec.queue && self.spec.mode != Mode::Shared
    }

    /// Gets in line with others of this process who wait for the same.
    fn get_in_line(&mut self) {
        let Some(open) = self.file.as_ref().filter(|_| self.waits_alone()) else { return };
        if self.place.as_ref().is_none_or(|place| place.id != open.id) {
            self.place = Some(self.store.lines.join(open.id));
        }
    }

    /// For how long it should leave the lock to another of this process, whose turn it is.
    fn left_to_another(&self) -> Option<Duration> {
        let open = self.file.as_ref().filter(|_| self.waits_alone())?;
        self.store.lines.left_to_another(open.id, self.place.as_ref())
    }

    /// The fence of a lock that was just had, written down if it is exclusive.
    fn fence(&self) -> io::Result<Option<Fence>> {
        let Some(open) = self.file.as_ref().filter(|_| self.store.fence) else { return Ok(None) };
        let records = Records::read(&open.file)?;
        if self.spec.mode == Mode::Shared {
            // Readers must not write, as there may be several: they have the last writer's.
            let last = records.last.as_ref().map(|last| last.fence);
            return Ok(last.or_else(|| Fence::new(record::now())).max(self.floor));
        }
        let fence = records.next_fence(self.floor)?;
        records.write(&open.file, &self.record(fence, record::now()))?;
        Ok(Some(fence))
    }

    fn record(&self, fence: Fence, since: u64) -> Record {
        Record { fence, owner: self.spec.owner, since, label: self.spec.label.clone() }
    }

    /// Lifts the fence of a hold to the floor, if it is below.
    fn raise(&mut self) -> io::Result<()> {
        let (Some(held), Some(open)) = (self.held, &self.file) else { return Ok(()) };
        let Some(floor) = self.floor.filter(|floor| held.fence.is_some_and(|fence| fence < *floor))
        else {
            return Ok(());
        };
        if self.spec.mode != Mode::Shared {
            let records = Records::read(&open.file)?;
            records.check_floor(self.floor)?;
            let since = records.last.as_ref().map_or_else(record::now, |last| last.since);
            records.write(&open.file, &self.record(floor, since))?;
        }
        self.held = Some(Grant { fence: Some(floor), ..held });
        Ok(())
    }

    /// As [`ask`](Self::ask), for a try: never refused because of somebody who only looks.
    async fn try_once(&mut self) -> io::Result<Option<Grant>> {
        let asked = self.ask()?;
        if asked.is_some() || self.spec.queue {
            return Ok(asked);
        }
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if let Some(_kept_out) = self.store.bystanders_kept_out()? {
                return self.ask();
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(None)
    }

    /// Starts to listen to the file, if that can be.
    fn listen(&mut self) -> io::Result<()> {
        let (Some(open), Some(watcher)) = (&self.file, &self.store.watcher) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        let stale = |listening: &Listening| listening.id != open.id || listening.listener.is_deaf();
        if self.listener.as_ref().is_none_or(stale) {
            self.listener = None;
            let listener = watcher.listen(&self.path)?;
            self.listener = Some(Listening { listener, id: open.id, heard: None });
        }
        Ok(())
    }

    fn rings(&self) -> Option<u64> {
        self.listener.as_ref().map(|listening| listening.listener.bell().rings())
    }

    /// Whether there is something to tell. Called only after it was made sure that the next ring is heard.
    fn look(&mut self) -> Option<Change> {
        // What fails here is told by the next attempt or renewal.
        if self.held.is_some() {
            return matches!(self.still_held(), Ok(false))
                .then_some(Change::Lost(LossReason::Broken));
        }
        if self.spec.queue {
            return match self.ask() {
                Ok(granted) => granted.map(Change::Granted),
                // It may be free: the engine asks again, and again after a pause if that fails too.
                Err(_) => Some(Change::LookAgain),
            };
        }
        let heard = self.listener.as_ref().and_then(|listening| listening.heard);
        (heard.is_none() || heard != self.rings()).then_some(Change::LookAgain)
    }

    async fn wait(&mut self) -> Change {
        loop {
            self.get_in_line();
            let listened = self.listener.is_some();
            match self.listen() {
                Ok(()) => {}
                // The file was removed under its hands.
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Change::LookAgain,
                // It has become deaf: the next attempt says so, and how long to wait then.
                Err(_) if listened => return Change::LookAgain,
                Err(_) => break,
            }
            let Some(listening) = &self.listener else { break };
            let bell = listening.listener.bell().clone();
            let mut rung = pin!(bell.rung(if self.waits_alone() { Wake::One } else { Wake::All }));
            rung.as_mut().enable();
            if listening.listener.is_deaf() {
                continue;
            }
            if let Some(change) = self.look() {
                if let Some(listening) = &mut self.listener {
                    listening.heard = Some(bell.rings());
                }
                return change;
            }
            // The look may have found another file at the path.
            let file = self.file.as_ref().map(|open| open.id);
            if file == self.listener.as_ref().map(|listening| listening.id) {
                let has_left = tokio::select! {
                    () = rung => true,
                    () = self.turn() => false,
                };
                if let Some(since) = self.behind_writer.as_mut().filter(|_| has_left) {
                    // A holder has left: now the writer may come.
                    *since = tokio::time::Instant::now();
                    self.readers_inside = false;
                }
            }
        }
        self.turn().await;
        Change::LookAgain
    }

    /// Waits until its turn has come, or that of another is over.
    async fn turn(&self) {
        let called = async {
            match &self.place {
                Some(place) => place.called().await,
                None => std::future::pending().await,
            }
        };
        let since = self.behind_writer.filter(|_| !self.readers_inside);
        let grace = since.map(|since| self.writer_grace().saturating_sub(since.elapsed()));
        match self.left_to_another.or(grace) {
            Some(left) => {
                let _ = tokio::time::timeout(left, called).await;
            }
            None => called.await,
        }
    }
}

fn open(file_name: &str, store: &Store, spec: &ClaimSpec) -> io::Result<Open> {
    let opened = store.make(file_name)?;
    if store.fence && names::is_cut(file_name) {
        let length = u64::try_from(opened.stat.st_size).unwrap_or(0);
        record::write_name(&opened.file, length, &spec.name)?;
    }
    Ok(Open { id: opened.id(), file: opened.file })
}

impl Claim for FileClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        self.floor = floor;
        Box::pin(async move {
            let rings = self.rings();
            let asked = self.try_once().await;
            if let Some(listening) = &mut self.listener {
                listening.heard = rings;
            }
            if let Some(grant) = asked.map_err(unavailable)? {
                return Ok(Attempt::Granted(grant));
            }
            // Whoever waits and cannot listen has to look.
            let deaf = self.spec.queue && self.store.watcher.is_some() && self.listen().is_err();
            let retry = if deaf { Retry::Poll } else { Retry::OnNotify };
            Ok(Attempt::Contended { retry, holder: Holder::Unknown })
        })
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(self.wait())
    }

    fn renew(&mut self, _ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        let held = self.still_held();
        let lost = Renewal::Lost(LossReason::Broken);
        let answer = held.map(|held| if held { Renewal::Held } else { lost });
        Box::pin(std::future::ready(answer.map_err(unavailable)))
    }

    fn downgrade(&mut self, _ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        let error = Error::new(ErrorKind::Unsupported, "a locked file has no downgrade");
        Box::pin(std::future::ready(Err(error)))
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        // A file without a name was removed or replaced. Whatever it is, closing frees it.
        let stat = self.file.as_ref().map(|open| rustix::fs::fstat(&*open.file));
        let removed = matches!(stat, Some(Ok(stat)) if stat.st_nlink == 0);
        let id = self.file.as_ref().map(|open| open.id);
        let held = self.close().is_some() && !removed;
        if held && self.store.inherit {
            // Programs that inherited the file have it open still, so that close woke no waiter. This one does.
            let _ = self.store.dir.find(&self.file_name);
        }
        if let Some(id) = id.filter(|_| held) {
            self.store.lines.call(id);
        }
        let answer = if held { Release::Released } else { Release::WasNotHeld };
        Box::pin(std::future::ready(Ok(answer)))
    }
}

#[cfg(test)]
mod tests;
