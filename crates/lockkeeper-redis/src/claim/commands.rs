//! Attempts and releases. Those that are sent at the same time share calls.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use futures_util::future::join_all;
use lockkeeper_core::coalescer::{Batch, BatchSender, Coalescer, Limits};
use lockkeeper_core::{Kind, Label, Mode, Owner, Result};
use redis::{Cmd, RedisError, ServerErrorKind, Value};
use tokio::runtime::Handle;

use super::notifications::Secret;
use crate::client::node::Sharing;
use crate::client::reconnecting::ReconnectingClient;
use crate::client::script::{Script, script};
use crate::client::session::{Call, Session, is_unknown_script};
use crate::error::{ErrorClass, classify, translate, unexpected, unwrapped};
use crate::names::Keys;

pub(crate) static COMMANDS: LazyLock<Script> =
    script!("commands_fast.lua" "common.lua" "commands.lua");
pub(crate) static DOWNGRADE: LazyLock<Script> = script!("one.lua" "common.lua" "downgrade.lua");

/// A script that runs for long delays all other clients of the server, so a call has at most 64 commands.
const SHARED: Limits =
    Limits { max_direct: 8, max_in_flight: 4, max_batch: 64, linger: Duration::ZERO };

/// An attempt or a release.
#[derive(Debug, Clone)]
pub(crate) struct Command {
    pub(crate) keys: Keys,
    pub(crate) owner: Owner,
    pub(crate) action: Action,
}

#[derive(Debug, Clone)]
pub(crate) enum Action {
    Attempt {
        mode: Mode,
        queue: bool,
        ttl: Duration,
        floor: u64,
        /// Proves the grant that answers this attempt later, if it is pushed.
        secret: Secret,
        label: Label,
    },
    Release {
        kind: Kind,
        /// Whether claims may wait without a place in the queue.
        notifies_unqueued: bool,
    },
}

impl Command {
    /// The name of the command in the script.
    fn word(&self) -> &'static str {
        match &self.action {
            Action::Attempt { mode: Mode::Exclusive, queue: true, .. } => "xq",
            Action::Attempt { mode: Mode::Exclusive, queue: false, .. } => "x",
            Action::Attempt { mode: Mode::Shared, queue: true, .. } => "sq",
            Action::Attempt { mode: Mode::Shared, queue: false, .. } => "s",
            Action::Attempt { mode: Mode::Permits { .. }, queue: true, .. } => "pq",
            Action::Attempt { mode: Mode::Permits { .. }, queue: false, .. } => "p",
            Action::Release { kind: Kind::Lock, notifies_unqueued: true } => "lt",
            Action::Release { kind: Kind::Lock, notifies_unqueued: false } => "l",
            Action::Release { kind: Kind::Semaphore, notifies_unqueued: true } => "mt",
            Action::Release { kind: Kind::Semaphore, notifies_unqueued: false } => "m",
        }
    }

    fn add_arguments(&self, call: &mut Cmd, session: &Session) {
        call.arg(self.word()).arg(self.owner.to_string());
        if let Action::Attempt { mode, ttl, floor, secret, label, .. } = &self.action {
            let (mode, take, of) = match *mode {
                Mode::Exclusive => ('x', 1, 1),
                Mode::Shared => ('s', 1, 1),
                Mode::Permits { take, of } => ('p', take, of),
            };
            let (ttl, channel, label) = (millis(*ttl), session.channel(), label.as_str());
            call.arg(ttl).arg(floor);
            call.arg(format!(" {mode} {take} {of} {ttl} "))
                .arg(format!(" {} {channel} {label}", secret.reveal()));
        }
    }
}

/// Whole milliseconds, rounded up: the store's lease is never shorter than the one that the client assumes.
pub(crate) fn millis(ttl: Duration) -> u64 {
    let millis = ttl.as_nanos().div_ceil(1_000_000);
    u64::try_from(millis).unwrap_or(u64::MAX)
}

/// The reply to a command, and the session that it came on.
pub(crate) type Reply = (Arc<Session>, Value);

/// Sends attempts and releases to one server.
#[derive(Debug, Clone)]
pub(crate) struct CommandBatcher(Coalescer<CommandSender>);

impl CommandBatcher {
    pub(super) fn new(client: Arc<ReconnectingClient>, sharing: Sharing) -> Self {
        Self(Coalescer::new(CommandSender { client }, sharing.limits(SHARED)))
    }

    /// Sends a command. Dropped before it was sent, it never is; dropped after that, its reply is discarded.
    pub(crate) fn send(&self, command: Command) -> impl Future<Output = Result<Reply>> + Send {
        self.0.send(command)
    }
}

struct CommandSender {
    client: Arc<ReconnectingClient>,
}

impl BatchSender for CommandSender {
    type Item = Command;
    type Answer = Reply;

    async fn send(&self, batch: &mut Batch<Self>) -> Result<Vec<Result<Reply>>> {
        let session = self.client.session().await?;
        let Some(commands) = batch.close() else { return Ok(Vec::new()) };
        let count = commands.len();
        let add = |call: &mut Cmd, commands: &[Command]| add_all(call, &session, commands);
        let read = |reply| (session.clone(), reply);
        match session.call(Call::Evalsha, &COMMANDS, |call| add(call, commands)).await {
            Ok(reply) => replies(&session, reply, count, read),
            // Boxed, because it is rare and every attempt would reserve memory for it.
            Err(error) => Box::pin(send_again(&session, &COMMANDS, batch, error, add, read)).await,
        }
    }

    fn runtime(&self) -> Handle {
        self.client.runtime()
    }
}

/// Adds the keys and arguments of some commands to a call.
fn add_all(call: &mut Cmd, session: &Session, commands: &[Command]) {
    call.arg(commands.len() * Keys::COUNT);
    for command in commands {
        command.keys.add_all_to(call);
    }
    for command in commands {
        command.add_arguments(call, session);
    }
}

/// Sends the requests of a batch again after an error that may be due to their call: `add` adds their keys and
/// arguments, `read` reads the reply to one of them.
///
/// A request that is no longer awaited is not sent: the next one of the same claim may be in flight.
pub(super) async fn send_again<S: BatchSender>(
    session: &Session,
    script: &Script,
    batch: &mut Batch<S>,
    mut error: RedisError,
    add: impl Fn(&mut Cmd, &[S::Item]) + Sync,
    read: impl Fn(Value) -> S::Answer + Sync,
) -> Result<Vec<Result<S::Answer>>> {
    if is_unknown_script(&error) {
        let Some(items) = batch.retain_awaited() else { return Ok(Vec::new()) };
        match session.call(Call::Eval, script, |call| add(call, items)).await {
            Ok(reply) => return replies(session, reply, items.len(), read),
            Err(again) => error = again,
        }
    }
    batch.retain_awaited();
    let (batch, items) = (&*batch, batch.items().unwrap_or_default());
    if items.is_empty() {
        return Ok(Vec::new());
    }
    if error.kind() != ServerErrorKind::NoPerm.into() || items.len() == 1 {
        return Err(translate(error));
    }
    // A key that the user may not use fails all requests of its call, so each gets a call of its own. Those that were
    // executed already are idempotent.
    let calls = items.iter().enumerate().map(async |(index, item)| {
        let add = |call: &mut Cmd| add(call, std::slice::from_ref(item));
        let reply = match session.call(Call::Evalsha, script, add).await {
            Err(error) if is_unknown_script(&error) && batch.is_awaited(index) => {
                session.call(Call::Eval, script, add).await
            }
            reply => reply,
        };
        replies(session, reply.map_err(translate)?, 1, &read)?.remove(0)
    });
    Ok(join_all(calls).await)
}

/// Takes the reply to a call with so many requests apart. `read` reads the reply to one of them.
pub(super) fn replies<A>(
    session: &Session,
    reply: Value,
    count: usize,
    read: impl Fn(Value) -> A,
) -> Result<Vec<Result<A>>> {
    let replies = match reply {
        Value::Array(replies) if replies.len() == count => replies,
        other => return Err(unexpected(&other)),
    };
    let read = |reply: Value| match reply.extract_error() {
        Ok(reply) => Ok(read(reply)),
        Err(error) => {
            let error = unwrapped(error);
            if classify(&error) == ErrorClass::Broken {
                session.gone().cancel();
            }
            Err(translate(error))
        }
    };
    Ok(replies.into_iter().map(read).collect())
}
