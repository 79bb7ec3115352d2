//! What this process knows of its own claims: who holds what, and who waits behind whom.
//!
//! Those who wait for one name here stand in one queue, in the order in which they asked, and only the
//! first of them asks the server. So a thousand of them need one connection, and a lock that is held
//! here need not be asked for at all.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{ClaimSpec, Fence, Label, Mode, Name, Owner};
use tokio::runtime;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::Instant;

use crate::flight::Flight;
use crate::key::Key;
use crate::link::Link;

/// What this process has, by key.
#[derive(Debug, Default)]
pub(crate) struct Locals(Mutex<HashMap<Key, Local>>);

#[derive(Debug)]
struct Local {
    name: Name,
    /// How many claims know of it.
    claims: usize,
    queue: VecDeque<Place>,
    holders: Vec<Holder>,
    /// Told when one of the holders has gone.
    released: Arc<Notify>,
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
    Sent(Flight),
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
    pub(crate) link: Arc<Link>,
}

impl Local {
    fn place(&self, owner: Owner) -> Option<usize> {
        self.queue.iter().position(|place| place.waiter.owner == owner)
    }

    /// Tells whoever is first now. If it can be, its wait is sent at once: the lock may be given back
    /// before its own task has run, and then it would have to be fetched by a round trip.
    fn ring_first(&mut self, send: impl FnOnce(&Waiter, Duration) -> Option<Flight>) {
        let Some(first) = self.queue.front_mut() else { return };
        if let Start::Open { ttl, runtime } = first.start
            && runtime::Handle::try_current().is_ok_and(|here| here.id() == runtime)
            && let Some(flight) = send(&first.waiter, ttl)
        {
            first.waiter.pid = Some(flight.seat.link.pid);
            first.start = Start::Sent(flight);
        }
        first.bell.notify_one();
    }
}

/// A claim's entry. Dropped, the claim neither holds nor waits any more.
#[derive(Debug)]
pub(crate) struct Entry {
    locals: Arc<Locals>,
    key: Key,
    owner: Owner,
    bell: Arc<Notify>,
}

impl Locals {
    fn table(&self) -> MutexGuard<'_, HashMap<Key, Local>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a claim.
    pub(crate) fn enter(self: &Arc<Self>, key: Key, spec: &ClaimSpec) -> Entry {
        let mut table = self.table();
        let local = table.entry(key).or_insert_with(|| Local {
            name: spec.name.clone(),
            claims: 0,
            queue: VecDeque::new(),
            holders: Vec::new(),
            released: Arc::default(),
        });
        local.claims += 1;
        Entry { locals: self.clone(), key, owner: spec.owner, bell: Arc::default() }
    }

    /// What this process has, by key and name.
    pub(crate) fn all(&self) -> Vec<(Key, Name, Vec<Holder>, Vec<Waiter>)> {
        let table = self.table();
        let all = table.iter().map(|(key, local)| {
            let waiters = local.queue.iter().map(|place| place.waiter.clone()).collect();
            (*key, local.name.clone(), local.holders.clone(), waiters)
        });
        all.collect()
    }
}

impl Entry {
    fn with<T>(&self, f: impl FnOnce(&mut Local) -> T) -> T {
        let mut table = self.locals.table();
        let local = table.get_mut(&self.key).expect("it stays while an entry does");
        f(local)
    }

    /// Joins the queue, if it is not there yet, and says whether it is first.
    pub(crate) fn queue(&self, spec: &ClaimSpec) -> bool {
        self.with(|local| {
            if local.place(self.owner).is_none() {
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
                local.queue.push_back(Place { waiter, bell: self.bell.clone(), start });
            }
            local.place(self.owner) == Some(0)
        })
    }

    pub(crate) fn is_queued(&self) -> bool {
        self.with(|local| local.place(self.owner).is_some())
    }

    /// Ready when it is first in the queue.
    pub(crate) async fn first(&self) {
        while self.with(|local| local.place(self.owner)) != Some(0) {
            self.bell.notified().await;
        }
    }

    /// Takes note of which session waits for it on the server.
    pub(crate) fn waits_on(&self, pid: Option<i32>) {
        self.with(|local| {
            if let Some(place) = local.place(self.owner) {
                local.queue[place].waiter.pid = pid;
            }
        });
    }

    /// The wait that was sent for it, if there is one. From now on it sees to that itself.
    pub(crate) fn sent(&self) -> Option<Flight> {
        self.with(|local| {
            let place = local.place(self.owner)?;
            match std::mem::replace(&mut local.queue[place].start, Start::Own) {
                Start::Sent(flight) => Some(flight),
                Start::Open { .. } | Start::Own => None,
            }
        })
    }

    /// Leaves the queue. The next is told, and its wait is sent by `send` if that can be done at once.
    /// Says what had been sent for this one.
    pub(crate) fn leave_queue(
        &self,
        send: impl FnOnce(&Waiter, Duration) -> Option<Flight>,
    ) -> Option<Flight> {
        let own = self.sent();
        self.with(|local| {
            if let Some(place) = local.place(self.owner) {
                local.queue.remove(place);
                if place == 0 {
                    local.ring_first(send);
                }
            }
        });
        own
    }

    /// Whether others of this process wait.
    pub(crate) fn others_wait(&self) -> bool {
        self.with(|local| local.queue.iter().any(|place| place.waiter.owner != self.owner))
    }

    /// Whether another of this process holds it, so that the server would refuse it.
    pub(crate) fn is_held_here(&self, mode: Mode) -> bool {
        self.with(|local| {
            local.holders.iter().any(|holder| {
                let excludes = mode != Mode::Shared || holder.mode != Mode::Shared;
                excludes && holder.owner != self.owner && !holder.link.is_closed()
            })
        })
    }

    /// Will be ready when one of the present holders has gone.
    pub(crate) fn released(&self) -> OwnedNotified {
        self.with(|local| local.released.clone().notified_owned())
    }

    /// Takes note of a grant. The queue is still to be left.
    pub(crate) fn hold(&self, spec: &ClaimSpec, fence: Option<Fence>, link: Arc<Link>) {
        let holder = Holder {
            owner: self.owner,
            label: spec.label.clone(),
            mode: spec.mode,
            fence,
            since: Instant::now(),
            link,
        };
        self.with(|local| local.holders.push(holder));
    }

    /// Takes note that its hold is one of many now.
    pub(crate) fn downgrade(&self) {
        self.with(|local| {
            for holder in local.holders.iter_mut().filter(|holder| holder.owner == self.owner) {
                holder.mode = Mode::Shared;
            }
            local.released.notify_waiters();
        });
    }

    /// Takes note that it holds no more.
    pub(crate) fn let_go(&self) {
        self.with(|local| {
            let before = local.holders.len();
            local.holders.retain(|holder| holder.owner != self.owner);
            if local.holders.len() < before {
                local.released.notify_waiters();
            }
        });
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // Nothing has been sent for it: whoever drops it has left the queue before.
        drop(self.leave_queue(|_, _| None));
        self.let_go();
        let mut table = self.locals.table();
        if let Some(local) = table.get_mut(&self.key) {
            local.claims -= 1;
            if local.claims == 0 {
                table.remove(&self.key);
            }
        }
    }
}
