//! Scripts that serve several requests in one call.

use futures_util::future::join_all;
use lockkeeper_core::coalescer::{Batch, BatchSender};
use lockkeeper_core::{Error, Result};
use redis::{RedisError, ServerErrorKind, Value};

use crate::client::resp::Words;
use crate::client::script::{Script, is_unknown_script};
use crate::client::session::{Call, Session};
use crate::error::{translate, unavailable, unexpected};

/// Splits the reply to a call for `count` requests.
pub(super) fn split(session: &Session, reply: Value, count: usize) -> Vec<Result<Value>> {
    match reply {
        Value::Array(replies) if replies.len() == count => {
            replies.into_iter().map(|reply| session.checked(reply)).collect()
        }
        other => vec![Err(unexpected(&other)); count],
    }
}

/// Runs a script again for some requests of a closed batch, after an error that may concern only one of them: `add`
/// adds their keys and arguments. Returns their replies in the order of `indices`.
///
/// A request that is no longer awaited is not sent: the next one of the same claim may be in flight.
pub(super) async fn repeat<S: BatchSender>(
    session: &Session,
    script: &Script,
    batch: &Batch<S>,
    indices: &[usize],
    mut error: RedisError,
    add: impl Fn(&mut Words, &[&S::Item]) + Sync,
) -> Vec<Result<Value>> {
    let items = batch.items().unwrap_or_default();
    let awaited = || -> Vec<usize> {
        indices.iter().copied().filter(|index| batch.is_awaited(*index)).collect()
    };
    // In the order of `indices`. A reply that is not there is one that no caller awaits.
    let ordered = |mut replies: Vec<(usize, Result<Value>)>| -> Vec<Result<Value>> {
        let mut reply = |index: &usize| {
            let at = replies.iter().position(|(of, _)| of == index);
            at.map_or_else(|| Err(unavailable("dropped")), |at| replies.swap_remove(at).1)
        };
        indices.iter().map(&mut reply).collect()
    };
    if is_unknown_script(&error) {
        let sent = awaited();
        let wanted: Vec<&S::Item> = sent.iter().map(|index| &items[*index]).collect();
        if wanted.is_empty() {
            return ordered(Vec::new());
        }
        match session.call(Call::Eval, script, |call| add(call, &wanted)).await {
            Ok(reply) => {
                let replies = split(session, reply, wanted.len());
                return ordered(sent.into_iter().zip(replies).collect());
            }
            Err(again) => error = again,
        }
    }
    let sent = awaited();
    if error.kind() != ServerErrorKind::NoPerm.into() || sent.len() <= 1 {
        let error: Error = translate(error);
        return indices.iter().map(|_| Err(error.clone())).collect();
    }
    // A key that the user may not use fails all requests of its call, so each gets a call of its own. Those that were
    // executed already are idempotent.
    let calls = sent.into_iter().map(async |index| {
        // Not all calls are sent in the first poll.
        if !batch.is_awaited(index) {
            return (index, Err(unavailable("dropped")));
        }
        let add = |call: &mut Words| add(call, &[&items[index]]);
        let reply = match session.call(Call::Evalsha, script, add).await {
            Err(error) if is_unknown_script(&error) && batch.is_awaited(index) => {
                session.call(Call::Eval, script, add).await
            }
            reply => reply,
        };
        (index, reply.map_err(translate).and_then(|reply| split(session, reply, 1).remove(0)))
    });
    ordered(join_all(calls).await)
}
