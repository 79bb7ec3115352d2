//! A question about a lock that is under way, and how it ends.
//!
//! It outlives whoever asks: a future that is dropped leaves the question where it was, and the next
//! call finds its answer. So no answer is ever lost on this side, and whatever became of a question, in
//! the end it is known whether the session has the lock.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use lockkeeper_core::{BoxFuture, Fence, Release, Result};
use tokio::time::Instant;
use tokio_postgres::error::SqlState;

use crate::error::{gave_up, translate, unavailable};
use crate::key::{Form, Key};
use crate::link::{Link, Seat};
use crate::links::Links;
use crate::sql::{Statement, Verb};
use crate::together::Turn;

/// How often a cancelled wait is cancelled again: the first may have come before the wait did.
const CANCEL_AGAIN: Duration = Duration::from_millis(200);
/// How long the server may take to let us in for a cancel.
const CANCEL_WITHIN: Duration = Duration::from_secs(5);
/// How often an unlock is sent again that was hit by a late cancel.
const UNLOCK_TRIES: usize = 5;

/// A lock that was granted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Granted {
    pub(crate) fence: Option<Fence>,
    /// The session has lived since then, at least.
    pub(crate) since: Instant,
}

/// A question that has been, or is being, sent. Its answer is an error only if the session has not, or
/// no more, got the lock.
pub(crate) struct Flight {
    pub(crate) seat: Seat,
    pub(crate) answer: BoxFuture<'static, Result<Option<Granted>>>,
    /// Since when the server has not confirmed that it is under way there.
    pub(crate) doubted: Option<Instant>,
}

impl fmt::Debug for Flight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flight").field("seat", &self.seat).finish_non_exhaustive()
    }
}

impl Flight {
    /// Asks without waiting for others.
    pub(crate) fn attempt(seat: Seat, shared: bool, fenced: bool) -> Self {
        let (link, key) = (seat.link.clone(), seat.key);
        let statement = Statement::new(Verb::Try { fenced }, shared, key);
        let answer = Box::pin(async move {
            let since = Instant::now();
            let turn = fenced.then(|| Turn::take(&link));
            if let (Some(turn), Form::One(number)) = (&turn, key.0)
                && let Some(answer) = turn.together(number, shared).await
            {
                if let Ok(xid) = answer {
                    return Ok(xid.map(|xid| Granted { fence: fence(&link, xid), since }));
                }
                // It may have been another's fault, and this one have been granted before that: alone, it finds out.
                unlock(&link, shared, key).await?;
            }
            let error = match link.act(statement, key).await? {
                Ok(row) => {
                    let Some(row) = row else { return Err(unavailable("no answer")) };
                    let fence = if fenced {
                        row.get::<_, Option<i64>>(0).map(|xid| fence(&link, xid))
                    } else {
                        row.get::<_, bool>(0).then_some(None)
                    };
                    return Ok(fence.map(|fence| Granted { fence, since }));
                }
                Err(error) => error,
            };
            // It may have been granted before whatever it was went wrong.
            unlock(&link, shared, key).await?;
            Err(translate(error))
        });
        Self { seat, answer, doubted: None }
    }

    /// Waits for the lock, on the server; for at most `limit`, if there is one.
    pub(crate) fn wait(seat: Seat, shared: bool, fenced: bool, limit: Option<Duration>) -> Self {
        let (link, key) = (seat.link.clone(), seat.key);
        let statement = Statement::new(Verb::Wait { fenced }, shared, key);
        let answer = Box::pin(async move {
            // Zero would be for ever.
            let limit = limit.map(|limit| {
                limit.clamp(Duration::from_millis(1), Duration::from_millis(i32::MAX as u64))
            });
            link.limit_wait(limit.unwrap_or_default()).await?;
            let (asked, answer) = link.wait(statement, key).await?;
            let error = match answer {
                Ok(row) => {
                    let Some(row) = row else { return Err(unavailable("no answer")) };
                    let waited = Duration::try_from_secs_f64(row.get(0)).unwrap_or_default();
                    let since = link.waited(asked, waited);
                    let fence = if fenced { fence(&link, row.get(1)) } else { None };
                    return Ok(Some(Granted { fence, since }));
                }
                Err(error) => error,
            };
            // The server may give a wait up and have granted it all the same.
            unlock(&link, shared, key).await?;
            if gave_up(&error) { Ok(None) } else { Err(translate(error)) }
        });
        Self { seat, answer, doubted: None }
    }

    /// Sends it now, and not when somebody next looks for the answer.
    pub(crate) fn send(mut self, context: &mut Context<'_>) -> Self {
        if let Poll::Ready(answer) = self.answer.as_mut().poll(context) {
            self.answer = Box::pin(std::future::ready(answer));
        }
        self
    }

    /// Ends it, whatever it was, so that the session has not got the lock.
    pub(crate) async fn abandon(self, links: &Links, shared: bool, waits: bool) -> Result<Release> {
        let Self { seat, mut answer, .. } = self;
        let mut cancels = 0;
        let answer = if waits {
            loop {
                let cancel = tokio::time::timeout(CANCEL_WITHIN, links.cancel(&seat.link));
                if !matches!(cancel.await, Ok(Ok(()))) {
                    // It cannot be cancelled. If it does not end by itself, it ends with its connection.
                    cancels = usize::MAX;
                    break tokio::time::timeout(CANCEL_AGAIN, &mut answer).await;
                }
                cancels += 1;
                let ended = tokio::time::timeout(CANCEL_AGAIN, &mut answer).await;
                if ended.is_ok() {
                    break ended;
                }
            }
        } else {
            Ok(answer.await)
        };
        match answer {
            Ok(Ok(Some(_))) if cancels == 0 => release(seat, shared, false).await,
            Ok(Ok(Some(_))) => {
                // Granted in spite of the cancel, which may still be under way and would end whatever is
                // asked here next: what was granted is given back, and the connection is not used again.
                let held = unlock(&seat.link, shared, seat.key).await?;
                Ok(if held { Release::Released } else { Release::WasNotHeld })
            }
            Ok(Ok(None) | Err(_)) if cancels <= 1 => {
                seat.leave();
                Ok(Release::WasNotHeld)
            }
            // Still waiting, or there may be a cancel too many. Dropping the seat ends the connection.
            _ => Ok(Release::WasNotHeld),
        }
    }
}

fn fence(link: &Link, xid: i64) -> Option<Fence> {
    const XID_BITS: u32 = 48;
    let xid = xid.cast_unsigned() & ((1 << XID_BITS) - 1);
    Fence::new((link.timeline & 0x7fff) << XID_BITS | xid)
}

/// Unlocks a key, and says whether the session had it.
async fn unlock(link: &Link, shared: bool, key: Key) -> Result<bool> {
    let statement = Statement::new(Verb::Unlock, shared, key);
    for _ in 0..UNLOCK_TRIES {
        match link.act(statement, key).await? {
            Ok(row) => return Ok(row.is_some_and(|row| row.get(0))),
            // A cancel that was meant for the wait before it.
            Err(error) if error.code() == Some(&SqlState::QUERY_CANCELED) => {}
            Err(error) => {
                link.kill();
                return Err(translate(error));
            }
        }
    }
    link.kill();
    Err(unavailable("the server cancels every unlock"))
}

/// Gives a lock back. `both`: it may be held in either mode, or in both.
pub(crate) async fn release(seat: Seat, shared: bool, both: bool) -> Result<Release> {
    let link: Arc<Link> = seat.link.clone();
    if link.is_closed() || link.has_lapsed() {
        // What has ended has ended, even if the server is late to say so.
        return Ok(Release::WasNotHeld);
    }
    let mut held = unlock(&link, shared, seat.key).await;
    if both && let Ok(held) = &mut held {
        *held |= unlock(&link, !shared, seat.key).await?;
    }
    match held {
        Ok(held) => {
            seat.vacate();
            Ok(if held { Release::Released } else { Release::WasNotHeld })
        }
        // The session is over, and its locks with it.
        Err(_) if link.is_closed() => Ok(Release::WasNotHeld),
        Err(error) => Err(error),
    }
}

/// Turns an exclusive lock into a shared one. Done again, it does no harm.
pub(crate) async fn downgrade(seat: &Seat) -> Result<()> {
    let share = Statement::new(Verb::Share, true, seat.key);
    seat.link.act(share, seat.key).await?.map_err(translate)?;
    unlock(&seat.link, false, seat.key).await.map(drop)
}
