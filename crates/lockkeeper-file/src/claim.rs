//! A claim: an open file, locked or not.

use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use lockkeeper_core::{
    Attempt, BoxFuture, Change, Claim, ClaimSpec, Error, ErrorKind, Fence, Grant, Holder,
    LossReason, Mode, Release, Renewal, Result, Retry,
};
use tokio::time::Instant;

use crate::dir::id_at;
use crate::error::{locked, unavailable};
use crate::lock_file::{Id, LockFile};
use crate::names;
use crate::notify::Listener;
use crate::record::{self, Record, Records};
use crate::store::{MAX_LOOK, Store};
use crate::turnstile::Turnstile;

/// How often the file of a claim may be removed between opening and locking before the attempt fails.
const MAX_REMOVED: u32 = 1000;
/// How long a reader leaves a free lock to a writer that has the turnstile: its process may be stopped.
const WRITER_GRACE: Duration = Duration::from_millis(50);
/// The same where the writer is not notified that the lock is free. The engine polls at least every half second.
const POLLING_WRITER_GRACE: Duration = Duration::from_secs(1);

/// The claim of one owner on one file.
///
/// The file is opened with the first attempt and stays open until the release. So each claim has a lock
/// of its own, also against others of its process; and a waiter that looks again does not close the file,
/// which would wake all other waiters, and they it.
///
/// A file may be removed or replaced at any time. So a lock counts only if its file is the one at the
/// path *after* it was locked and written to: a process that removes an idle file has locked it
/// before, and a process that replaces a held one reads its fence afterwards.
///
/// A writer that waits for readers keeps new ones out: see [`Turnstile`].
///
/// A process that locks a file only to inspect it or to tidy up holds a lock on the directory meanwhile. A try
/// that fails keeps such processes out and tries once more, so that it is never refused because of them.
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
    /// The lowest fence that it may be granted.
    floor: Option<Fence>,
    listener: Option<Listening>,
    /// Since when a reader has waited for a writer that has the turnstile, without a notice that a holder has left.
    behind_writer: Option<Instant>,
    /// That reader found readers inside, and listens: it asks again when one of them leaves, and needs no timer.
    readers_inside: bool,
    /// Since when a try could not be decided because another process inspects the directory.
    undecided: Option<Instant>,
}

struct Open {
    file: LockFile,
    id: Id,
}

/// Hears of changes to the claim's file.
struct Listening {
    listener: Listener,
    id: Id,
    /// The number of notices when the claim asked last; `None` if the claim did not listen yet.
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
            behind_writer: None,
            readers_inside: false,
            undecided: None,
        }
    }

    fn close(&mut self) -> Option<Grant> {
        self.listener = None;
        self.behind_writer = None;
        self.turnstile = None;
        // That unlocks it, too.
        self.file = None;
        self.held.take()
    }

    /// Whether the claim's file is still the one at its path.
    fn is_in_place(&self) -> io::Result<bool> {
        match &self.file {
            Some(open) => Ok(id_at(&self.path)? == Some(open.id)),
            None => Ok(false),
        }
    }

    /// Returns whether the hold is still there.
    fn is_still_held(&mut self) -> io::Result<bool> {
        if self.held.is_some() && !self.is_in_place()? {
            if let Some(open) = self.file.as_mut().filter(|_| self.store.inherit) {
                // The process that broke the lock waits for them: see `Store::break_hold`.
                open.file.leave_to_programs();
            }
            self.close();
        }
        Ok(self.held.is_some())
    }

    /// Asks once: `None` if others hold it.
    fn ask(&mut self) -> io::Result<Option<Grant>> {
        self.raise()?;
        if self.is_still_held()? {
            return Ok(self.held);
        }
        let asked = self.lock();
        if asked.is_err() {
            self.close();
        }
        asked
    }

    fn lock(&mut self) -> io::Result<Option<Grant>> {
        for _ in 0..MAX_REMOVED {
            self.open_in_place()?;
            if self.yields_to_writer()? || !(self.try_lock()? || self.keeps_readers_out()?) {
                return Ok(None);
            }
            let fence = self.fence()?;
            if self.is_in_place()? {
                let grant = Grant { fence, valid_for: None };
                self.held = Some(grant);
                self.turnstile = None;
                return Ok(Some(grant));
            }
        }
        Err(io::Error::other("the lock file is removed again and again"))
    }

    /// Opens the claim's file, unless it is open and still in place.
    fn open_in_place(&mut self) -> io::Result<()> {
        if self.file.is_some() && !self.is_in_place()? {
            self.close();
            // The directory may have been removed or replaced, too.
            self.store.refresh_dir()?;
        }
        self.open()
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

    /// Returns whether a reader has to wait, since a writer waits for the readers inside to leave.
    ///
    /// A reader that finds no one inside may enter if it does not wait, or if the writer has not come for a while. To
    /// find out it takes the exclusive lock, which [`try_lock`](Self::try_lock) then turns into a shared one.
    fn yields_to_writer(&mut self) -> io::Result<bool> {
        if self.spec.mode != Mode::Shared {
            return Ok(false);
        }
        // Fairness only: where a turnstile cannot be opened there is none.
        let turnstile = names::turnstile_of(&self.file_name);
        let readers_were_inside = std::mem::take(&mut self.readers_inside);
        if !Turnstile::is_taken(&self.store.dir, &turnstile).unwrap_or(false) {
            self.behind_writer = None;
            return Ok(false);
        }
        let now = Instant::now();
        if self.has_news() || readers_were_inside {
            // A holder may have left, and the notice of it may be on its way: now the writer may come.
            self.behind_writer = None;
        }
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
        let Some(open) = self.file.as_ref().filter(|_| self.is_waiting_writer()) else {
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

    fn is_waiting_writer(&self) -> bool {
        self.held.is_none() && self.spec.queue && self.spec.mode != Mode::Shared
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

    /// Asks for a claim that does not wait. It is never refused because of a process that only inspects the lock.
    fn try_once(&mut self) -> io::Result<Attempt> {
        if let Some(grant) = self.ask()? {
            return Ok(Attempt::Granted(grant));
        }
        if let Some(_kept_out) = self.store.keep_bystanders_out()? {
            self.undecided = None;
            return Ok(self.ask()?.map_or(CONTENDED, Attempt::Granted));
        }
        let since = *self.undecided.get_or_insert_with(Instant::now);
        Ok(if since.elapsed() < MAX_LOOK { Attempt::Undecided } else { CONTENDED })
    }

    /// Asks for a claim that waits. If the answer is "contended", the claim has listened since before the store was asked.
    fn ask_or_listen(&mut self) -> io::Result<Attempt> {
        let notices = self.notices();
        let mut asked = self.ask()?;
        let mut retry = Retry::OnNotify;
        if asked.is_none() && self.store.watcher.is_some() {
            match (self.is_listening(), self.listen()) {
                (true, Ok(())) => self.heard(notices),
                (_, Err(_)) => retry = Retry::Poll,
                (false, Ok(())) => {
                    let notices = self.notices();
                    asked = self.ask()?;
                    self.heard(notices);
                }
            }
        }
        if let Some(grant) = asked {
            return Ok(Attempt::Granted(grant));
        }
        if let (Some(since), false, Retry::OnNotify) =
            (self.behind_writer, self.readers_inside, retry)
        {
            retry = Retry::After(self.writer_grace().saturating_sub(since.elapsed()));
        }
        Ok(Attempt::Contended { retry, holder: Holder::Unknown })
    }

    /// Returns whether it listens to the file that it has open.
    fn is_listening(&self) -> bool {
        let open = self.file.as_ref().map(|open| open.id);
        self.listener
            .as_ref()
            .is_some_and(|listening| Some(listening.id) == open && !listening.listener.is_deaf())
    }

    /// Starts to listen to the file, if that is possible.
    fn listen(&mut self) -> io::Result<()> {
        let (Some(open), Some(watcher)) = (&self.file, &self.store.watcher) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        if !self.is_listening() {
            self.listener = None;
            let listener = watcher.listen(&self.path)?;
            self.listener = Some(Listening { listener, id: open.id, heard: None });
        }
        Ok(())
    }

    fn notices(&self) -> Option<u64> {
        self.listener.as_ref().map(|listening| listening.listener.bell().notices())
    }

    /// Remembers the notices that came before the claim asked.
    fn heard(&mut self, notices: Option<u64>) {
        if let Some(listening) = &mut self.listener {
            listening.heard = notices;
        }
    }

    /// Returns whether something has happened to the file since the claim last asked.
    fn has_news(&self) -> bool {
        let heard = self.listener.as_ref().and_then(|listening| listening.heard);
        heard.is_some() && heard != self.notices()
    }

    /// Waits for a notice. A claim that waits may do so before its first attempt.
    async fn wait(&mut self) -> Change {
        loop {
            let was_listening = self.listener.is_some();
            let listening = match self.open_unless_held() {
                Ok(()) => self.listen(),
                failed => failed,
            };
            match listening {
                Ok(()) => {}
                // The file was removed, or there are no more notices: the next attempt says what to do then.
                Err(error) if was_listening || error.kind() == io::ErrorKind::NotFound => {
                    return Change::LookAgain;
                }
                Err(_) => return std::future::pending().await,
            }
            let Some(listening) = &mut self.listener else { return Change::LookAgain };
            let bell = listening.listener.bell().clone();
            let mut notified = pin!(bell.notified());
            // From here on no notice is missed.
            notified.as_mut().enable();
            if listening.listener.is_deaf() {
                continue;
            }
            if self.held.is_some() {
                // An error is reported by the next renewal.
                if let Ok(false) = self.is_still_held() {
                    return Change::Lost(LossReason::Broken);
                }
            } else {
                let notices = bell.notices();
                let heard = listening.heard.replace(notices);
                let is_new = if self.spec.queue { heard.is_some() } else { true };
                if is_new && heard != Some(notices) {
                    return Change::LookAgain;
                }
            }
            notified.await;
        }
    }

    /// Opens the file of a claim that listens before its first attempt.
    fn open_unless_held(&mut self) -> io::Result<()> {
        if self.held.is_none() && self.spec.queue && self.file.is_none() {
            return self.open();
        }
        Ok(())
    }
}

const CONTENDED: Attempt = Attempt::Contended { retry: Retry::OnNotify, holder: Holder::Unknown };

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
        let answer = if self.spec.queue { self.ask_or_listen() } else { self.try_once() };
        Box::pin(std::future::ready(answer.map_err(unavailable)))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(self.wait())
    }

    fn renew(&mut self, _ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        let held = self.is_still_held();
        let lost = Renewal::Lost(LossReason::Broken);
        let answer = held.map(|held| if held { Renewal::Held } else { lost });
        Box::pin(std::future::ready(answer.map_err(unavailable)))
    }

    fn downgrade(&mut self, _ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        let error = Error::new(ErrorKind::Unsupported, "a locked file has no downgrade");
        Box::pin(std::future::ready(Err(error)))
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        // A file without a name was removed or replaced. In any case, closing frees it.
        let stat = self.file.as_ref().map(|open| rustix::fs::fstat(&*open.file));
        let removed = matches!(stat, Some(Ok(stat)) if stat.st_nlink == 0);
        let held = self.close().is_some() && !removed;
        if held && self.store.inherit {
            // Programs that inherited the file have it open still, so that close woke no waiter. This one does.
            let _ = self.store.dir.find(&self.file_name);
        }
        let answer = if held { Release::Released } else { Release::WasNotHeld };
        Box::pin(std::future::ready(Ok(answer)))
    }
}
