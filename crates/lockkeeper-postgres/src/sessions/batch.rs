//! Batches of fenced tries. Concurrent tries share a statement, a fence, and perhaps a flush of the log.
//!
//! A session executes one statement at a time, so without batches each try would wait for all earlier ones.
//! Tries of different names can share a fence, because fences have to rise per name only. The server draws the fence after
//! it has granted all locks of the batch, and the client receives it after it was flushed to disk.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use lockkeeper_core::Result;
use lockkeeper_core::coalescer::{Batch, BatchSender, Coalescer, Limits};
use tokio::runtime::Handle;
use tokio_postgres::types::{ToSql, Type};

use super::connection::{Connection, connection_closed};
use super::statements::{Operation, Statement, TRY_BATCH_SEQUENCE, TRY_BATCH_XID};
use crate::config::FenceSource;
use crate::error::unavailable;
use crate::names::AdvisoryKey;

/// How many tries may be in flight with their own statement. The server starts the next statement as soon as one is done. A
/// batch waits in the client until the previous batch is answered. So a few tries are faster alone.
const MAX_DIRECT: usize = 3;
/// The maximum number of tries per statement.
const MAX_BATCH: usize = 256;

/// Creates the coalescer of the fenced tries of a connection.
pub(crate) fn coalescer(connection: Arc<Connection>, fences: FenceSource) -> Coalescer<TrySender> {
    let sender = TrySender { connection, fences, statement: OnceLock::new() };
    let limits = Limits {
        max_direct: MAX_DIRECT,
        max_in_flight: 1,
        max_batch: MAX_BATCH,
        linger: Duration::ZERO,
    };
    Coalescer::new(sender, limits)
}

/// Sends the fenced tries of a connection.
#[derive(Debug)]
pub(crate) struct TrySender {
    connection: Arc<Connection>,
    fences: FenceSource,
    statement: OnceLock<tokio_postgres::Statement>,
}

/// A fenced try of a key that is one number.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Try {
    pub(crate) key: i64,
    pub(crate) shared: bool,
}

/// The answer to a fenced try.
#[derive(Debug)]
pub(crate) enum TryAnswer {
    /// Granted, with the value from which the fence is made.
    Granted(i64),
    Contended,
    /// The server answered with an error. The lock may be held nevertheless.
    Failed(tokio_postgres::Error),
    /// The statement of the batch failed, perhaps because of another key. The lock may be held nevertheless.
    BatchFailed,
}

impl TrySender {
    /// Sends a try with its own statement.
    async fn send_alone(&self, item: Try) -> Result<TryAnswer> {
        let key = AdvisoryKey::from_i64(item.key);
        let statement = Statement::new(Operation::Try { fences: self.fences }, item.shared, key);
        Ok(match self.connection.execute(statement, key).await? {
            Ok(None) => return Err(unavailable("the server sent no answer")),
            Ok(Some(row)) => row.get::<_, Option<i64>>(0).into(),
            Err(error) => TryAnswer::Failed(error),
        })
    }

    /// Sends one statement for all tries of a batch.
    async fn send_batch(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<TryAnswer>>> {
        let types = [Type::INT8_ARRAY, Type::BOOL_ARRAY, Type::OID];
        let (text, types) = match self.fences {
            FenceSource::Sequence => (TRY_BATCH_SEQUENCE, &types[..]),
            _ => (TRY_BATCH_XID, &types[..2]),
        };
        let prepared = self.connection.prepare(&self.statement, text, types).await?;
        let Some(tries) = batch.close() else { return Ok(Vec::new()) };
        let keys: Vec<i64> = tries.iter().map(|item| item.key).collect();
        let shared: Vec<bool> = tries.iter().map(|item| item.shared).collect();
        let sequence = self.connection.sequence();
        let arguments: [&(dyn ToSql + Sync); 3] = [&keys, &shared, &sequence];
        let Ok(row) = self.connection.query(prepared, &arguments[..types.len()]).await? else {
            return Ok(keys.iter().map(|_| Ok(TryAnswer::BatchFailed)).collect());
        };
        let row = row.ok_or_else(|| unavailable("the server sent no answer"))?;
        let granted = row.get::<_, Option<Vec<i64>>>(0).unwrap_or_default();
        let value: Option<i64> = row.get(1);
        let answers = keys.iter().map(|key| Ok(value.filter(|_| granted.contains(key)).into()));
        Ok(answers.collect())
    }
}

impl From<Option<i64>> for TryAnswer {
    fn from(value: Option<i64>) -> Self {
        value.map_or(TryAnswer::Contended, TryAnswer::Granted)
    }
}

impl BatchSender for TrySender {
    type Item = Try;
    type Answer = TryAnswer;

    async fn send(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<TryAnswer>>> {
        // A batch that is closed from the start is a try that its caller sends directly.
        if let Some([item]) = batch.items() {
            return Ok(vec![self.send_alone(*item).await]);
        }
        // Boxed, so that it does not enlarge the futures of direct tries.
        Box::pin(async {
            tokio::select! {
                answers = self.send_batch(batch) => answers,
                // A pooled connection closes when its last reference is dropped, and this task has one.
                () = self.connection.closed.cancelled() => Err(connection_closed()),
            }
        })
        .await
    }

    fn runtime(&self) -> Handle {
        self.connection.runtime.clone()
    }
}
