//! The lock table of the memory store. All operations run under one mutex, at a time that the caller passes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::contract::{ClaimSpec, Holder, Kind, LockInfo, Mode, Participant, Retry};
use crate::fence::Fence;
use crate::name::{Label, Name};
use crate::owner::Owner;

#[derive(Debug, Default)]
pub(super) struct Table {
    locks: HashMap<(Kind, Name), Lock>,
    /// The highest fence of all names, so that names need not be kept for their fences.
    last_fence: u64,
    /// The attempts since the last sweep.
    attempts: usize,
}

fn key(spec: &ClaimSpec) -> (Kind, Name) {
    (spec.mode.kind(), spec.name.clone())
}

/// The outcome of an attempt.
pub(super) enum Attempted {
    Granted(Fence),
    Contended {
        position: Option<u64>,
        retry: Retry,
        holder: Holder,
        /// For a claim that is not queued: notified at the next change.
        listener: Option<Arc<Notify>>,
    },
}

/// The effect of a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Renew,
    Downgrade,
}

/// The state of a claim.
pub(super) enum ClaimState {
    Holds(Fence),
    Waits,
    /// Waits, and must repeat the attempt to learn when the holder's lease ends.
    MustRetry,
    Absent,
}

/// A lock or semaphore that has a holder or a waiter. Removed when it has neither.
#[derive(Debug)]
struct Lock {
    fence: Fence,
    holders: Vec<Entry>,
    queue: BTreeMap<u64, Entry>,
    last_position: u64,
    /// A lower bound of the time at which the first entry expires.
    next_expiry: Instant,
    listener: Option<Arc<Notify>>,
}

/// A holder or a waiter.
#[derive(Debug)]
struct Entry {
    owner: Owner,
    label: Label,
    mode: Mode,
    ttl: Duration,
    since: Instant,
    /// `None` if past the end of the clock.
    end: Option<Instant>,
    notify: Option<Arc<Notify>>,
    /// Set for a waiter that does not know the current holder's lease, and needs it.
    must_retry: bool,
}

impl Entry {
    fn new(spec: &ClaimSpec, notify: Option<&Arc<Notify>>, now: Instant) -> Self {
        Self {
            owner: spec.owner,
            label: spec.label.clone(),
            mode: spec.mode,
            ttl: spec.ttl,
            since: now,
            end: now.checked_add(spec.ttl),
            notify: notify.cloned(),
            must_retry: false,
        }
    }

    /// Returns whether the entry is still valid, and notifies its claim if not.
    fn is_live(&self, now: Instant) -> bool {
        let live = self.end.is_none_or(|end| now < end);
        if !live {
            self.notify();
        }
        live
    }

    fn notify(&self) {
        if let Some(notify) = &self.notify {
            notify.notify_one();
        }
    }

    fn participant(&self, now: Instant, fence: Option<Fence>) -> Participant {
        Participant {
            owner: Some(self.owner),
            label: Some(self.label.clone()),
            mode: self.mode,
            fence,
            age: Some(now.saturating_duration_since(self.since)),
            remaining: self.end.map(|end| end.saturating_duration_since(now)),
        }
    }
}

impl Table {
    /// Returns the highest fence granted for any name.
    pub(super) fn last_fence(&self) -> u64 {
        self.last_fence
    }

    pub(super) fn attempt(
        &mut self,
        spec: &ClaimSpec,
        position: Option<u64>,
        floor: Option<Fence>,
        notify: Option<&Arc<Notify>>,
        now: Instant,
    ) -> Attempted {
        self.attempts += 1;
        if self.attempts > self.locks.len() + 1024 {
            self.attempts = 0;
            self.sweep(now);
        }
        let last_fence = &mut self.last_fence;
        let lock = self.locks.entry(key(spec)).or_insert_with(|| Lock::new(last_fence, now));
        lock.advance(last_fence, now);
        if let Some(holder) = lock.holder_mut(spec.owner) {
            holder.end = now.checked_add(spec.ttl);
            let end = holder.end;
            lock.expires_at(end);
            return Attempted::Granted(lock.raise(last_fence, floor));
        }
        let entry = Entry::new(spec, notify, now);
        if lock.queue.is_empty() && admits(&lock.holders, spec.mode) {
            lock.admit(entry, last_fence);
            return Attempted::Granted(lock.raise(last_fence, floor));
        }
        // A later hand-off has no floor, so it is recorded here.
        *last_fence = floor.map_or(*last_fence, |floor| (floor.get() - 1).max(*last_fence));
        let position = spec.queue.then(|| lock.enqueue(position, entry));
        // Every waiter learns when the lease ends. The first attempt after that advances the queue for all.
        let ends = lock.holders.iter().filter_map(|holder| holder.end).min();
        let retry =
            ends.map_or(Retry::OnNotify, |end| Retry::After(end.saturating_duration_since(now)));
        let holder = lock.holder();
        let listener = position.is_none().then(|| lock.listener.get_or_insert_default().clone());
        if lock.is_empty() {
            self.locks.remove(&key(spec));
        }
        Attempted::Contended { position, retry, holder, listener }
    }

    /// Removes locks whose last holder and waiters have expired.
    fn sweep(&mut self, now: Instant) {
        let last_fence = &mut self.last_fence;
        self.locks.retain(|_, lock| {
            lock.advance(last_fence, now);
            !lock.is_empty()
        });
    }

    pub(super) fn state(
        &mut self,
        spec: &ClaimSpec,
        position: Option<u64>,
        notify: &Arc<Notify>,
    ) -> ClaimState {
        let Some(lock) = self.locks.get_mut(&key(spec)) else { return ClaimState::Absent };
        if let Some(holder) = lock.holder_mut(spec.owner) {
            holder.notify = Some(notify.clone());
            return ClaimState::Holds(lock.fence);
        }
        let waiter = position.and_then(|position| lock.waiter_mut(spec.owner, position));
        match waiter.map(|waiter| std::mem::take(&mut waiter.must_retry)) {
            Some(true) => ClaimState::MustRetry,
            Some(false) => ClaimState::Waits,
            None => ClaimState::Absent,
        }
    }

    /// Renews or downgrades a hold; false if this owner does not hold the lock in this mode.
    pub(super) fn renew(
        &mut self,
        spec: &ClaimSpec,
        step: Step,
        ttl: Duration,
        now: Instant,
    ) -> bool {
        let last_fence = &mut self.last_fence;
        let Some(lock) = self.locks.get_mut(&key(spec)) else { return false };
        lock.advance(last_fence, now);
        // A ticket with another fence does not match. (That of shared holds may have been raised since.)
        let is_altered = spec.ticket.is_some_and(|fence| fence != lock.fence);
        let holder = lock.holder_mut(spec.owner);
        // A hold that was downgraded does not match a claim in the original mode.
        let holder = holder.filter(|holder| step == Step::Downgrade || holder.mode == spec.mode);
        let holder = holder.filter(|_| spec.mode != Mode::Exclusive || !is_altered);
        let renewed = holder.is_some();
        if let Some(holder) = holder {
            holder.end = now.checked_add(ttl);
            holder.ttl = ttl;
            let downgraded = step == Step::Downgrade && holder.mode != Mode::Shared;
            if downgraded {
                holder.mode = Mode::Shared;
            }
            let end = holder.end;
            lock.expires_at(end);
            if downgraded {
                lock.advance(last_fence, now);
                lock.notify_listeners();
            }
        }
        if lock.is_empty() {
            self.locks.remove(&key(spec));
        }
        renewed
    }

    /// Removes a claim, and hands the lock off; true if the claim held it.
    pub(super) fn release(
        &mut self,
        spec: &ClaimSpec,
        position: Option<u64>,
        now: Instant,
    ) -> bool {
        let key = key(spec);
        let Some(lock) = self.locks.get_mut(&key) else { return false };
        // Expired entries are removed first: an expired hold does not count as released.
        lock.advance(&mut self.last_fence, now);
        let held = lock.holders.iter().position(|holder| holder.owner == spec.owner);
        if let Some(held) = held {
            lock.holders.swap_remove(held);
        }
        if let Some(position) = position
            && lock.waiter_mut(spec.owner, position).is_some()
        {
            lock.queue.remove(&position);
        }
        if lock.hand_off(&mut self.last_fence, now) {
            self.locks.remove(&key);
        }
        held.is_some()
    }

    pub(super) fn break_lock(&mut self, name: &Name, now: Instant) -> usize {
        let mut broken = 0;
        for kind in [Kind::Lock, Kind::Semaphore] {
            let key = (kind, name.clone());
            let Some(lock) = self.locks.get_mut(&key) else { continue };
            lock.advance(&mut self.last_fence, now);
            for holder in lock.holders.drain(..) {
                holder.notify();
                broken += 1;
            }
            if lock.hand_off(&mut self.last_fence, now) {
                self.locks.remove(&key);
            }
        }
        broken
    }

    pub(super) fn list(&mut self, now: Instant, wanted: impl Fn(&str) -> bool) -> Vec<LockInfo> {
        self.sweep(now);
        let wanted = self.locks.iter().filter(|((_, name), _)| wanted(name));
        let mut infos: Vec<LockInfo> = wanted
            .map(|((kind, name), lock)| {
                let fence = Some(lock.fence);
                let mut holders: Vec<&Entry> = lock.holders.iter().collect();
                holders.sort_by_key(|holder| holder.since);
                let holders = holders.iter().map(|entry| entry.participant(now, fence)).collect();
                let waiters = lock.queue.values().map(|entry| entry.participant(now, None));
                LockInfo { name: name.clone(), kind: *kind, holders, waiters: waiters.collect() }
            })
            .collect();
        infos.sort_by(|a, b| (&a.name, a.kind).cmp(&(&b.name, b.kind)));
        infos
    }
}

impl Lock {
    fn new(last_fence: &mut u64, now: Instant) -> Self {
        // Concurrent holders share this fence. It is at least that of any earlier exclusive hold.
        *last_fence = (*last_fence).max(1);
        Self {
            fence: Fence::new(*last_fence).unwrap_or(Fence::MAX),
            holders: Vec::with_capacity(1),
            queue: BTreeMap::new(),
            last_position: 0,
            next_expiry: now,
            listener: None,
        }
    }

    fn holder_mut(&mut self, owner: Owner) -> Option<&mut Entry> {
        self.holders.iter_mut().find(|holder| holder.owner == owner)
    }

    /// Returns the waiter at a position. The owner is compared, because positions start again when a lock is created again.
    fn waiter_mut(&mut self, owner: Owner, position: u64) -> Option<&mut Entry> {
        self.queue.get_mut(&position).filter(|waiter| waiter.owner == owner)
    }

    /// Removes expired entries, and grants the lock to the next waiters.
    fn advance(&mut self, last_fence: &mut u64, now: Instant) {
        if now >= self.next_expiry {
            let before = self.holders.len() + self.queue.len();
            self.holders.retain(|entry| entry.is_live(now));
            self.queue.retain(|_, entry| entry.is_live(now));
            let entries = self.holders.iter().chain(self.queue.values());
            let far = now + Duration::from_secs(24 * 60 * 60);
            self.next_expiry = entries.filter_map(|entry| entry.end).min().unwrap_or(far).min(far);
            if self.holders.len() + self.queue.len() < before {
                self.notify_listeners();
            }
        }
        while let Some(next) = self.queue.first_entry() {
            if !admits(&self.holders, next.get().mode) {
                break;
            }
            let mut entry = next.remove();
            entry.since = now;
            entry.end = now.checked_add(entry.ttl);
            entry.notify();
            let lease = entry.ttl;
            self.admit(entry, last_fence);
            // The next waiter repeats its attempt after a third of its own TTL. If the new holder's lease may end before
            // that, it must learn of the lease now.
            if let Some(mut next) = self.queue.first_entry()
                && lease < next.get().ttl / 3
            {
                next.get_mut().must_retry = true;
                next.get().notify();
            }
        }
    }

    /// Grants the lock to the next waiters after an entry was removed; true if the lock is empty.
    fn hand_off(&mut self, last_fence: &mut u64, now: Instant) -> bool {
        self.advance(last_fence, now);
        self.notify_listeners();
        self.is_empty()
    }

    fn holder(&self) -> Holder {
        match self.holders.first() {
            Some(Entry { mode: Mode::Exclusive, owner, .. }) => Holder::Owner(*owner),
            Some(Entry { mode: Mode::Shared, .. }) => Holder::Readers,
            Some(_) | None => Holder::Unknown,
        }
    }

    fn is_empty(&self) -> bool {
        self.holders.is_empty() && self.queue.is_empty()
    }

    /// Accounts for an entry that expires at `end`.
    fn expires_at(&mut self, end: Option<Instant>) {
        self.next_expiry = end.map_or(self.next_expiry, |end| end.min(self.next_expiry));
    }

    fn admit(&mut self, entry: Entry, last_fence: &mut u64) {
        if entry.mode == Mode::Exclusive {
            *last_fence += 1;
            self.fence = Fence::new(*last_fence).unwrap_or(Fence::MAX);
        }
        self.expires_at(entry.end);
        self.holders.push(entry);
    }

    fn raise(&mut self, last_fence: &mut u64, floor: Option<Fence>) -> Fence {
        self.fence = floor.map_or(self.fence, |floor| floor.max(self.fence));
        *last_fence = self.fence.get().max(*last_fence);
        self.fence
    }

    /// Adds a waiter, or refreshes the one at `position`. Returns its position.
    fn enqueue(&mut self, position: Option<u64>, entry: Entry) -> u64 {
        self.expires_at(entry.end);
        if let Some(position) = position
            && let Some(waiter) = self.waiter_mut(entry.owner, position)
        {
            waiter.end = entry.end;
            return position;
        }
        self.last_position += 1;
        self.queue.insert(self.last_position, entry);
        self.last_position
    }

    /// Notifies claims that listen without being queued.
    fn notify_listeners(&mut self) {
        if let Some(listener) = self.listener.take() {
            listener.notify_waiters();
        }
    }
}

/// Returns whether a claim is compatible with the holders.
fn admits(holders: &[Entry], mode: Mode) -> bool {
    match mode {
        Mode::Exclusive => holders.is_empty(),
        // Either one exclusive holder or any number of shared ones: the first one shows which.
        Mode::Shared => holders.first().is_none_or(|holder| holder.mode == Mode::Shared),
        Mode::Permits { take, of } => {
            let (mut used, mut limit) = (u64::from(take), of);
            for holder in holders {
                if let Mode::Permits { take, of } = holder.mode {
                    used += u64::from(take);
                    limit = limit.min(of);
                }
            }
            used <= u64::from(limit)
        }
    }
}
