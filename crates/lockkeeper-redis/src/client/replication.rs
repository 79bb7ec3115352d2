//! `WAIT`: acknowledgement of writes by replicas.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::Result;
use lockkeeper_core::coalescer::{Batch, BatchSender, Coalescer, Limits};
use redis::Value;
use tokio::runtime::Handle;

use super::connection::Connection;
use crate::error::{translate, unavailable};

/// The timeout for acknowledgements.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// While the server executes a `WAIT`, it executes no other command of the connection. Callers that write in the meantime
/// share the next `WAIT`.
const LIMITS: Limits =
    Limits { max_direct: 1, max_in_flight: 1, max_batch: usize::MAX, linger: Duration::ZERO };

/// Sends `WAIT` for all writes on a connection. A request is the number of replicas that must acknowledge.
pub(super) struct ReplicaWait {
    commands: Arc<Connection>,
    runtime: Handle,
}

pub(super) fn coalescer(commands: &Arc<Connection>, runtime: &Handle) -> Coalescer<ReplicaWait> {
    let (commands, runtime) = (commands.clone(), runtime.clone());
    Coalescer::new(ReplicaWait { commands, runtime }, LIMITS)
}

impl BatchSender for ReplicaWait {
    type Item = u32;
    type Answer = ();

    async fn send(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<()>>> {
        let Some(needed) = batch.close() else { return Ok(Vec::new()) };
        let mut wait = redis::cmd("WAIT");
        wait.arg(needed.iter().max()).arg(MAX_WAIT.as_millis().to_string());
        let reply = self.commands.execute(&wait).await.map_err(translate)?;
        let count = if let Value::Int(count) = reply { count } else { 0 };
        let answer = |needed: &u32| {
            if count >= i64::from(*needed) {
                return Ok(());
            }
            Err(unavailable(format!(
                "{count} of {needed} replicas acknowledged the write within {MAX_WAIT:?}: check that \
                 the replicas run, or lower min_replicas"
            )))
        };
        Ok(needed.iter().map(answer).collect())
    }

    fn runtime(&self) -> Handle {
        self.runtime.clone()
    }
}
