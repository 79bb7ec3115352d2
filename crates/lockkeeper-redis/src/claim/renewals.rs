//! Renewals. Those that are due at about the same time share calls.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use lockkeeper_core::coalescer::{Batch, BatchSender, Coalescer, Limits};
use lockkeeper_core::{Fence, Mode, Owner, Result};
use redis::Value;
use tokio::runtime::Handle;

use super::calls;
use super::commands::millis;
use crate::client::node::Sharing;
use crate::client::reconnecting::ReconnectingClient;
use crate::client::resp::Words;
use crate::client::script::{Script, script};
use crate::client::session::Call;
use crate::names::Keys;

pub(crate) static RENEW: LazyLock<Script> = script!("renew.lua");

/// A script that runs for long delays all other clients of the server, so a call has at most 64 renewals. All calls are
/// sent at once: one after the other, the last holds could expire.
const SHARED: Limits =
    Limits { max_direct: 0, max_in_flight: 1024, max_batch: 64, linger: Duration::from_millis(20) };
/// Which keys of a lock the script uses.
const KEYS: [usize; 3] = [0, 1, 3];

/// A hold to renew.
#[derive(Debug, Clone)]
pub(crate) struct Renewal {
    pub(crate) keys: Keys,
    pub(crate) owner: Owner,
    pub(crate) mode: Mode,
    pub(crate) ttl: Duration,
    /// The fence of the hold, if it is known.
    pub(crate) fence: Option<Fence>,
    /// Whether the fence comes from a ticket: a hold with another fence is not renewed.
    pub(crate) has_ticket: bool,
}

/// Renews holds on one server.
#[derive(Debug, Clone)]
pub(crate) struct RenewalBatcher(Coalescer<RenewalSender>);

impl RenewalBatcher {
    pub(super) fn new(
        client: Arc<ReconnectingClient>,
        sharing: Sharing,
        min_replicas: u32,
    ) -> Self {
        Self(Coalescer::new(RenewalSender { client, min_replicas }, sharing.limits(SHARED)))
    }

    /// Renews a hold. Returns false if it is not held. Waits for others to share its call, for `SHARED.linger` or a
    /// thousandth of the TTL, whichever is less.
    pub(crate) fn renew(&self, renewal: Renewal) -> impl Future<Output = Result<bool>> + Send {
        let linger = (renewal.ttl / 1000).min(SHARED.linger);
        self.0.send_within(renewal, linger)
    }
}

struct RenewalSender {
    client: Arc<ReconnectingClient>,
    min_replicas: u32,
}

impl BatchSender for RenewalSender {
    type Item = Renewal;
    type Answer = bool;

    async fn send(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<bool>>> {
        let session = self.client.session().await?;
        let Some(renewals) = batch.close() else { return Ok(Vec::new()) };
        let all: Vec<&Renewal> = renewals.iter().collect();
        let replies = match session.call(Call::Evalsha, &RENEW, |call| add_all(call, &all)).await {
            Ok(reply) => calls::split(&session, reply, all.len()),
            Err(error) => {
                let indices: Vec<usize> = (0..all.len()).collect();
                calls::repeat(&session, &RENEW, batch, &indices, error, add_all).await
            }
        };
        session.replicated(self.min_replicas).await?;
        Ok(replies.into_iter().map(|reply| reply.map(|held| held == Value::Int(1))).collect())
    }

    fn runtime(&self) -> Handle {
        self.client.runtime()
    }
}

/// Adds the keys and arguments of some renewals to a call.
fn add_all(call: &mut Words, renewals: &[&Renewal]) {
    call.number(renewals.len() * KEYS.len());
    for renewal in renewals {
        renewal.keys.each(&KEYS, |key| {
            call.joined(&key);
        });
    }
    for renewal in renewals {
        call.word(renewal.owner.to_string());
        call.word(match (renewal.mode, renewal.has_ticket) {
            (Mode::Exclusive, false) => "x",
            (Mode::Exclusive, true) => "xt",
            (Mode::Shared, false) => "s",
            (Mode::Shared, true) => "st",
            (Mode::Permits { .. }, false) => "p",
            (Mode::Permits { .. }, true) => "pt",
        });
        call.number(renewal.fence.map_or(0, Fence::get)).number(millis(renewal.ttl));
    }
}
