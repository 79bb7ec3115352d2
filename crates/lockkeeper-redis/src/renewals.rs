//! Renewals share calls: ten thousand holds are not ten thousand commands.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use lockkeeper_core::{Fence, Owner, Result};
use redis::{Cmd, Value};
use tokio::sync::oneshot;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::error::{translate, unavailable};
use crate::key::Keys;
use crate::link::Link;
use crate::scripts::RENEW;

/// The most that share a call: a script that runs for long holds up everybody else.
const MOST: usize = 64;
/// The longest that a renewal waits for others to share its call.
const LONGEST_WAIT: Duration = Duration::from_millis(20);
/// Which keys of a lock the script takes.
const KEYS: [usize; 4] = [0, 1, 2, 4];

/// The renewals of one link that are to be sent.
#[derive(Default)]
pub(crate) struct Renewals {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: Vec<Waiting>,
    /// Of the call that they will share, if somebody is about to send it.
    call: Option<CancellationToken>,
}

/// A renewal, and who wants to know.
type Waiting = (Renewal, oneshot::Sender<Result<bool>>);

/// A hold that is to be renewed.
#[derive(Debug, Clone)]
pub(crate) struct Renewal {
    pub(crate) keys: Keys,
    pub(crate) owner: Owner,
    /// As in the scripts.
    pub(crate) mode: &'static str,
    pub(crate) ttl: Duration,
    /// The fence that a ticket says it has.
    pub(crate) ticket: Option<Fence>,
}

impl Renewals {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a renewal. Answers the call that it will share, and whether that is a new one, which
    /// somebody has to send.
    fn add(
        &self,
        renewal: Renewal,
        answer: oneshot::Sender<Result<bool>>,
    ) -> (CancellationToken, bool) {
        let mut state = self.state();
        state.waiting.push((renewal, answer));
        let is_new = state.call.is_none();
        (state.call.get_or_insert_default().clone(), is_new)
    }

    /// What is to be sent now. Whatever is added from here on shares another call.
    fn take(&self) -> Vec<Waiting> {
        let mut state = self.state();
        state.call = None;
        std::mem::take(&mut state.waiting)
    }
}

/// Renews a hold together with others on the same link; false if it is not held.
///
/// `last` is the call of the same hold's last renewal, if that was never answered. It is awaited first: a
/// renewal that came late would put a shorter lease in the place of a longer one.
pub(crate) async fn renew(
    link: &Arc<Link>,
    renewal: Renewal,
    last: &mut Option<CancellationToken>,
) -> Result<bool> {
    if let Some(last) = last {
        last.cancelled().await;
    }
    let (answer, answered) = oneshot::channel();
    let wait = (renewal.ttl / 1000).min(LONGEST_WAIT);
    let (call, is_new) = link.renewals.add(renewal, answer);
    *last = Some(call.clone());
    if is_new {
        let sender = Sender { link: link.clone(), taken: false, _ended: call.drop_guard() };
        tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            sender.send_all().await;
        });
    }
    let answer = answered.await.unwrap_or_else(|_| Err(unavailable("the connection is lost")));
    *last = None;
    answer
}

/// Whoever sends a call. If its runtime ends on the way, the next renewal has another.
struct Sender {
    link: Arc<Link>,
    taken: bool,
    /// Tells those whose next renewal waits for this.
    _ended: DropGuard,
}

impl Sender {
    async fn send_all(mut self) {
        let mut waiting = self.link.renewals.take();
        self.taken = true;
        // One that nobody awaits need not be sent.
        waiting.retain(|(_, answer)| !answer.is_closed());
        let mut batches = Vec::new();
        while !waiting.is_empty() {
            batches.push(waiting.split_off(waiting.len().saturating_sub(MOST)));
        }
        // All under way at once: one after the other, a long line would hold them up.
        join_all(batches.into_iter().map(|batch| self.renew(batch))).await;
    }

    async fn renew(&self, batch: Vec<Waiting>) {
        match self.send(&batch).await {
            Ok(answers) => {
                for ((_, sender), answer) in batch.into_iter().zip(answers) {
                    let _ = sender.send(Ok(answer));
                }
            }
            Err(error) => {
                for (_, sender) in batch {
                    let _ = sender.send(Err(error.clone()));
                }
            }
        }
    }

    async fn send(&self, batch: &[Waiting]) -> Result<Vec<bool>> {
        let connection = self.link.connection().await?;
        let renewals = batch.iter().map(|(renewal, _)| renewal);
        let answer = connection.run(&RENEW, |command| add_to(command, renewals.clone()));
        let answer = answer.await.map_err(translate)?;
        connection.replicated(self.link.config().min_replicas).await?;
        Ok(answers(&answer))
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.taken {
            // Whoever waits is told, by the end of its channel.
            drop(self.link.renewals.take());
        }
    }
}

/// Adds keys and arguments of the script.
pub(crate) fn add_to<'a>(
    command: &mut Cmd,
    renewals: impl ExactSizeIterator<Item = &'a Renewal> + Clone,
) {
    command.arg(renewals.len() * KEYS.len());
    for renewal in renewals.clone() {
        renewal.keys.add_to(command, &KEYS);
    }
    for renewal in renewals {
        command.arg(renewal.owner.to_string());
        match renewal.ticket {
            None => command.arg(renewal.mode),
            Some(fence) => command.arg(format!("{}{fence}", renewal.mode)),
        };
        command.arg(millis(renewal.ttl));
    }
}

/// What the script says of each.
pub(crate) fn answers(answer: &Value) -> Vec<bool> {
    let held = |answer: &Value| *answer == Value::Int(1);
    answer.as_sequence().unwrap_or_default().iter().map(held).collect()
}

/// Whole milliseconds, rounded up: the store's lease is never shorter than the one believed here.
pub(crate) fn millis(ttl: Duration) -> u64 {
    let millis = ttl.as_nanos().div_ceil(1_000_000);
    u64::try_from(millis).unwrap_or(u64::MAX)
}
