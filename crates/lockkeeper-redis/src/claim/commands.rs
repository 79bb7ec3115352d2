//! Attempts and releases. Those that are sent at the same time share calls.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use lockkeeper_core::coalescer::{Batch, BatchSender, Coalescer, Limits};
use lockkeeper_core::{Fence, Kind, Mode, Owner, Result};
use redis::{Cmd, Value};
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::calls;
use super::uncontended::{self, Outcome, Uncontended};
use crate::client::node::Sharing;
use crate::client::reconnecting::ReconnectingClient;
use crate::client::resp::Pipeline;
use crate::client::script::{Script, script};
use crate::client::session::Session;
use crate::error::{translate, unavailable};
use crate::names::Keys;

pub(crate) static COMMANDS: LazyLock<Script> =
    script!("commands_fast.lua" "common.lua" "commands.lua");
pub(crate) static DOWNGRADE: LazyLock<Script> = script!("one.lua" "common.lua" "downgrade.lua");

/// A script that runs for long delays all other clients of the server, so a call has at most 64 requests. One request is
/// sent by its own task. More share calls, which saves writes, reads and commands (bench, `redis/scaling-keys`).
const SHARED: Limits =
    Limits { max_direct: 1, max_in_flight: 4, max_batch: 64, linger: Duration::ZERO };

/// An attempt or a release.
#[derive(Debug, Clone)]
pub(crate) struct Command {
    pub(crate) keys: Keys,
    pub(crate) owner: Owner,
    pub(crate) action: Action,
    /// The records of this claim that may be in the queue.
    pub(crate) records: Vec<String>,
}

#[derive(Debug, Clone)]
pub(crate) enum Action {
    Attempt {
        mode: Mode,
        queue: bool,
        /// Whether the claim has just set the holder key without a script.
        is_unconfirmed: bool,
        ttl: Duration,
        floor: u64,
        /// The fence that the claim has, if it asks for a hold that it knows of.
        known: Option<Fence>,
        /// The record, in the parts that the script expects.
        record: [String; 3],
        /// The session whose channel is in the record.
        session: Arc<Session>,
    },
    Release {
        kind: Kind,
        /// Whether claims may wait without a place in the queue.
        notifies_unqueued: bool,
        /// The fence that this server granted, if it is known.
        fence: Option<Fence>,
        /// The fence that a quorum or a ticket says the hold has, if it is higher.
        told: Option<Fence>,
    },
}

impl Command {
    /// The name of the command in the script, with its flags.
    fn word(&self, session: &Session) -> String {
        let now = session.clock().now();
        let mut word = String::with_capacity(4);
        let mut flag = |flag, is_set| word.extend(Some(flag).filter(|_| is_set));
        match &self.action {
            Action::Attempt { mode, queue, is_unconfirmed, floor, .. } => {
                flag('x', *mode == Mode::Exclusive);
                flag('s', *mode == Mode::Shared);
                flag('p', mode.kind() == Kind::Semaphore);
                flag('q', *queue);
                flag('u', *is_unconfirmed);
                flag('a', *floor > now);
            }
            Action::Release { kind, notifies_unqueued, fence, told } => {
                flag('l', *kind == Kind::Lock);
                flag('m', *kind == Kind::Semaphore);
                flag('t', *notifies_unqueued);
                let is_ahead = match told {
                    Some(told) => may_be_ahead(*told, *fence, now),
                    None => fence.is_some_and(|fence| fence.get() > now),
                };
                flag('a', is_ahead);
                flag('f', told.is_some() && is_ahead);
            }
        }
        word
    }

    fn add_arguments(&self, call: &mut Cmd, session: &Session) {
        call.arg(self.word(session)).arg(self.owner.to_string());
        match &self.action {
            Action::Attempt { ttl, floor, known, record, .. } => {
                call.arg(millis(*ttl)).arg(floor).arg(known.map_or(0, Fence::get)).arg(record);
            }
            Action::Release { fence, told, .. } => {
                call.arg(told.or(*fence).map_or(0, Fence::get));
            }
        }
        call.arg(self.records.len()).arg(&self.records);
    }
}

/// Whether the server's clock, which is estimated to show `now`, may not have reached the fence that a quorum says the hold
/// has. This server granted a lower one, `own`, when its clock showed that or more.
///
/// The estimate follows the clock of this machine, and either clock may be slewed, by chrony at up to 8.3 % (`maxslewrate`).
/// A quarter of the time between the fences is more than two clocks that are slewed in opposite directions differ by.
fn may_be_ahead(told: Fence, own: Option<Fence>, now: u64) -> bool {
    let Some(own) = own else { return true };
    let margin = told.get().saturating_sub(own.get()) / 4;
    told.get().saturating_add(margin) >= now
}

/// Whole milliseconds, rounded up: the store's lease is never shorter than the one that the client assumes.
pub(crate) fn millis(ttl: Duration) -> u64 {
    let millis = ttl.as_nanos().div_ceil(1_000_000);
    u64::try_from(millis).unwrap_or(u64::MAX)
}

/// An attempt without a script, or a script command. Both kinds share calls, so that the requests of one claim stay in order.
enum Request {
    Take(Uncontended),
    Run(Command),
}

/// The answer to a request.
enum Answer {
    Took(Outcome),
    Replied(Value),
    /// The client reconnected after the request was made, and the request was not sent.
    Stale,
}

/// Sends attempts and releases to one server.
#[derive(Debug, Clone)]
pub(crate) struct CommandBatcher(Coalescer<CommandSender>);

impl CommandBatcher {
    pub(super) fn new(client: Arc<ReconnectingClient>, sharing: Sharing) -> Self {
        Self(Coalescer::new(CommandSender { client }, sharing.limits(SHARED)))
    }

    /// Sends an attempt without a script. Dropped before it was sent, it never is; dropped after that, its reply is
    /// discarded. `None` if it was not sent: it shared a call with a request that was made before the client reconnected.
    pub(crate) async fn take(
        &self,
        attempt: Uncontended,
    ) -> Result<Option<(Arc<Session>, Outcome)>> {
        match self.0.send(Request::Take(attempt)).await? {
            (session, Answer::Took(outcome)) => Ok(Some((session, outcome))),
            _ => Ok(None),
        }
    }

    /// Runs a command as [`take`](Self::take) does.
    pub(crate) async fn run(&self, command: Command) -> Result<Option<(Arc<Session>, Value)>> {
        match self.0.send(Request::Run(command)).await? {
            (session, Answer::Replied(reply)) => Ok(Some((session, reply))),
            _ => Ok(None),
        }
    }
}

struct CommandSender {
    client: Arc<ReconnectingClient>,
}

impl BatchSender for CommandSender {
    type Item = Request;
    type Answer = (Arc<Session>, Answer);

    async fn send(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<Self::Answer>>> {
        let session = self.client.session().await?;
        batch.close();
        let batch = &*batch;
        let Some(requests) = batch.items() else { return Ok(Vec::new()) };
        if requests.iter().any(|request| request.is_stale(&session)) {
            return Ok(requests.iter().map(|_| Ok((session.clone(), Answer::Stale))).collect());
        }
        let scripts: Vec<usize> = (0..requests.len())
            .filter(|index| matches!(requests[*index], Request::Run(_)))
            .collect();
        let add = |call: &mut Cmd, requests: &[&Request]| add_commands(call, &session, requests);
        let mut pipeline = Pipeline::default();
        if !scripts.is_empty() {
            let commands: Vec<&Request> = scripts.iter().map(|index| &requests[*index]).collect();
            let mut call = redis::cmd("EVALSHA").arg(&COMMANDS.hash).take();
            add(&mut call, &commands);
            pipeline.add_command(&call);
        }
        let takes: Vec<&Uncontended> = requests.iter().filter_map(Request::as_take).collect();
        uncontended::add(&mut pipeline, &session, &takes);
        let sent = Instant::now();
        let mut replies = session.send_all(&pipeline).await.map_err(translate)?.into_iter();
        let mut ran = Vec::new();
        if !scripts.is_empty() {
            ran = match session.unchecked(replies.next().unwrap_or(Value::Nil)) {
                Ok(reply) => calls::split(&session, reply, scripts.len()),
                // Boxed, because it is rare and every attempt would reserve memory for it.
                Err(error) => {
                    let repeated = calls::repeat(&session, &COMMANDS, batch, &scripts, error, add);
                    Box::pin(repeated).await
                }
            };
        }
        let mut ran = ran.into_iter().map(|reply| reply.map(Answer::Replied));
        let outcomes = uncontended::read(&session, &takes, &mut replies, sent);
        let mut took = outcomes.into_iter().map(|outcome| outcome.map(Answer::Took));
        let answers = requests.iter().map(|request| {
            let answer = match request {
                Request::Take(_) => took.next(),
                Request::Run(_) => ran.next(),
            };
            let answer = answer.unwrap_or_else(|| Err(unavailable("a reply is missing")))?;
            Ok((session.clone(), answer))
        });
        Ok(answers.collect())
    }

    fn runtime(&self) -> Handle {
        self.client.runtime()
    }
}

impl Request {
    fn as_take(&self) -> Option<&Uncontended> {
        match self {
            Self::Take(attempt) => Some(attempt),
            Self::Run(_) => None,
        }
    }

    /// Whether its record has the channel of another session: pushes to it would be lost.
    fn is_stale(&self, current: &Arc<Session>) -> bool {
        let Self::Run(Command { action: Action::Attempt { session, .. }, .. }) = self else {
            return false;
        };
        !Arc::ptr_eq(session, current)
    }
}

/// Adds the keys and arguments of script commands to a call.
fn add_commands(call: &mut Cmd, session: &Session, requests: &[&Request]) {
    let commands = || {
        requests.iter().filter_map(|request| match request {
            Request::Run(command) => Some(command),
            Request::Take(_) => None,
        })
    };
    call.arg(requests.len() * Keys::COUNT);
    for command in commands() {
        command.keys.add_all_to(call);
    }
    for command in commands() {
        command.add_arguments(call, session);
    }
}
