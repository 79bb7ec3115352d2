//! Attempts to acquire a free lock without a script, by `SET NX PX`, `EXISTS` and `TIME` in one write; and releases of locks
//! without waiters.
//!
//! The claim has the lock if `SET` succeeded and no other key of the lock exists. Its fence is the time, read after `SET`:
//! it is above the fence of every earlier holder whose grant was still valid when it got its fence. A holder whose own
//! `TIME` was delayed past the end of its lease may get a higher fence, but its client counts the lease from before the
//! `SET` and discards the grant.
//!
//! Attempts that share a call share `EXISTS` and `TIME`. If any of their keys exists, another call checks each attempt.

use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lockkeeper_core::{Fence, Holder, Label, Result};
use redis::Value;
use tokio::time::Instant;

use super::commands::millis;
use super::{MAX_FENCE, holder_of, record};
use crate::client::resp::{Pipeline, Words};
use crate::client::session::Session;
use crate::error::unexpected;
use crate::names::Keys;

/// An exclusive claim that expects the lock to be free.
#[derive(Debug, Clone)]
pub(crate) struct Uncontended {
    pub(crate) keys: Keys,
    /// The constant part of its record: all fields up to `ttl`.
    pub(crate) front: Arc<str>,
    pub(crate) label: Label,
    pub(crate) ttl: Duration,
    /// The least fence that the grant must have.
    pub(crate) floor: u64,
    /// Whether to read the holder if the lock is not free.
    pub(crate) reads_holder: bool,
}

/// The outcome of the attempt.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The claim has the lock, with this fence.
    Granted(Fence),
    /// The claim has set the holder key, but the script must check for waiters and a stored fence.
    Unconfirmed,
    /// The holder key exists. If another claim or client holds the lock exclusively, and the attempt reads the holder:
    /// that holder, and the remaining time of its lease in milliseconds.
    Refused(Option<(Holder, i64)>),
}

/// Adds the commands of some attempts to a pipeline.
pub(super) fn add(pipeline: &mut Pipeline, session: &Session, attempts: &[&Uncontended]) {
    if attempts.is_empty() {
        return;
    }
    let (since, channel) = (record::holding(session), session.channel());
    for Uncontended { keys, front, label, ttl, .. } in attempts {
        let record = [front, since.as_str(), channel, " ", label.as_str()].map(str::as_bytes);
        pipeline.command(|set| {
            set.word("SET").word(keys.holder()).joined(&record);
            set.word("NX").word("PX").number(millis(*ttl));
        });
    }
    for Uncontended { keys, .. } in attempts.iter().filter(|attempt| attempt.reads_holder) {
        for command in ["GET", "PTTL"] {
            pipeline.command(|words| {
                words.word(command).word(keys.holder());
            });
        }
    }
    add_check(pipeline, attempts);
    add_time(pipeline);
}

/// Counts the keys that block some attempts.
fn add_check(pipeline: &mut Pipeline, attempts: &[&Uncontended]) {
    pipeline.command(|exists| {
        exists.word("EXISTS");
        for attempt in attempts {
            attempt.keys.each(&Keys::QUEUE_AND_FENCE, |key| {
                exists.joined(&key);
            });
        }
    });
}

fn add_time(pipeline: &mut Pipeline) {
    pipeline.command(|time| {
        time.word("TIME");
    });
}

/// Reads the replies to the commands of some attempts, which were sent at that time.
pub(super) async fn read(
    session: &Session,
    attempts: &[&Uncontended],
    replies: &mut impl Iterator<Item = Value>,
    sent: Instant,
) -> Vec<Result<Outcome>> {
    if attempts.is_empty() {
        return Vec::new();
    }
    let mut next = || replies.next().unwrap_or(Value::Nil);
    let set_replies: Vec<Result<Value>> =
        attempts.iter().map(|_| session.checked(next())).collect();
    let holders: Vec<Option<(Holder, i64)>> = attempts
        .iter()
        .map(|attempt| if attempt.reads_holder { held_by(&next(), &next()) } else { None })
        .collect();
    let (existing, time) = (next(), next());
    let mut confirmed = Confirmed {
        are_free: vec![existing == Value::Int(0); attempts.len()],
        time: session.clock().sample(&time, sent),
    };
    let is_any_set = set_replies.iter().any(|reply| matches!(reply, Ok(Value::Okay)));
    if attempts.len() > 1 && existing != Value::Int(0) && is_any_set {
        // Boxed, because it is rare.
        confirmed = Box::pin(check_each(session, attempts)).await;
    }
    // Without the time, for example because the user may not read it, the script decides.
    let fence = confirmed.time.and_then(Fence::new).filter(|fence| fence.get() < MAX_FENCE);
    let outcomes = set_replies.into_iter().zip(holders).zip(attempts).zip(confirmed.are_free);
    let outcomes = outcomes.map(|(((set_reply, holder), attempt), is_free)| match set_reply? {
        Value::Okay => Ok(fence
            .filter(|fence| fence.get() >= attempt.floor && is_free)
            .map_or(Outcome::Unconfirmed, Outcome::Granted)),
        Value::Nil => Ok(Outcome::Refused(holder)),
        other => Err(unexpected(&other)),
    });
    outcomes.collect()
}

/// What is known about attempts whose `SET` has succeeded.
struct Confirmed {
    /// For each attempt, whether no key blocks it.
    are_free: Vec<bool>,
    /// The server's clock after that, in microseconds.
    time: Option<u64>,
}

/// Checks which attempts are blocked by a key.
///
/// Reads the clock again: the fence that blocked an attempt may have expired since, and the first reading may be below it.
async fn check_each(session: &Session, attempts: &[&Uncontended]) -> Confirmed {
    let mut pipeline = Pipeline::default();
    for attempt in attempts {
        add_check(&mut pipeline, &[attempt]);
    }
    add_time(&mut pipeline);
    let sent = Instant::now();
    let mut replies = session.send_all(&pipeline).await.unwrap_or_default().into_iter();
    let mut next = || replies.next().unwrap_or(Value::Nil);
    let are_free = attempts.iter().map(|_| next() == Value::Int(0)).collect();
    Confirmed { are_free, time: session.clock().sample(&next(), sent) }
}

/// A release of an exclusive claim that expects no waiters.
#[derive(Debug, Clone)]
pub(crate) struct Free {
    pub(crate) keys: Keys,
    /// The constant part of its record: all fields up to `ttl`. The first one is the owner.
    pub(crate) front: Arc<str>,
    /// The fence that this server granted, if it is known.
    pub(crate) fence: Option<Fence>,
    /// The fence that a quorum or a ticket set, if it is higher.
    pub(crate) quorum_fence: Option<Fence>,
    /// Whether claims may wait without a queue entry.
    pub(crate) notifies_unqueued: bool,
}

/// Adds the keys and arguments of some releases to the call of their script. All of them are of one store.
pub(super) fn add_releases<'a>(call: &mut Words, releases: impl Iterator<Item = &'a Free> + Clone) {
    call.number(releases.clone().count() * Keys::HOLDER_AND_QUEUE.len());
    for release in releases.clone() {
        release.keys.each(&Keys::HOLDER_AND_QUEUE, |key| {
            call.joined(&key);
        });
    }
    let notifies = releases.clone().any(|release| release.notifies_unqueued);
    call.number(u8::from(notifies));
    for release in releases {
        call.joined(&[record::owner_text(&release.front).as_bytes(), b" "]);
    }
}

/// Returns the exclusive holder that blocks an attempt, and the remaining time of its lease in milliseconds. Returns `None`
/// if only the script can decide: the holder was not read, the lock has expired since, or readers hold it, whose leases may
/// have expired.
fn held_by(value: &Value, left: &Value) -> Option<(Holder, i64)> {
    match (value, left) {
        (Value::BulkString(value), Value::Int(left)) if *left != -2 => {
            Some((holder_of(value), *left)).filter(|(holder, _)| *holder != Holder::Readers)
        }
        _ => None,
    }
}

/// How long a lock counts as contended after an attempt was refused.
const MEMORY: Duration = Duration::from_secs(1);
/// The number of entries. Two locks may share an entry. The only cost is that one of them uses the script without need.
const ENTRIES: usize = 512;

/// Remembers which locks were contended recently. A claim on one of them goes to the script at once: `SET NX` would
/// likely fail and cost it a round trip.
#[derive(Debug)]
pub(crate) struct RecentContention {
    start: std::time::Instant,
    hasher: std::hash::RandomState,
    /// When each entry ends, in milliseconds after the start.
    ends: Box<[AtomicU64]>,
}

impl Default for RecentContention {
    fn default() -> Self {
        let ends = (0..ENTRIES).map(|_| AtomicU64::new(0)).collect();
        Self { start: std::time::Instant::now(), hasher: std::hash::RandomState::new(), ends }
    }
}

impl RecentContention {
    pub(crate) fn note(&self, keys: &Keys) {
        self.entry(keys).store(self.millis(MEMORY), Ordering::Relaxed);
    }

    pub(crate) fn has(&self, keys: &Keys) -> bool {
        let ends = self.entry(keys).load(Ordering::Relaxed);
        ends > 0 && self.millis(Duration::ZERO) < ends
    }

    fn entry(&self, keys: &Keys) -> &AtomicU64 {
        let hash = self.hasher.hash_one(keys.holder());
        let count = u64::try_from(self.ends.len()).unwrap_or(u64::MAX);
        &self.ends[usize::try_from(hash % count).unwrap_or(0)]
    }

    fn millis(&self, more: Duration) -> u64 {
        u64::try_from((self.start.elapsed() + more).as_millis()).unwrap_or(u64::MAX)
    }
}
