//! Attempts to take a free lock without a script: `SET NX PX`, `EXISTS` and `TIME` in one write.
//!
//! The claim has the lock if `SET` succeeded and no other key of the lock exists. Its fence is the time, read after `SET`:
//! it is above the fence of every earlier holder whose grant was still valid when it got its fence. A holder whose own
//! `TIME` was delayed past the end of its lease may get a higher fence, but its client counts the lease from before the
//! `SET` and discards the grant.
//!
//! Attempts that share a call share `TIME`. They do not share `EXISTS`: one name with a queue would make all others of the
//! call unconfirmed.

use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lockkeeper_core::{Fence, Holder, Label, Result};
use redis::Value;
use tokio::time::Instant;

use super::commands::millis;
use super::{MAX_FENCE, holder_of, record};
use crate::client::resp::Pipeline;
use crate::client::session::Session;
use crate::error::unexpected;
use crate::names::Keys;

/// An exclusive claim that expects the lock to be free.
#[derive(Debug, Clone)]
pub(crate) struct Uncontended {
    pub(crate) keys: Keys,
    /// The part of its record up to `ttl`.
    pub(crate) front: Arc<str>,
    pub(crate) label: Label,
    pub(crate) ttl: Duration,
    /// The least fence that the grant must have.
    pub(crate) floor: u64,
    /// Whether to read the holder if the lock is not free.
    pub(crate) reads_holder: bool,
}

/// What became of the attempt.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The claim has the lock, with this fence.
    Granted(Fence),
    /// The claim has set the holder key, but waiters or a remembered fence may be in the way.
    Unconfirmed,
    /// The holder key exists. If another claim or client holds the lock exclusively, and the attempt reads the holder:
    /// which one, and what is left of its lease in milliseconds.
    Refused(Option<(Holder, i64)>),
}

/// Adds the commands of some attempts to a pipeline.
pub(super) fn add(pipeline: &mut Pipeline, session: &Session, attempts: &[&Uncontended]) {
    if attempts.is_empty() {
        return;
    }
    let since = record::holding(session);
    for Uncontended { keys, front, label, ttl, reads_holder, .. } in attempts {
        let value = [front, since.as_str(), &record::tail(session, label.as_str())].concat();
        let (key, ttl) = (keys.holder().as_bytes(), millis(*ttl).to_string());
        pipeline.add(&[b"SET", key, value.as_bytes(), b"NX", b"PX", ttl.as_bytes()]);
        pipeline.begin(1 + Keys::IN_THE_WAY.len());
        pipeline.word(b"EXISTS");
        keys.each(&Keys::IN_THE_WAY, |key| pipeline.word(key.as_bytes()));
        if *reads_holder {
            pipeline.add(&[b"GET", key]);
            pipeline.add(&[b"PTTL", key]);
        }
    }
    pipeline.add(&[b"TIME"]);
}

/// Reads the replies to the commands of some attempts, which were sent at that time.
pub(super) fn read(
    session: &Session,
    attempts: &[&Uncontended],
    replies: &mut impl DoubleEndedIterator<Item = Value>,
    sent: Instant,
) -> Vec<Result<Outcome>> {
    if attempts.is_empty() {
        return Vec::new();
    }
    let time = replies.next_back().and_then(|time| session.clock().sample(&time, sent));
    // Without the time, for example because the user may not read it, the script decides.
    let fence = time.and_then(Fence::new).filter(|fence| fence.get() < MAX_FENCE);
    let mut next = || replies.next().unwrap_or(Value::Nil);
    let outcomes = attempts.iter().map(|attempt| {
        let (taken, others) = (next(), next());
        let (holder, left) =
            if attempt.reads_holder { (next(), next()) } else { (Value::Nil, Value::Nil) };
        Ok(match session.checked(taken)? {
            Value::Okay => fence
                .filter(|fence| fence.get() >= attempt.floor && others == Value::Int(0))
                .map_or(Outcome::Unconfirmed, Outcome::Granted),
            Value::Nil => Outcome::Refused(held_by(&holder, &left)),
            other => return Err(unexpected(&other)),
        })
    });
    outcomes.collect()
}

/// The exclusive holder that refuses an attempt, and what is left of its lease in milliseconds. `None` if the script has to
/// find out: the holder was not read, the lock has expired since, or readers have it, whose leases may have expired.
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
/// How many locks are remembered. Locks that share an entry are only slower: they use the script although `SET NX` would do.
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
