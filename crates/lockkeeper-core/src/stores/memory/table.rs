//! The table of locks behind the memory store. Everything in it happens under one lock, at a time
//! that the caller gives.

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
    entries: HashMap<(Kind, Name), Entry>,
    /// The highest fence of all names: so a name need not be remembered for its fence.
    last_fence: u64,
    /// Asks since the last sweep.
    asks: usize,
}

/// The answer to an ask.
pub(super) enum Asked {
    Granted(Fence),
    Contended {
        ticket: Option<u64>,
        retry: Retry,
        holder: Holder,
        /// For one that is not queued: rung at the next change.
        notice: Option<Arc<Notify>>,
    },
}

/// What a renewal does to a hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Renew,
    Downgrade,
}

/// What an owner is at the moment.
pub(super) enum Standing {
    Holds(Fence),
    Waits,
    /// Waits, and should ask when the holder's lease ends: nobody else would in time.
    ShouldAsk,
    Gone,
}

/// One lock or semaphore that is held or awaited. Removed when it is neither.
#[derive(Debug)]
struct Entry {
    fence: Fence,
    holders: Vec<Place>,
    queue: BTreeMap<u64, Place>,
    next_ticket: u64,
    /// No place ends before this; renewals make it too early, never too late.
    next_end: Instant,
    notice: Option<Arc<Notify>>,
}

/// A holder or a waiter.
#[derive(Debug)]
struct Place {
    owner: Owner,
    label: Label,
    mode: Mode,
    ttl: Duration,
    since: Instant,
    /// `None` if past the end of the clock.
    end: Option<Instant>,
    bell: Option<Arc<Notify>>,
    /// A waiter that has not been told of the present holder's lease, and must be.
    should_ask: bool,
}

impl Place {
    fn new(spec: &ClaimSpec, bell: Option<&Arc<Notify>>, now: Instant) -> Self {
        Self {
            owner: spec.owner,
            label: spec.label.clone(),
            mode: spec.mode,
            ttl: spec.ttl,
            since: now,
            end: now.checked_add(spec.ttl),
            bell: bell.cloned(),
            should_ask: false,
        }
    }

    fn has_ended(&self, now: Instant) -> bool {
        self.end.is_some_and(|end| now >= end)
    }

    fn ring(&self) {
        if let Some(bell) = &self.bell {
            bell.notify_one();
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
    /// The highest fence that was granted, of any name.
    pub(super) fn last_fence(&self) -> u64 {
        self.last_fence
    }

    pub(super) fn ask(
        &mut self,
        spec: &ClaimSpec,
        ticket: Option<u64>,
        floor: Option<Fence>,
        bell: Option<&Arc<Notify>>,
        now: Instant,
    ) -> Asked {
        self.sweep_now_and_then(now);
        let key = (spec.mode.kind(), spec.name.clone());
        let last_fence = &mut self.last_fence;
        let entry = self.entries.entry(key).or_insert_with(|| Entry::new(last_fence, now));
        entry.advance(last_fence, now);
        if let Some(holder) = entry.holders.iter_mut().find(|holder| holder.owner == spec.owner) {
            holder.end = now.checked_add(spec.ttl);
            entry.next_end = holder.end.map_or(entry.next_end, |end| end.min(entry.next_end));
            return Asked::Granted(entry.raise(last_fence, floor));
        }
        let place = Place::new(spec, bell, now);
        if entry.queue.is_empty() && entry.admits(spec.mode) {
            entry.admit(place, last_fence);
            return Asked::Granted(entry.raise(last_fence, floor));
        }
        // Whoever releases hands over without a floor: so it is remembered here.
        *last_fence = floor.map_or(*last_fence, |floor| (floor.get() - 1).max(*last_fence));
        let ticket = spec.queue.then(|| entry.queue_up(ticket, place));
        // Everybody is told, and whoever asks first then moves the queue on for all.
        let ends = entry.holders.iter().filter_map(|holder| holder.end).min();
        let retry =
            ends.map_or(Retry::OnNotify, |end| Retry::After(end.saturating_duration_since(now)));
        let holder = entry.holder();
        let notice = ticket.is_none().then(|| entry.notice.get_or_insert_default().clone());
        if entry.is_empty() {
            self.entries.remove(&(spec.mode.kind(), spec.name.clone()));
        }
        Asked::Contended { ticket, retry, holder, notice }
    }

    /// Forgets entries whose last holder died, and which nobody has asked for since.
    fn sweep_now_and_then(&mut self, now: Instant) {
        self.asks += 1;
        if self.asks > self.entries.len() + 1024 {
            self.asks = 0;
            self.sweep(now);
        }
    }

    fn sweep(&mut self, now: Instant) {
        let last_fence = &mut self.last_fence;
        self.entries.retain(|_, entry| {
            entry.advance(last_fence, now);
            !entry.is_empty()
        });
    }

    pub(super) fn standing(
        &mut self,
        spec: &ClaimSpec,
        ticket: Option<u64>,
        bell: &Arc<Notify>,
    ) -> Standing {
        let Some(entry) = self.entries.get_mut(&(spec.mode.kind(), spec.name.clone())) else {
            return Standing::Gone;
        };
        if let Some(holder) = entry.holders.iter_mut().find(|holder| holder.owner == spec.owner) {
            holder.bell = Some(bell.clone());
            return Standing::Holds(entry.fence);
        }
        let waiter = ticket.and_then(|ticket| entry.queue.get_mut(&ticket));
        let Some(waiter) = waiter.filter(|waiter| waiter.owner == spec.owner) else {
            return Standing::Gone;
        };
        let should_ask = std::mem::take(&mut waiter.should_ask);
        if should_ask { Standing::ShouldAsk } else { Standing::Waits }
    }

    /// Renews a hold, or turns it into a shared one; false if this owner does not hold in this mode.
    pub(super) fn renew(
        &mut self,
        spec: &ClaimSpec,
        step: Step,
        ttl: Duration,
        now: Instant,
    ) -> bool {
        let key = (spec.mode.kind(), spec.name.clone());
        let last_fence = &mut self.last_fence;
        let Some(entry) = self.entries.get_mut(&key) else { return false };
        entry.advance(last_fence, now);
        let holder = entry.holders.iter_mut().find(|holder| holder.owner == spec.owner);
        // A hold that was downgraded is not brought back by a claim that does not know of it.
        let holder = holder.filter(|holder| step == Step::Downgrade || holder.mode == spec.mode);
        // Neither is one whose ticket was altered. (Those who hold together may have been raised since.)
        let is_altered = spec.ticket.is_some_and(|fence| fence != entry.fence);
        let holder = holder.filter(|_| spec.mode != Mode::Exclusive || !is_altered);
        let renewed = holder.is_some();
        if let Some(holder) = holder {
            holder.end = now.checked_add(ttl);
            holder.ttl = ttl;
            entry.next_end = holder.end.map_or(entry.next_end, |end| end.min(entry.next_end));
            if step == Step::Downgrade && holder.mode != Mode::Shared {
                holder.mode = Mode::Shared;
                entry.advance(last_fence, now);
                entry.tell();
            }
        }
        if entry.is_empty() {
            self.entries.remove(&key);
        }
        renewed
    }

    /// Removes an owner, and hands over; true if it held.
    pub(super) fn release(&mut self, spec: &ClaimSpec, ticket: Option<u64>, now: Instant) -> bool {
        let key = (spec.mode.kind(), spec.name.clone());
        let Some(entry) = self.entries.get_mut(&key) else { return false };
        // First the expired go, so that a hold that has ended does not count as released.
        entry.advance(&mut self.last_fence, now);
        let place = entry.holders.iter().position(|holder| holder.owner == spec.owner);
        if let Some(place) = place {
            entry.holders.swap_remove(place);
        }
        // The owner is compared: tickets start again when an entry does.
        if let Some(ticket) = ticket
            && entry.queue.get(&ticket).is_some_and(|waiter| waiter.owner == spec.owner)
        {
            entry.queue.remove(&ticket);
        }
        if entry.move_on(&mut self.last_fence, now) {
            self.entries.remove(&key);
        }
        place.is_some()
    }

    pub(super) fn break_lock(&mut self, name: &Name, now: Instant) -> usize {
        let mut broken = 0;
        for kind in [Kind::Lock, Kind::Semaphore] {
            let key = (kind, name.clone());
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            entry.advance(&mut self.last_fence, now);
            for holder in entry.holders.drain(..) {
                holder.ring();
                broken += 1;
            }
            if entry.move_on(&mut self.last_fence, now) {
                self.entries.remove(&key);
            }
        }
        broken
    }

    pub(super) fn list(&mut self, now: Instant, wanted: impl Fn(&str) -> bool) -> Vec<LockInfo> {
        self.sweep(now);
        let wanted = self.entries.iter().filter(|((_, name), _)| wanted(name));
        let mut infos: Vec<LockInfo> = wanted
            .map(|((kind, name), entry)| {
                let fence = Some(entry.fence);
                let mut holders: Vec<&Place> = entry.holders.iter().collect();
                holders.sort_by_key(|holder| holder.since);
                LockInfo {
                    name: name.clone(),
                    kind: *kind,
                    holders: holders
                        .into_iter()
                        .map(|place| place.participant(now, fence))
                        .collect(),
                    waiters: entry
                        .queue
                        .values()
                        .map(|place| place.participant(now, None))
                        .collect(),
                }
            })
            .collect();
        infos.sort_by(|a, b| (&a.name, a.kind).cmp(&(&b.name, b.kind)));
        infos
    }
}

impl Entry {
    fn new(last_fence: &mut u64, now: Instant) -> Self {
        // Those who hold together have the same fence: at least that of any exclusive hold before.
        *last_fence = (*last_fence).max(1);
        Self {
            fence: Fence::new(*last_fence).unwrap_or(Fence::MAX),
            holders: Vec::with_capacity(1),
            queue: BTreeMap::new(),
            next_ticket: 0,
            next_end: now,
            notice: None,
        }
    }

    /// Removes those whose time has ended, and lets in whoever can enter then.
    fn advance(&mut self, last_fence: &mut u64, now: Instant) {
        if now >= self.next_end {
            let before = self.holders.len() + self.queue.len();
            self.holders.retain(|place| {
                let ended = place.has_ended(now);
                if ended {
                    place.ring();
                }
                !ended
            });
            self.queue.retain(|_, place| {
                let ended = place.has_ended(now);
                if ended {
                    place.ring();
                }
                !ended
            });
            self.recount_end(now);
            if self.holders.len() + self.queue.len() < before {
                self.tell();
            }
        }
        while let Some(next) = self.queue.first_entry() {
            if !admits(&self.holders, next.get().mode) {
                break;
            }
            let mut place = next.remove();
            place.since = now;
            place.end = now.checked_add(place.ttl);
            place.ring();
            let lease = place.ttl;
            self.admit(place, last_fence);
            // Who is next looks by itself after a third of its own ttl. If the new holder's lease may
            // end before that, it has to learn of it.
            if let Some(mut next) = self.queue.first_entry()
                && lease < next.get().ttl / 3
            {
                next.get_mut().should_ask = true;
                next.get().ring();
            }
        }
    }

    /// Lets in whoever can enter after somebody left; true if nobody is left at all.
    fn move_on(&mut self, last_fence: &mut u64, now: Instant) -> bool {
        self.advance(last_fence, now);
        self.tell();
        self.is_empty()
    }

    fn holder(&self) -> Holder {
        match self.holders.first() {
            Some(Place { mode: Mode::Exclusive, owner, .. }) => Holder::Owner(*owner),
            Some(Place { mode: Mode::Shared, .. }) => Holder::Readers,
            Some(_) | None => Holder::Unknown,
        }
    }

    fn is_empty(&self) -> bool {
        self.holders.is_empty() && self.queue.is_empty()
    }

    fn recount_end(&mut self, now: Instant) {
        let places = self.holders.iter().chain(self.queue.values());
        let far = now + Duration::from_secs(24 * 60 * 60);
        self.next_end = places.filter_map(|place| place.end).min().unwrap_or(far).min(far);
    }

    fn admits(&self, mode: Mode) -> bool {
        admits(&self.holders, mode)
    }

    fn admit(&mut self, place: Place, last_fence: &mut u64) {
        if place.mode == Mode::Exclusive {
            *last_fence += 1;
            self.fence = Fence::new(*last_fence).unwrap_or(Fence::MAX);
        }
        self.next_end = place.end.map_or(self.next_end, |end| end.min(self.next_end));
        self.holders.push(place);
    }

    fn raise(&mut self, last_fence: &mut u64, floor: Option<Fence>) -> Fence {
        self.fence = floor.map_or(self.fence, |floor| floor.max(self.fence));
        *last_fence = self.fence.get().max(*last_fence);
        self.fence
    }

    /// Takes a place in the queue, or refreshes the one that is there.
    fn queue_up(&mut self, ticket: Option<u64>, place: Place) -> u64 {
        self.next_end = place.end.map_or(self.next_end, |end| end.min(self.next_end));
        if let Some(ticket) = ticket
            && let Some(waiter) = self.queue.get_mut(&ticket)
            && waiter.owner == place.owner
        {
            waiter.end = place.end;
            return ticket;
        }
        self.next_ticket += 1;
        self.queue.insert(self.next_ticket, place);
        self.next_ticket
    }

    /// Tells those who listen without being queued that something changed.
    fn tell(&mut self) {
        if let Some(notice) = self.notice.take() {
            notice.notify_waiters();
        }
    }
}

/// Whether a claim may enter beside those who hold.
fn admits(holders: &[Place], mode: Mode) -> bool {
    match mode {
        Mode::Exclusive => holders.is_empty(),
        // Either one exclusive holder or any number of shared ones: the first tells.
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
