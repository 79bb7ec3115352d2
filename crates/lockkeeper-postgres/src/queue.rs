//! The claims of this process: which hold, and in which order the others wait.
//!
//! Waiters of one name are queued in order of arrival, and only the first of them waits on the server. So a thousand
//! waiters need one session, and a lock that is held in this process is not tried at all.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{ClaimSpec, Fence, Label, Mode, Name, Owner};
use tokio::runtime;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::names::AdvisoryKey;
use crate::sessions::{PendingQuery, Session};

/// What this process has, by key.
#[derive(Debug, Default)]
pub(crate) struct Locals(Mutex<HashMap<AdvisoryKey, Counted>>);

/// What this process has of one name, and how many entries share it. They are counted under the lock of the table:
/// the count of an [`Arc`] falls later than the entry leaves the table.
#[derive(Debug)]
struct Counted {
    local: Arc<Local>,
    entries: usize,
}

/// What this process has of one name. It is there for as long as a claim has an [`Entry`].
#[derive(Debug)]
struct Local {
    name: Name,
    parties: Mutex<Parties>,
    /// Told when one of the holders has gone.
    released: Notify,
}

#[derive(Debug, Default)]
struct Parties {
    queue: VecDeque<Place>,
    holders: Vec<Holder>,
    /// How often somebody has let go.
    releases: u64,
}

/// A place in the queue.
#[derive(Debug)]
struct Place {
    waiter: Waiter,
    /// Rung when it is first.
    bell: Arc<Notify>,
    start: Start,
}

/// How a waiter that is first comes to wait on the server.
#[derive(Debug)]
enum Start {
    /// Whoever was first before may send its wait.
    Open { ttl: Duration, runtime: runtime::Id },
    /// That has been done.
    Sent(PendingQuery),
    /// It sees to it itself.
    Own,
}

#[derive(Debug, Clone)]
pub(crate) struct Waiter {
    pub(crate) owner: Owner,
    pub(crate) label: Label,
    pub(crate) mode: Mode,
    pub(crate) since: Instant,
    /// The session that waits for it, if it is the server who lets it wait.
    pub(crate) pid: Option<i32>,
}

#[derive(Debug, Clone)]
pub(crate) struct Holder {
    pub(crate) owner: Owner,
    pub(crate) label: Label,
    pub(crate) mode: Mode,
    pub(crate) fence: Option<Fence>,
    pub(crate) since: Instant,
    pub(crate) session: Arc<Session>,
}

impl Parties {
    fn place(&self, owner: Owner) -> Option<usize> {
        self.queue.iter().position(|place| place.waiter.owner == owner)
    }

    /// Tells whoever is first now. If it can be, its wait is sent at once: the lock may be given back
    /// before its own task has run, and then it would have to be fetched by a round trip.
    fn ring_first(&mut self, send: impl FnOnce(&Waiter, Duration) -> Option<PendingQuery>) {
        let Some(first) = self.queue.front_mut() else { return };
        if let Start::Open { ttl, runtime } = first.start
            && runtime::Handle::try_current().is_ok_and(|here| here.id() == runtime)
            && let Some(query) = send(&first.waiter, ttl)
        {
            first.waiter.pid = Some(query.slot.session.connection.pid);
            first.start = Start::Sent(query);
        }
        first.bell.notify_one();
    }
}

impl Local {
    fn parties(&self) -> MutexGuard<'_, Parties> {
        self.parties.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A claim's entry. Dropped, the claim neither holds nor waits any more.
#[derive(Debug)]
pub(crate) struct Entry {
    locals: Arc<Locals>,
    local: Arc<Local>,
    key: AdvisoryKey,
    owner: Owner,
    /// Made when it joins the queue.
    bell: Option<Arc<Notify>>,
}

impl Locals {
    fn table(&self) -> MutexGuard<'_, HashMap<AdvisoryKey, Counted>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a claim.
    pub(crate) fn enter(self: &Arc<Self>, key: AdvisoryKey, spec: &ClaimSpec) -> Entry {
        let new = || {
            let (parties, released) = (Mutex::default(), Notify::new());
            let local = Arc::new(Local { name: spec.name.clone(), parties, released });
            Counted { local, entries: 0 }
        };
        let mut table = self.table();
        let counted = table.entry(key).or_insert_with(new);
        counted.entries += 1;
        let local = counted.local.clone();
        drop(table);
        Entry { locals: self.clone(), local, key, owner: spec.owner, bell: None }
    }

    /// What this process has, by key and name.
    pub(crate) fn all(&self) -> Vec<(AdvisoryKey, Name, Vec<Holder>, Vec<Waiter>)> {
        let table = self.table();
        let all = table.iter().map(|(key, Counted { local, .. })| {
            let parties = local.parties();
            let waiters = parties.queue.iter().map(|place| place.waiter.clone()).collect();
            (*key, local.name.clone(), parties.holders.clone(), waiters)
        });
        all.collect()
    }
}

impl Entry {
    /// Joins the queue, if it is not there yet, and says whether it is first.
    pub(crate) fn queue(&mut self, spec: &ClaimSpec) -> bool {
        let mut parties = self.local.parties();
        if parties.place(self.owner).is_none() {
            let waiter = Waiter {
                owner: self.owner,
                label: spec.label.clone(),
                mode: spec.mode,
                since: Instant::now(),
                pid: None,
            };
            // A wait that is bounded needs a word to the server first.
            let start = match (spec.max_wait, runtime::Handle::try_current()) {
                (None, Ok(here)) => Start::Open { ttl: spec.ttl, runtime: here.id() },
                _ => Start::Own,
            };
            let bell = self.bell.get_or_insert_default().clone();
            parties.queue.push_back(Place { waiter, bell, start });
        }
        parties.place(self.owner) == Some(0)
    }

    /// Ready when it is first in the queue; never, if it is in none.
    pub(crate) async fn first(&self) {
        let Some(bell) = &self.bell else { return std::future::pending().await };
        loop {
            let rung = bell.notified();
            if self.local.parties().place(self.owner) == Some(0) {
                return;
            }
            rung.await;
        }
    }

    /// Takes note of which session waits for it on the server.
    pub(crate) fn waits_on(&self, pid: Option<i32>) {
        let mut parties = self.local.parties();
        if let Some(place) = parties.place(self.owner) {
            parties.queue[place].waiter.pid = pid;
        }
    }

    /// The wait that was sent for it, if there is one. From now on it sees to that itself.
    pub(crate) fn sent(&self) -> Option<PendingQuery> {
        let mut parties = self.local.parties();
        let place = parties.place(self.owner)?;
        match std::mem::replace(&mut parties.queue[place].start, Start::Own) {
            Start::Sent(query) => Some(query),
            Start::Open { .. } | Start::Own => None,
        }
    }

    /// Leaves the queue. The next is told, and its wait is sent by `send` if that can be done at once.
    /// Says what had been sent for this one.
    pub(crate) fn leave_queue(
        &self,
        send: impl FnOnce(&Waiter, Duration) -> Option<PendingQuery>,
    ) -> Option<PendingQuery> {
        let mut parties = self.local.parties();
        let place = parties.place(self.owner)?;
        let left = parties.queue.remove(place)?;
        if place == 0 {
            parties.ring_first(send);
        }
        match left.start {
            Start::Sent(query) => Some(query),
            Start::Open { .. } | Start::Own => None,
        }
    }

    /// Whether others of this process wait.
    pub(crate) fn others_wait(&self) -> bool {
        self.local.parties().queue.iter().any(|place| place.waiter.owner != self.owner)
    }

    /// Whether another of this process holds it, so that the server would refuse it.
    pub(crate) fn is_held_here(&self, mode: Mode) -> bool {
        self.local.parties().holders.iter().any(|holder| {
            let excludes = mode != Mode::Shared || holder.mode != Mode::Shared;
            excludes && holder.owner != self.owner && !holder.session.connection.is_closed()
        })
    }

    /// How often somebody here has let go.
    pub(crate) fn releases(&self) -> u64 {
        self.local.parties().releases
    }

    /// Ready when somebody here has let go more often than that.
    pub(crate) async fn released(&self, since: u64) {
        loop {
            let mut released = std::pin::pin!(self.local.released.notified());
            released.as_mut().enable();
            if self.releases() != since {
                return;
            }
            released.await;
        }
    }

    /// Takes note of a grant. The queue is still to be left.
    pub(crate) fn hold(&self, spec: &ClaimSpec, fence: Option<Fence>, session: Arc<Session>) {
        let holder = Holder {
            owner: self.owner,
            label: spec.label.clone(),
            mode: spec.mode,
            fence,
            since: Instant::now(),
            session,
        };
        self.local.parties().holders.push(holder);
    }

    /// Takes note that its hold is one of many now.
    pub(crate) fn downgrade(&self) {
        let mut parties = self.local.parties();
        for holder in parties.holders.iter_mut().filter(|holder| holder.owner == self.owner) {
            holder.mode = Mode::Shared;
        }
        self.tell(parties);
    }

    /// Takes note that it holds no more.
    pub(crate) fn let_go(&self) {
        let mut parties = self.local.parties();
        let before = parties.holders.len();
        parties.holders.retain(|holder| holder.owner != self.owner);
        if parties.holders.len() < before {
            self.tell(parties);
        }
    }

    fn tell(&self, mut parties: MutexGuard<'_, Parties>) {
        parties.releases += 1;
        drop(parties);
        self.local.released.notify_waiters();
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // Nothing has been sent for it: whoever drops it has left the queue before.
        drop(self.leave_queue(|_, _| None));
        self.let_go();
        let mut table = self.locals.table();
        if let Some(counted) = table.get_mut(&self.key) {
            counted.entries -= 1;
            if counted.entries == 0 {
                table.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use lockkeeper_core::Background;

    use super::*;

    /// On another thread, an entry that has left the table may not have freed its part in it yet. The last one must
    /// not take that for another that stays.
    #[tokio::test]
    async fn two_entries_that_are_dropped_at_once_leave_nothing_in_the_table() {
        let (locals, key) = (Arc::new(Locals::default()), AdvisoryKey::from_i64(1));
        let background = Background::new(runtime::Handle::current());
        let name = Name::new("a").unwrap();
        let spec = ClaimSpec::new(name, Duration::from_secs(1), background);
        let (one, other) = (locals.enter(key, &spec), locals.enter(key, &spec));
        let not_freed_yet = one.local.clone();
        drop(one);
        assert_eq!(locals.all().len(), 1, "the other is still there");
        drop(other);
        assert!(locals.all().is_empty(), "an entry has leaked");
        drop(not_freed_yet);
        drop(locals.enter(key, &spec));
        assert!(locals.all().is_empty());
    }
}
