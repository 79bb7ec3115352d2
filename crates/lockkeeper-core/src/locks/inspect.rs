//! Looking into a store: who holds, who waits, what changes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::blocking_runtime::block_on;
use crate::contract::{Inspector, Kind, LockInfo, Participant};
use crate::engine::context::KeeperContext;
use crate::error::{Error, Result};
use crate::name::Name;

/// How often to look even if the store tells nothing.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A look into a keeper's store. From [`Keeper::inspect`](crate::Keeper::inspect).
///
/// # Examples
///
/// ```
/// # use lockkeeper_core as lockkeeper;
/// use lockkeeper::{Keeper, Memory};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// let keeper = Keeper::new(Memory::new());
/// let _guard = keeper.mutex("orders/42").label("billing").lock().await?;
///
/// for lock in keeper.inspect()?.list("orders/").await? {
///     println!("{} is held by {}", lock.name, lock.holders[0].who());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Inspect {
    context: Arc<KeeperContext>,
}

impl Inspect {
    pub(crate) fn new(context: Arc<KeeperContext>) -> Result<Self> {
        match context.backend.inspector() {
            Some(_) => Ok(Self { context }),
            None => Err(Error::unsupported("way to be looked into")),
        }
    }

    fn inspector(&self) -> &dyn Inspector {
        self.context.backend.inspector().expect("a backend that had an inspector has it still")
    }

    /// Every lock and semaphore whose name starts with `prefix` and that is held or awaited, sorted by
    /// name.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer;
    /// [`Unsupported`](crate::ErrorKind::Unsupported) for a prefix that is not empty, on a store that does not know
    /// the names of other processes' locks (PostgreSQL keeps hashes).
    pub async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let listed = self.inspector().list(prefix).await;
        listed.map_err(|error| error.during(self.context.backend.name(), "list"))
    }

    /// What is known of one name: nothing, a lock, a semaphore, or one of each.
    ///
    /// # Errors
    ///
    /// [`InvalidName`](crate::ErrorKind::InvalidName), or
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer.
    pub async fn show(&self, name: impl Into<Arc<str>>) -> Result<Vec<LockInfo>> {
        self.show_name(&Name::new(name)?).await
    }

    pub(crate) async fn show_name(&self, name: &Name) -> Result<Vec<LockInfo>> {
        let shown = self.inspector().show(name).await;
        shown.map_err(|error| error.at(self.context.backend.name(), "show", name))
    }

    /// Takes a name away from all who hold it, and says how many those were.
    ///
    /// This is an exception to what a [`Guard`](crate::Guard) guarantees. The store frees the lock first and tells its holder
    /// afterwards, so the next waiter may enter some milliseconds before the old holder's guard reports the loss, or
    /// much earlier if the old holder is stopped or cannot be reached. The file store waits up to a second for the old
    /// holder to let go. Only the [fence](crate::Guard::fence) orders the two: use this for a holder that is known to be dead
    /// or stuck, or where writes are fenced.
    ///
    /// # Errors
    ///
    /// As [`show`](Self::show).
    pub async fn break_lock(&self, name: impl Into<Arc<str>>) -> Result<usize> {
        let name = Name::new(name)?;
        let broken = self.inspector().break_lock(&name).await;
        broken.map_err(|error| error.at(self.context.backend.name(), "break", &name))
    }

    /// Watches what changes among the names that start with `prefix`, from now on.
    ///
    /// It looks whenever the store tells that something changed, and once a second. What comes and
    /// goes between two looks is not seen.
    ///
    /// # Errors
    ///
    /// As [`list`](Self::list).
    pub async fn watch(&self, prefix: &str) -> Result<Watch> {
        let seen = sightings(self.list(prefix).await?);
        Ok(Watch { inspect: self.clone(), prefix: prefix.into(), seen, events: VecDeque::new() })
    }

    /// Returns every lock and semaphore whose name starts with `prefix`. Does what [`list`](Self::list) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`list`](Self::list).
    pub fn blocking_list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        block_on(self.list(prefix))
    }

    /// Returns what is known of one name. Does what [`show`](Self::show) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`show`](Self::show).
    pub fn blocking_show(&self, name: impl Into<Arc<str>>) -> Result<Vec<LockInfo>> {
        block_on(self.show(name))
    }

    /// Takes a name away from all that hold it. Does what [`break_lock`](Self::break_lock) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`break_lock`](Self::break_lock).
    pub fn blocking_break_lock(&self, name: impl Into<Arc<str>>) -> Result<usize> {
        block_on(self.break_lock(name))
    }

    /// Watches what changes from now on. Does what [`watch`](Self::watch) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`watch`](Self::watch).
    pub fn blocking_watch(&self, prefix: &str) -> Result<Watch> {
        block_on(self.watch(prefix))
    }

    /// Looks until there is something to tell: whenever the store tells of a change, and once a second.
    pub(crate) async fn until<T>(
        &self,
        mut look: impl AsyncFnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        loop {
            // Listening begins before looking, so that nothing falls in between.
            let mut changed = self.inspector().changed();
            let listening = std::future::poll_fn(|cx| {
                std::task::Poll::Ready(changed.as_mut().poll(cx).is_ready())
            });
            let already = listening.await;
            if let Some(seen) = look().await? {
                return Ok(seen);
            }
            if !already {
                tokio::select! {
                    () = changed => {}
                    () = tokio::time::sleep(LOOK_EVERY) => {}
                }
            }
        }
    }
}

/// What happened to a lock, as [`Inspect::watch`] saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Event {
    /// The name of the lock.
    pub name: Name,
    /// Which of the name's two things.
    pub kind: Kind,
    /// What happened.
    pub what: EventKind,
    /// Who it was.
    pub who: Participant,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum EventKind {
    /// Began to wait.
    Queued,
    /// Stopped waiting without getting it.
    Left,
    /// Got it.
    Acquired,
    /// Has it no more.
    Freed,
}

/// The holders and waiters that a look has found, by lock and owner.
type Sightings = BTreeMap<(Name, Kind, String), (Role, Participant)>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Waiter,
    Holder,
}

fn sightings(infos: Vec<LockInfo>) -> Sightings {
    let mut seen = Sightings::new();
    for LockInfo { name, kind, holders, waiters } in infos {
        let waiters = waiters.into_iter().map(|participant| (Role::Waiter, participant));
        let holders = holders.into_iter().map(|participant| (Role::Holder, participant));
        // A holder may still have a place in the queue for a moment: the hold counts.
        for (role, participant) in waiters.chain(holders) {
            let who =
                participant.owner.map_or(participant.who().to_owned(), |owner| owner.to_string());
            seen.insert((name.clone(), kind, who), (role, participant));
        }
    }
    seen
}

/// A watch on a store. From [`Inspect::watch`].
#[derive(Debug)]
pub struct Watch {
    inspect: Inspect,
    prefix: String,
    seen: Sightings,
    events: VecDeque<Event>,
}

impl Watch {
    /// Waits for the next event.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer. It may be called
    /// again, and goes on from what was seen last.
    ///
    /// # Cancel safety
    ///
    /// If dropped, no event is lost.
    pub async fn next(&mut self) -> Result<Event> {
        let Self { inspect, prefix, seen, events } = self;
        if let Some(event) = events.pop_front() {
            return Ok(event);
        }
        inspect
            .until(async || {
                let now = sightings(inspect.list(prefix).await?);
                if now_differs(events, seen, &now) {
                    *seen = now;
                }
                Ok(events.pop_front())
            })
            .await
    }

    /// Blocks until the next event. Does what [`next`](Self::next) does, in
    /// [blocking code](crate::blocking).
    ///
    /// # Errors
    ///
    /// As [`next`](Self::next).
    pub fn blocking_next(&mut self) -> Result<Event> {
        block_on(self.next())
    }
}

/// Adds what happened between two looks; true if anything did.
fn now_differs(events: &mut VecDeque<Event>, before: &Sightings, now: &Sightings) -> bool {
    let mut add = |(name, kind, _): &(Name, Kind, String), what, who: &Participant| {
        events.push_back(Event { name: name.clone(), kind: *kind, what, who: who.clone() });
    };
    // Those who go first, so that a lock is seen to be free before the next has it.
    for (key, (was, who)) in before {
        match (was, now.get(key).map(|(is, _)| is)) {
            (Role::Holder, None | Some(Role::Waiter)) => add(key, EventKind::Freed, who),
            (Role::Waiter, None) => add(key, EventKind::Left, who),
            (Role::Holder, Some(Role::Holder)) | (Role::Waiter, Some(_)) => {}
        }
    }
    for (key, (is, who)) in now {
        match (before.get(key).map(|(was, _)| was), is) {
            (None | Some(Role::Waiter), Role::Holder) => add(key, EventKind::Acquired, who),
            (None, Role::Waiter) => add(key, EventKind::Queued, who),
            (Some(_), _) => {}
        }
    }
    !events.is_empty()
}
