//! A claim: an open file, locked or not.

use std::io;
use std::pin::pin;
use std::time::Duration;

use lockkeeper_core::{
    Attempt, BoxFuture, Change, Claim, ClaimSpec, Error, ErrorKind, Fence, Grant, Holder,
    LossReason, Mode, Release, Renewal, Result, Retry,
};
use tokio::time::Instant;

use crate::error::{locked, unavailable};
use crate::lock_file::{Id, LockFile};
use crate::names;
use crate::notify::Listener;
use crate::record::{self, Record, Records};
use crate::store::{MAX_INSPECTION, Store};
use crate::turnstile::Turnstile;

/// How often the file may be removed between opening and locking before the attempt fails.
const MAX_REMOVED: u32 = 1000;
/// How long a reader waits for the writer that has the turnstile to acquire a free lock. That writer's process may be stopped.
const WRITER_GRACE: Duration = Duration::from_millis(50);
/// The same without notifications. The engine polls at least every half second.
const POLLING_WRITER_GRACE: Duration = Duration::from_secs(1);

/// The claim of one owner on one file.
///
/// The file is opened by the first attempt and stays open until the release. Each claim therefore excludes other claims of
/// its process. A waiter that closed the file after each attempt would notify all other waiters, and they would
/// notify it.
///
/// A file may be removed or replaced at any time. So a lock counts only if its file is the one at the
/// path *after* it was locked and written to. A process that removes an idle file locks it
/// first, and a process that replaces a held one reads its fence afterwards.
///
/// A writer that waits for readers blocks new ones: see [`Turnstile`].
///
/// Inspection and `gc` lock files, too, and hold a lock on the directory meanwhile. A failed try takes that lock, which
/// excludes both, and repeats its attempt. So inspection never makes a try fail.
pub(crate) struct FileClaim {
    store: Store,
    spec: ClaimSpec,
    file_name: String,
    /// Blocks new readers while this writer waits for readers. Dropped before the file is closed, which notifies
    /// the waiting readers.
    turnstile: Option<Turnstile>,
    file: Option<Open>,
    /// The grant, while the claim holds the lock.
    held: Option<Grant>,
    /// The lowest fence that the next grant may have.
    floor: Option<Fence>,
    listener: Option<Listening>,
    /// When a reader began to wait for the writer that has the turnstile. Reset by each notification of a release.
    behind_writer: Option<Instant>,
    /// Whether that reader found other readers holding the lock. It then listens and needs no timer: it retries when one of
    /// them releases.
    readers_hold: bool,
    /// When a try became undecided because another process inspects the directory.
    undecided: Option<Instant>,
}

struct Open {
    file: LockFile,
    id: Id,
}

/// A subscription to the events of the claim's file.
struct Listening {
    listener: Listener,
    id: Id,
    /// The number of events at the last attempt; `None` if the claim did not listen then.
    seen: Option<u64>,
}

impl FileClaim {
    pub(crate) fn new(store: Store, spec: ClaimSpec) -> Self {
        let file_name = names::file_name(&spec.name);
        Self {
            store,
            spec,
            file_name,
            turnstile: None,
            file: None,
            held: None,
            floor: None,
            listener: None,
            behind_writer: None,
            readers_hold: false,
            undecided: None,
        }
    }

    fn close(&mut self) -> Option<Grant> {
        self.listener = None;
        self.behind_writer = None;
        self.turnstile = None;
        // Also unlocks it.
        self.file = None;
        self.held.take()
    }

    /// Returns whether the claim's file is still the one at its path.
    fn is_in_place(&self) -> io::Result<bool> {
        match &self.file {
            Some(open) => Ok(self.store.dir.id_of(&self.file_name)? == Some(open.id)),
            None => Ok(false),
        }
    }

    /// Returns whether the claim still holds the lock.
    fn is_still_held(&mut self) -> io::Result<bool> {
        if self.held.is_some() && !self.is_in_place()? {
            if let Some(open) = self.file.as_mut().filter(|_| self.store.inherit) {
                // `Store::break_hold` waits for the programs that inherited the file.
                open.file.leave_locked();
            }
            self.close();
        }
        Ok(self.held.is_some())
    }

    /// Tries to acquire the lock once. Returns `None` if other claims hold it.
    fn try_acquire(&mut self) -> io::Result<Option<Grant>> {
        self.raise_fence()?;
        if self.is_still_held()? {
            return Ok(self.held);
        }
        let grant = self.lock();
        if grant.is_err() {
            self.close();
        }
        grant
    }

    fn lock(&mut self) -> io::Result<Option<Grant>> {
        for _ in 0..MAX_REMOVED {
            self.open_in_place()?;
            if self.yields_to_writer()? || !(self.try_lock()? || self.blocks_readers()?) {
                return Ok(None);
            }
            let fence = self.fence()?;
            if self.is_in_place()? {
                let grant = Grant { fence, fence_is_past: false, valid_for: None };
                self.held = Some(grant);
                self.turnstile = None;
                return Ok(Some(grant));
            }
        }
        Err(io::Error::other("another process keeps removing the lock file"))
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

    /// Returns whether a reader must wait because a writer waits for other readers.
    ///
    /// If the lock is free, a try acquires it, and so does a waiting reader after the writer's grace time. To
    /// find out, the reader takes the exclusive lock, which [`try_lock`](Self::try_lock) then converts to a shared one.
    fn yields_to_writer(&mut self) -> io::Result<bool> {
        if self.spec.mode != Mode::Shared {
            return Ok(false);
        }
        // The turnstile is for fairness only, so errors count as "not taken".
        let turnstile = names::turnstile_of(&self.file_name);
        let readers_held = std::mem::take(&mut self.readers_hold);
        if !Turnstile::is_taken(&self.store.dir, &turnstile).unwrap_or(false) {
            self.behind_writer = None;
            return Ok(false);
        }
        let now = Instant::now();
        if self.has_new_events() || readers_held {
            // A holder may have released the lock, and the writer may not have been notified yet.
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
        self.readers_hold = self.listener.is_some();
        Ok(true)
    }

    fn writer_grace(&self) -> Duration {
        if self.listener.is_some() { WRITER_GRACE } else { POLLING_WRITER_GRACE }
    }

    /// Takes the turnstile if this is a waiting writer and readers hold the lock. Returns whether the writer acquired the
    /// lock itself.
    fn blocks_readers(&mut self) -> io::Result<bool> {
        let Some(open) = self.file.as_ref().filter(|_| self.is_waiting_writer()) else {
            return Ok(false);
        };
        if self.turnstile.is_some() || !locked(open.file.try_lock_shared())? {
            return Ok(false);
        }
        // Readers hold the lock, or just released it. Another waiter may be refused because of this shared lock. It is
        // still notified: when this claim releases the exclusive lock, or when the remaining reader closes its file.
        if locked(open.file.try_lock())? {
            return Ok(true);
        }
        // On Linux a failed conversion loses the original lock (flock(2)); other systems may keep it.
        open.file.unlock()?;
        let turnstile = names::turnstile_of(&self.file_name);
        self.turnstile = Turnstile::take(&self.store, &turnstile).ok().flatten();
        Ok(false)
    }

    fn is_waiting_writer(&self) -> bool {
        self.held.is_none() && self.spec.queue && self.spec.mode != Mode::Shared
    }

    /// Returns the fence of a lock that was just acquired, and writes the record if it is exclusive.
    fn fence(&self) -> io::Result<Option<Fence>> {
        let Some(open) = self.file.as_ref().filter(|_| self.store.fence) else { return Ok(None) };
        let records = Records::read(&open.file)?;
        if self.spec.mode == Mode::Shared {
            // Several readers may hold the lock, so they do not write. They get the fence of the last writer.
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

    /// Raises the fence of a hold to the floor, if it is below.
    fn raise_fence(&mut self) -> io::Result<()> {
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

    /// Makes an attempt for a claim that does not wait. It is never refused because of a process that inspects the lock.
    fn try_once(&mut self) -> io::Result<Attempt> {
        if let Some(grant) = self.try_acquire()? {
            return Ok(Attempt::Granted(grant));
        }
        if let Some(_blocked) = self.store.block_inspection()? {
            self.undecided = None;
            return Ok(self.try_acquire()?.map_or(CONTENDED, Attempt::Granted));
        }
        let since = *self.undecided.get_or_insert_with(Instant::now);
        Ok(if since.elapsed() < MAX_INSPECTION { Attempt::Undecided } else { CONTENDED })
    }

    /// Makes an attempt for a claim that waits. If the answer is "contended", the claim has listened since before the
    /// file was found locked.
    fn attempt_or_listen(&mut self) -> io::Result<Attempt> {
        let events = self.events();
        let mut grant = self.try_acquire()?;
        let mut retry = Retry::OnNotify;
        if grant.is_none() && self.store.watcher.is_some() {
            match (self.is_listening(), self.listen()) {
                (true, Ok(())) => self.set_seen(events),
                (_, Err(_)) => retry = Retry::Poll,
                (false, Ok(())) => {
                    let events = self.events();
                    grant = self.try_acquire()?;
                    self.set_seen(events);
                }
            }
        }
        if let Some(grant) = grant {
            return Ok(Attempt::Granted(grant));
        }
        if let (Some(since), false, Retry::OnNotify) =
            (self.behind_writer, self.readers_hold, retry)
        {
            retry = Retry::After(self.writer_grace().saturating_sub(since.elapsed()));
        }
        Ok(Attempt::Contended { retry, holder: Holder::Unknown })
    }

    /// Returns whether the claim listens to its open file.
    fn is_listening(&self) -> bool {
        let open = self.file.as_ref().map(|open| open.id);
        self.listener
            .as_ref()
            .is_some_and(|listening| Some(listening.id) == open && !listening.listener.has_ended())
    }

    /// Starts to listen to the open file.
    fn listen(&mut self) -> io::Result<()> {
        let (Some(open), Some(watcher)) = (&self.file, &self.store.watcher) else {
            return Err(io::ErrorKind::Unsupported.into());
        };
        if !self.is_listening() {
            self.listener = None;
            let listener = watcher.listen(&self.store.dir.path_of(&self.file_name))?;
            self.listener = Some(Listening { listener, id: open.id, seen: None });
        }
        Ok(())
    }

    fn events(&self) -> Option<u64> {
        self.listener.as_ref().map(|listening| listening.listener.events().count())
    }

    /// Records the number of events before an attempt.
    fn set_seen(&mut self, events: Option<u64>) {
        if let Some(listening) = &mut self.listener {
            listening.seen = events;
        }
    }

    /// Returns whether the file had events since the last attempt.
    fn has_new_events(&self) -> bool {
        let seen = self.listener.as_ref().and_then(|listening| listening.seen);
        seen.is_some() && seen != self.events()
    }

    /// Waits for an event. A waiting claim may do so before its first attempt.
    async fn wait(&mut self) -> Change {
        loop {
            let was_listening = self.listener.is_some();
            let listening = match self.open_unless_held() {
                Ok(()) => self.listen(),
                failed => failed,
            };
            match listening {
                Ok(()) => {}
                // The file was removed, or the watcher has ended. The next attempt handles both.
                Err(error) if was_listening || error.kind() == io::ErrorKind::NotFound => {
                    return Change::LookAgain;
                }
                Err(_) => return std::future::pending().await,
            }
            let Some(listening) = &mut self.listener else { return Change::LookAgain };
            let events = listening.listener.events().clone();
            let mut notified = pin!(events.notified());
            // From here on no event is missed.
            notified.as_mut().enable();
            if listening.listener.has_ended() {
                continue;
            }
            if self.held.is_some() {
                // The next renewal reports an error.
                if let Ok(false) = self.is_still_held() {
                    return Change::Lost(LossReason::Broken);
                }
            } else {
                let count = events.count();
                let seen = listening.seen.replace(count);
                let is_new = if self.spec.queue { seen.is_some() } else { true };
                if is_new && seen != Some(count) {
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
    if store.fence && names::is_hashed(file_name) {
        let length = u64::try_from(opened.stat.st_size).unwrap_or(0);
        record::write_name(&opened.file, length, &spec.name)?;
    }
    Ok(Open { id: opened.id(), file: opened.file })
}

impl Claim for FileClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        self.floor = floor;
        let answer = if self.spec.queue { self.attempt_or_listen() } else { self.try_once() };
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
        let error = Error::new(ErrorKind::Unsupported, "a lock on a file cannot be downgraded");
        Box::pin(std::future::ready(Err(error)))
    }

    fn set_fence(&mut self, _fence: Fence) {}

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        // A file without links was removed or replaced. Closing it releases the lock in any case.
        let stat = self.file.as_ref().map(|open| rustix::fs::fstat(&*open.file));
        let removed = matches!(stat, Some(Ok(stat)) if stat.st_nlink == 0);
        let held = self.close().is_some() && !removed;
        if held && self.store.inherit {
            // Programs that inherited the file still have it open, so the close notified no waiter. Opening and closing it does.
            let _ = self.store.dir.find(&self.file_name);
        }
        let answer = if held { Release::Released } else { Release::WasNotHeld };
        Box::pin(std::future::ready(Ok(answer)))
    }
}
