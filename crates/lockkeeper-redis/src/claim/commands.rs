//! Attempts and releases. Those that are sent at the same time share calls.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use lockkeeper_core::coalescer::{Batch, BatchSender, Coalescer, Limits};
use lockkeeper_core::{Fence, Kind, Mode, Result};
use redis::Value;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::uncontended::{self, Free, Outcome, Uncontended};
use super::{calls, record};
use crate::client::node::Sharing;
use crate::client::reconnecting::ReconnectingClient;
use crate::client::resp::{Pipeline, Words};
use crate::client::script::{Script, script};
use crate::client::session::Session;
use crate::error::{translate, unavailable};
use crate::names::Keys;

pub(crate) static COMMANDS: LazyLock<Script> =
    script!("commands_fast.lua" "common.lua" "commands.lua");
pub(crate) static RELEASE: LazyLock<Script> = script!("release.lua");
pub(crate) static DOWNGRADE: LazyLock<Script> = script!("one.lua" "common.lua" "downgrade.lua");

/// A script that runs for long delays all other clients of the server, so a call has at most 64 requests. One request is
/// sent by its own task. More share calls, which saves writes, reads and commands (bench, `redis/scaling-keys`).
const SHARED: Limits =
    Limits { max_direct: 1, max_in_flight: 4, max_batch: 64, linger: Duration::ZERO };

/// An attempt or a release.
#[derive(Debug, Clone)]
pub(crate) struct Command {
    pub(crate) keys: Keys,
    /// The constant part of its record: all fields up to `ttl`. The first one is the owner.
    pub(crate) front: Arc<str>,
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
        /// The fence of the hold, if the claim repeats an attempt that was granted.
        known: Option<Fence>,
        /// The rest of the record, in the parts that the script expects.
        waiting: String,
        tail: String,
        /// The session whose channel is in the record.
        session: Arc<Session>,
    },
    Release {
        kind: Kind,
        /// Whether claims may wait without a queue entry.
        notifies_unqueued: bool,
        /// The fence that this server granted, if it is known.
        fence: Option<Fence>,
        /// The fence that a quorum or a ticket set, if it is higher.
        quorum_fence: Option<Fence>,
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
            Action::Release { kind, notifies_unqueued, fence, quorum_fence } => {
                flag('l', *kind == Kind::Lock);
                flag('m', *kind == Kind::Semaphore);
                flag('t', *notifies_unqueued);
                let is_ahead = may_be_ahead(*quorum_fence, *fence, now);
                flag('a', is_ahead);
                flag('f', quorum_fence.is_some() && is_ahead);
            }
        }
        word
    }

    fn add_arguments(&self, call: &mut Words, session: &Session) {
        call.word(self.word(session)).word(record::owner_text(&self.front));
        match &self.action {
            Action::Attempt { ttl, floor, known, waiting, tail, .. } => {
                call.number(millis(*ttl)).number(*floor).number(known.map_or(0, Fence::get));
                call.word(&*self.front).word(waiting).word(tail);
            }
            Action::Release { fence, quorum_fence, .. } => {
                call.number(quorum_fence.or(*fence).map_or(0, Fence::get));
            }
        }
        call.number(self.records.len());
        for record in &self.records {
            call.word(record);
        }
    }
}

/// Returns whether the server's clock, which is estimated to show `now`, may not have reached the fence of the hold:
/// `quorum_fence`, which a quorum or a ticket set, or else `own`. This server granted `own` when its clock showed that or
/// more.
///
/// The estimate follows the clock of this machine, and either clock may be slewed, by chrony at up to 8.3 % (`maxslewrate`).
/// A quarter of the time between the fences is more than two clocks that are slewed in opposite directions differ by.
pub(super) fn may_be_ahead(quorum_fence: Option<Fence>, own: Option<Fence>, now: u64) -> bool {
    let (quorum_fence, own) = match (quorum_fence, own) {
        (Some(quorum_fence), Some(own)) => (quorum_fence, own),
        (Some(_), None) => return true,
        (None, own) => return own.is_some_and(|own| own.get() > now),
    };
    let margin = quorum_fence.get().saturating_sub(own.get()) / 4;
    quorum_fence.get().saturating_add(margin) >= now
}

/// Whole milliseconds, rounded up: the store's lease is never shorter than the one that the client assumes.
pub(crate) fn millis(ttl: Duration) -> u64 {
    let millis = ttl.as_nanos().div_ceil(1_000_000);
    u64::try_from(millis).unwrap_or(u64::MAX)
}

/// A request. All kinds share calls, so that the requests of one claim stay in order.
enum Request {
    /// A release without waiters.
    Free(Free),
    Run(Command),
    /// An attempt without a script.
    Uncontended(Uncontended),
}

/// The answer to a request.
enum Answer {
    /// Whether the lock is free now. If not, nothing was changed.
    Freed(bool),
    Replied(Value),
    Attempted(Outcome),
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

    /// Sends an attempt without a script. If the future is dropped before the request was sent, it is never sent. If it is
    /// dropped later, the reply is discarded. Returns `None` if the request was not sent: its call also contained an attempt
    /// from before the reconnect.
    pub(crate) async fn attempt_uncontended(
        &self,
        attempt: Uncontended,
    ) -> Result<Option<(Arc<Session>, Outcome)>> {
        match self.0.send(Request::Uncontended(attempt)).await? {
            (session, Answer::Attempted(outcome)) => Ok(Some((session, outcome))),
            _ => Ok(None),
        }
    }

    /// Frees a lock without waiters, like [`attempt_uncontended`](Self::attempt_uncontended). Returns false, and changes
    /// nothing, if the claim does not hold the lock or the lock has waiters.
    pub(crate) async fn free(&self, release: Free) -> Result<Option<bool>> {
        match self.0.send(Request::Free(release)).await? {
            (_, Answer::Freed(is_free)) => Ok(Some(is_free)),
            _ => Ok(None),
        }
    }

    /// Runs a command, like [`attempt_uncontended`](Self::attempt_uncontended).
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
        let is_free = |request: &&Request| matches!(request, Request::Free(_));
        let is_run = |request: &&Request| matches!(request, Request::Run(_));
        let add = |call: &mut Words, requests: &[&Request]| match requests {
            [Request::Free(_), ..] => {
                uncontended::add_releases(call, requests.iter().filter_map(|it| it.as_free()));
            }
            _ => add_commands(call, &session, requests),
        };
        // Releases first: they free locks for the other requests.
        let calls: [(&Script, Vec<usize>); 2] =
            [(&RELEASE, indices(requests, is_free)), (&COMMANDS, indices(requests, is_run))];
        let mut pipeline = Pipeline::default();
        for (script, indices) in calls.iter().filter(|(_, indices)| !indices.is_empty()) {
            let of_call: Vec<&Request> = indices.iter().map(|index| &requests[*index]).collect();
            pipeline.command(|call| add(call.word("EVALSHA").word(&script.hash), &of_call));
        }
        let attempts: Vec<&Uncontended> =
            requests.iter().filter_map(Request::as_uncontended).collect();
        uncontended::add(&mut pipeline, &session, &attempts);
        let sent = Instant::now();
        let mut replies = session.send_all(&pipeline).await.map_err(translate)?.into_iter();
        let mut ran = [Vec::new().into_iter(), Vec::new().into_iter()];
        for ((script, indices), ran) in calls.iter().zip(&mut ran) {
            if indices.is_empty() {
                continue;
            }
            let replies = match session.unchecked(replies.next().unwrap_or(Value::Nil)) {
                Ok(reply) => calls::split(&session, reply, indices.len()),
                // Boxed, because it is rare and every attempt would reserve memory for it.
                Err(error) => {
                    Box::pin(calls::repeat(&session, script, batch, indices, error, add)).await
                }
            };
            *ran = replies.into_iter();
        }
        let [mut freed, mut ran] = ran;
        let mut outcomes =
            uncontended::read(&session, &attempts, &mut replies, sent).await.into_iter();
        let answers = requests.iter().map(|request| {
            let answer = match request {
                Request::Free(_) => {
                    freed.next().map(|reply| Ok(Answer::Freed(reply? == Value::Int(1))))
                }
                Request::Run(_) => ran.next().map(|reply| reply.map(Answer::Replied)),
                Request::Uncontended(_) => {
                    outcomes.next().map(|outcome| outcome.map(Answer::Attempted))
                }
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

/// Returns the indices of the requests of a kind.
fn indices(requests: &[Request], is_of_kind: impl Fn(&&Request) -> bool) -> Vec<usize> {
    let of_kind = requests.iter().enumerate().filter(|(_, request)| is_of_kind(request));
    of_kind.map(|(index, _)| index).collect()
}

impl Request {
    fn as_free(&self) -> Option<&Free> {
        match self {
            Self::Free(release) => Some(release),
            Self::Run(_) | Self::Uncontended(_) => None,
        }
    }

    fn as_uncontended(&self) -> Option<&Uncontended> {
        match self {
            Self::Uncontended(attempt) => Some(attempt),
            Self::Free(_) | Self::Run(_) => None,
        }
    }

    /// Returns whether the client has reconnected since the request was made, so that it must be made again.
    fn is_stale(&self, current: &Arc<Session>) -> bool {
        match self {
            // Its record has the channel of another session: pushes to it would be lost.
            Self::Run(Command { action: Action::Attempt { session, .. }, .. }) => {
                !Arc::ptr_eq(session, current)
            }
            // The clock of this server is behind that of the previous one, so a full release has to store the fence.
            Self::Free(release) => {
                may_be_ahead(release.quorum_fence, release.fence, current.clock().now())
            }
            Self::Run(_) | Self::Uncontended(_) => false,
        }
    }
}

/// Adds the keys and arguments of script commands to a call.
fn add_commands(call: &mut Words, session: &Session, requests: &[&Request]) {
    let commands = || {
        requests.iter().filter_map(|request| match request {
            Request::Run(command) => Some(command),
            Request::Free(_) | Request::Uncontended(_) => None,
        })
    };
    call.number(requests.len() * Keys::ALL.len());
    for command in commands() {
        command.keys.each(&Keys::ALL, |key| {
            call.joined(&key);
        });
    }
    for command in commands() {
        command.add_arguments(call, session);
    }
}
