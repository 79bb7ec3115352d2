//! Heartbeats: renewals of one session share a statement.
//!
//! A session is the lease of all locks that it holds, and any answered statement renews all of them. So the renewals of one
//! session share a statement, the *heartbeat*:
//!
//! - A renewal that is due waits for the *linger*, a sixtieth of its TTL, and announces its heartbeat to the other claims
//!   of the session. These join it by renewing early.
//! - After that, their renewals are due at the same time. So a session sends one heartbeat per third of a TTL, regardless
//!   of how many locks it holds and when they were acquired.
//!
//! # Invariants
//!
//! 1. A heartbeat answers only renewals that were requested before it was sent. Their validity counts from the request. A
//!    renewal is never answered by an earlier heartbeat, even by a very recent one: the clock that would show how recent it
//!    is may stop while the machine is suspended.
//! 2. A heartbeat does not depend on any claim: a task sends it, and a dropped renewal does not cancel it.
//! 3. Each renewal has its own timeout, set by the engine. If a heartbeat hangs, each lock of its session becomes at risk
//!    when its renewal times out.
//!
//! Covered by `tests/sessions/heartbeats.rs`.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lockkeeper_core::Result;
use lockkeeper_core::coalescer::{Batch, BatchSender, Coalescer, Limits};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::connection::{Connection, connection_closed};

/// Returns how long a renewal that is due waits for others. The engine gives a renewal at least a sixth of the TTL, so
/// nine tenths of that remain for the answer.
fn linger(ttl: Duration) -> Duration {
    ttl / 60
}

/// Returns how long after a renewal a claim ignores announced heartbeats. Longer than the linger, so that a claim joins a
/// heartbeat only once.
pub(crate) fn min_interval(ttl: Duration) -> Duration {
    linger(ttl) * 2
}

/// Why a claim renews.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RenewalCause {
    /// The renewal is due.
    Due,
    /// Another claim has announced a heartbeat.
    Announced,
    /// The caller waits for it, for example in `extend`. It is not delayed.
    Requested,
}

/// The heartbeats of a session.
pub(crate) struct Heartbeats {
    renewals: Coalescer<HeartbeatSender>,
    announced: Notify,
    last_announced: Mutex<Option<Instant>>,
}

impl Heartbeats {
    pub(crate) fn new(connection: Arc<Connection>) -> Self {
        let limits = Limits {
            max_direct: 0,
            max_in_flight: 1,
            max_batch: usize::MAX,
            linger: Duration::ZERO,
        };
        let renewals = Coalescer::new(HeartbeatSender(connection), limits);
        Self { renewals, announced: Notify::new(), last_announced: Mutex::default() }
    }

    /// Renews a lock of `ttl`. Returns when a heartbeat that was sent after this call is answered.
    pub(crate) async fn renew(&self, ttl: Duration, cause: RenewalCause) -> Result<()> {
        let linger = match cause {
            RenewalCause::Requested => Duration::ZERO,
            RenewalCause::Due | RenewalCause::Announced => linger(ttl),
        };
        if cause == RenewalCause::Due {
            self.announce(linger);
        }
        self.renewals.send_within((), linger).await
    }

    /// Announces a heartbeat, unless one was announced within the linger.
    fn announce(&self, linger: Duration) {
        let now = Instant::now();
        let mut last = self.last_announced.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|last| now - last < linger) {
            return;
        }
        *last = Some(now);
        drop(last);
        self.announced.notify_waiters();
    }

    /// Waits until a heartbeat is announced.
    pub(crate) async fn announced(&self) {
        self.announced.notified().await;
    }
}

/// Sends heartbeats.
struct HeartbeatSender(Arc<Connection>);

impl BatchSender for HeartbeatSender {
    type Item = ();
    type Answer = ();

    async fn send(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<()>>> {
        let Some(renewals) = batch.close() else { return Ok(Vec::new()) };
        let count = renewals.len();
        tokio::select! {
            answer = self.0.ping() => answer?,
            // A pooled connection closes when its last reference is dropped, and this task has one.
            () = self.0.closed.cancelled() => return Err(connection_closed()),
        }
        Ok((0..count).map(|_| Ok(())).collect())
    }

    fn runtime(&self) -> Handle {
        self.0.runtime.clone()
    }
}
