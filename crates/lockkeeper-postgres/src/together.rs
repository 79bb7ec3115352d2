//! Tries that come at the same time share a statement, a fence, and the flush of the log that makes it last.
//!
//! A session does one thing after the other, so that each of many tries on it would wait for the disk as often
//! as there are tries before it. A fence has to rise for each name only: names that are asked for together can
//! have the same one, since it is drawn when all of them are granted, and nobody knows it before it is on disk.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use lockkeeper_core::Result;
use tokio::sync::{mpsc, oneshot};
use tokio_postgres::types::Type;

use crate::error::{translate, unavailable};
use crate::link::{Link, gone};
use crate::sql::TRY_TOGETHER;

/// How many may be under way, each alone. Whoever is alone is not to pay for what others save. And one behind the
/// other, the server begins with the next when one is done, while those who go together wait on this side until the
/// last have their answer: up to three are faster alone, or as fast (measured with a flush of 200 µs).
const ALONE: usize = 3;
/// How many go together, at most.
const MOST: usize = 256;

/// What a connection has for this.
#[derive(Debug, Default)]
pub(crate) struct Together {
    /// How many fenced tries are under way, alone or not.
    underway: AtomicUsize,
    /// To the task that sends those that go together. It is started when there are any.
    asks: OnceLock<mpsc::UnboundedSender<Ask>>,
    statement: OnceLock<tokio_postgres::Statement>,
}

/// One who goes together with others. What is dropped without an answer has failed, for whatever reason.
#[derive(Debug)]
struct Ask {
    key: i64,
    shared: bool,
    /// Told the transaction id, if it was granted.
    answer: oneshot::Sender<Option<i64>>,
}

/// A fenced try that is under way.
#[derive(Debug)]
pub(crate) struct Turn {
    link: Arc<Link>,
    /// How many were so before.
    before: usize,
}

impl Turn {
    pub(crate) fn take(link: &Arc<Link>) -> Self {
        let before = link.together.underway.fetch_add(1, Ordering::Relaxed);
        Self { link: link.clone(), before }
    }

    /// Asks together with others, if there are enough of them; `None` if not, and an error if that failed, be it
    /// because of another's key: then nobody knows whether it was granted.
    pub(crate) async fn together(&self, key: i64, shared: bool) -> Option<Result<Option<i64>>> {
        if self.before < ALONE {
            return None;
        }
        let (answer, answered) = oneshot::channel();
        let asks = self.link.together.asks.get_or_init(|| start(&self.link));
        // If its task has ended, nothing was sent.
        asks.send(Ask { key, shared, answer }).ok()?;
        Some(answered.await.map_err(|_| gone()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.link.together.underway.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Starts the task that sends them: whoever asks may be left unpolled, and others depend on it.
fn start(link: &Arc<Link>) -> mpsc::UnboundedSender<Ask> {
    let (asks, asked) = mpsc::unbounded_channel();
    link.runtime.spawn(send(Arc::downgrade(link), asked));
    asks
}

/// Sends those who have come while the last ones were under way, for as long as there is the connection.
async fn send(link: Weak<Link>, mut asked: mpsc::UnboundedReceiver<Ask>) {
    let mut batch = Vec::new();
    while asked.recv_many(&mut batch, MOST).await > 0 {
        let Some(link) = link.upgrade() else { return };
        let answer = tokio::select! {
            answer = ask(&link, &batch) => answer,
            // One of a pool ends when nobody has it any more.
            () = link.closed.cancelled() => return,
        };
        let Ok((granted, xid)) = answer else {
            batch.clear();
            continue;
        };
        for ask in batch.drain(..) {
            // Whoever has gone has ended the connection.
            let _ = ask.answer.send(xid.filter(|_| granted.contains(&ask.key)));
        }
    }
}

/// Asks for all of them: which were granted, and the transaction id.
async fn ask(link: &Link, batch: &[Ask]) -> Result<(Vec<i64>, Option<i64>)> {
    let keys: Vec<i64> = batch.iter().map(|ask| ask.key).collect();
    let shared: Vec<bool> = batch.iter().map(|ask| ask.shared).collect();
    let types = [Type::INT8_ARRAY, Type::BOOL_ARRAY];
    let prepared = link.prepare(&link.together.statement, TRY_TOGETHER, &types).await?;
    let row = link.query(prepared, &[&keys, &shared]).await?.map_err(translate)?;
    let row = row.ok_or_else(|| unavailable("no answer"))?;
    Ok((row.get::<_, Option<Vec<i64>>>(0).unwrap_or_default(), row.get(1)))
}
