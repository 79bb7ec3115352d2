//! Inspection of a store: holders, waiters and changes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::blocking_runtime::block_on;
use crate::contract::{Inspector, Kind, LockInfo, Participant};
use crate::engine::context::KeeperContext;
use crate::error::{Error, Result};
use crate::futures::at_once;
use crate::name::Name;

/// The poll interval if the store sends no notifications.
const POLL_EVERY: Duration = Duration::from_secs(1);

/// A view of the locks in a keeper's store. From [`Keeper::inspect`](crate::Keeper::inspect).
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
            None => Err(Error::unsupported("inspection").during(context.store, "inspect")),
        }
    }

    fn inspector(&self) -> &dyn Inspector {
        self.context.backend.inspector().expect("a backend keeps its inspector")
    }

    /// Returns all locks and semaphores that have a holder or a waiter and whose names start with `prefix`, sorted by
    /// name.
    ///
    /// # Errors
    ///
    /// - [`Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer.
    /// - [`Unsupported`](crate::ErrorKind::Unsupported) for a prefix that is not empty, if the store does not know the
    ///   names of other processes' locks (PostgreSQL, if its table of names cannot be used).
    pub async fn list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        let listed = self.inspector().list(prefix).await;
        listed.map_err(|error| error.during(self.context.store, "list"))
    }

    /// Returns the lock and the semaphore of one name, if they have a holder or a waiter.
    ///
    /// # Errors
    ///
    /// [`InvalidName`](crate::ErrorKind::InvalidName), or [`Unavailable`](crate::ErrorKind::Unavailable) if the store does
    /// not answer.
    pub async fn show(&self, name: impl Into<Arc<str>>) -> Result<Vec<LockInfo>> {
        self.show_name(&Name::new(name)?).await
    }

    pub(crate) async fn show_name(&self, name: &Name) -> Result<Vec<LockInfo>> {
        let shown = self.inspector().show(name).await;
        shown.map_err(|error| error.at(self.context.store, "show", name))
    }

    /// Revokes all holds of a name, and returns how many there were.
    ///
    /// This is an exception to the guarantees of a [`Guard`](crate::Guard). The store frees the lock before it notifies
    /// the old holder. The next waiter may acquire the lock some milliseconds before the old guard reports the loss, or much
    /// earlier if the old holder is stopped or unreachable. The file store waits up to a second for the old holder to
    /// release. Only the [fence](crate::Guard::fence) orders the two holders. Use it if the holder is known to be dead or
    /// stuck, or if writes are fenced.
    ///
    /// # Errors
    ///
    /// Same as [`show`](Self::show).
    pub async fn break_lock(&self, name: impl Into<Arc<str>>) -> Result<usize> {
        let name = Name::new(name)?;
        let broken = self.inspector().break_lock(&name).await;
        broken.map_err(|error| error.at(self.context.store, "break", &name))
    }

    /// Watches the names that start with `prefix` for changes from now on.
    ///
    /// The watch lists the store when the store notifies of a change, and once a second. A change that is reverted
    /// between two lists is not reported.
    ///
    /// # Errors
    ///
    /// Same as [`list`](Self::list).
    pub async fn watch(&self, prefix: &str) -> Result<Watch> {
        let seen = snapshot(self.list(prefix).await?);
        Ok(Watch { inspect: self.clone(), prefix: prefix.into(), seen, events: VecDeque::new() })
    }

    /// Returns all locks and semaphores whose names start with `prefix`. The [blocking](crate::blocking) form of
    /// [`list`](Self::list).
    ///
    /// # Errors
    ///
    /// Same as [`list`](Self::list).
    pub fn blocking_list(&self, prefix: &str) -> Result<Vec<LockInfo>> {
        block_on(self.list(prefix))
    }

    /// Returns the lock and the semaphore of one name. The [blocking](crate::blocking) form of [`show`](Self::show).
    ///
    /// # Errors
    ///
    /// Same as [`show`](Self::show).
    pub fn blocking_show(&self, name: impl Into<Arc<str>>) -> Result<Vec<LockInfo>> {
        block_on(self.show(name))
    }

    /// Revokes all holds of a name. The [blocking](crate::blocking) form of [`break_lock`](Self::break_lock).
    ///
    /// # Errors
    ///
    /// Same as [`break_lock`](Self::break_lock).
    pub fn blocking_break_lock(&self, name: impl Into<Arc<str>>) -> Result<usize> {
        block_on(self.break_lock(name))
    }

    /// Watches the names that start with `prefix`. The [blocking](crate::blocking) form of [`watch`](Self::watch).
    ///
    /// # Errors
    ///
    /// Same as [`watch`](Self::watch).
    pub fn blocking_watch(&self, prefix: &str) -> Result<Watch> {
        block_on(self.watch(prefix))
    }

    /// Calls `read` until it returns a value: now, when the store notifies of a change, and once a second.
    pub(crate) async fn until<T>(
        &self,
        mut read: impl AsyncFnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        loop {
            // Subscribes before the read, so that no change after the read is missed.
            let mut changed = self.inspector().changed();
            let already = at_once(&mut changed).await.is_some();
            if let Some(value) = read().await? {
                return Ok(value);
            }
            if !already {
                tokio::select! {
                    () = changed => {}
                    () = tokio::time::sleep(POLL_EVERY) => {}
                }
            }
        }
    }
}

/// A change of a lock, reported by [`Inspect::watch`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Event {
    /// The name of the lock.
    pub name: Name,
    /// Whether it is a lock or a semaphore.
    pub kind: Kind,
    /// The change.
    pub what: EventKind,
    /// The holder or waiter that changed.
    pub who: Participant,
}

/// A kind of change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum EventKind {
    /// The participant started to wait.
    Queued,
    /// The participant stopped waiting without a grant.
    Left,
    /// The participant acquired the lock.
    Acquired,
    /// The participant no longer holds the lock.
    Freed,
}

/// Holders and waiters at one time, by lock and owner.
type Snapshot = BTreeMap<(Name, Kind, String), (Role, Participant)>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Waiter,
    Holder,
}

fn snapshot(infos: Vec<LockInfo>) -> Snapshot {
    let mut snapshot = Snapshot::new();
    for LockInfo { name, kind, holders, waiters } in infos {
        let waiters = waiters.into_iter().map(|participant| (Role::Waiter, participant));
        let holders = holders.into_iter().map(|participant| (Role::Holder, participant));
        // A new holder may still have a queue entry. The later insert, as a holder, wins.
        for (role, participant) in waiters.chain(holders) {
            let who =
                participant.owner.map_or(participant.who().to_owned(), |owner| owner.to_string());
            snapshot.insert((name.clone(), kind, who), (role, participant));
        }
    }
    snapshot
}

/// A watch for changes in a store. From [`Inspect::watch`].
#[derive(Debug)]
pub struct Watch {
    inspect: Inspect,
    prefix: String,
    seen: Snapshot,
    events: VecDeque<Event>,
}

impl Watch {
    /// Waits for the next event.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer. A later call continues from the last
    /// known state.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, no event is lost.
    pub async fn next(&mut self) -> Result<Event> {
        let Self { inspect, prefix, seen, events } = self;
        if let Some(event) = events.pop_front() {
            return Ok(event);
        }
        inspect
            .until(async || {
                let now = snapshot(inspect.list(prefix).await?);
                add_changes(events, seen, &now);
                if !events.is_empty() {
                    *seen = now;
                }
                Ok(events.pop_front())
            })
            .await
    }

    /// Blocks until the next event. The [blocking](crate::blocking) form of [`next`](Self::next).
    ///
    /// # Errors
    ///
    /// Same as [`next`](Self::next).
    pub fn blocking_next(&mut self) -> Result<Event> {
        block_on(self.next())
    }
}

/// Adds the events that lead from one snapshot to the next.
fn add_changes(events: &mut VecDeque<Event>, before: &Snapshot, now: &Snapshot) {
    let mut add = |(name, kind, _): &(Name, Kind, String), what, who: &Participant| {
        events.push_back(Event { name: name.clone(), kind: *kind, what, who: who.clone() });
    };
    // Departures first: a lock is reported free before its next holder is reported.
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
}
