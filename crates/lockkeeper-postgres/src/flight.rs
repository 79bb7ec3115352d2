//! A question about a lock that is under way, and how it ends.
//!
//! It outlives whoever asks: a future that is dropped leaves the question where it was, and the next
//! call finds its answer. So no answer is ever lost on this side, and whatever became of a question, in
//! the end it is known whether the session has the lock.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use lockkeeper_core::{BoxFuture, Fence, Label, Release, Result};
use tokio::time::Instant;
use tokio_postgres::error::SqlState;

use crate::error::{gave_up, translate, unavailable};
use crate::key::{Form, Key, NO_KEY};
use crate::link::Link;
use crate::links::{Guest, Links};
use crate::seat::Seat;
use crate::sql::{Statement, Verb};
use crate::together::Turn;

/// How often a cancelled wait is cancelled again: the first may have come before the wait did.
const CANCEL_AGAIN: Duration = Duration::from_millis(200);
/// How many cancels of a wait are sent. Then its line is dead.
const MOST_CANCELS: usize = 5;
/// How long the server may take to let us in for a cancel, and how long cancels are repeated.
const CANCEL_WITHIN: Duration = Duration::from_secs(2);
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
            let mut cancels = 0;
            loop {
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
                // The lock may have been granted before the error.
                unlock(&link, shared, key).await?;
                // A cancel is no answer: nothing is held now, so the try is sent again.
                if error.code() != Some(&SqlState::QUERY_CANCELED) || cancels == MOST_CANCELS {
                    return Err(translate(error));
                }
                cancels += 1;
            }
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
    pub(crate) async fn abandon(self, farewell: Farewell, waits: bool) -> Result<Release> {
        if waits { self.abandon_wait(farewell).await } else { self.abandon_try(farewell).await }
    }

    /// Awaits the answer to a try, which comes at once if it comes at all.
    async fn abandon_try(self, farewell: Farewell) -> Result<Release> {
        let Self { seat, answer, .. } = self;
        if let Ok(Some(_)) = farewell.last_answer(&seat.link, answer).await? {
            return release(seat, farewell, false).await;
        }
        seat.leave();
        Ok(Release::WasNotHeld)
    }

    /// Cancels a wait. The driver sends a cancel and does not learn when it arrives. One that has not ended the wait
    /// would end the next statement on the connection, so the connection is used again only if every cancel that
    /// was sent has ended a statement.
    async fn abandon_wait(self, farewell: Farewell) -> Result<Release> {
        let Self { seat, mut answer, .. } = self;
        let (mut sent, seen) = (0, seat.link.cancels());
        // It may have ended already.
        let mut ended = at_once(&mut answer).await;
        let began = Instant::now();
        while ended.is_none() && sent < MOST_CANCELS && began.elapsed() < CANCEL_WITHIN {
            sent += 1;
            let cancel = farewell.links.cancel(&seat.link);
            let cancelled = tokio::time::timeout(CANCEL_WITHIN, cancel).await;
            ended = tokio::time::timeout(CANCEL_AGAIN, &mut answer).await.ok();
            if !matches!(cancelled, Ok(Ok(()))) {
                break;
            }
        }
        let arrived = seat.link.cancels() - seen;
        match ended {
            Some(Ok(Some(_))) if sent == 0 => return release(seat, farewell, false).await,
            Some(Ok(Some(_))) => {
                // Granted in spite of the cancel, which may still be on its way.
                let unlock = unlock(&seat.link, farewell.shared, seat.key);
                let held = farewell.last_answer(&seat.link, unlock).await??;
                return Ok(if held { Release::Released } else { Release::WasNotHeld });
            }
            Some(Ok(None) | Err(_)) if arrived >= sent => seat.leave(),
            // Dropping the seat ends the connection.
            Some(_) => {}
            // Neither the wait nor a cancel is answered: the line is dead, and the wait may be granted unheard.
            None => farewell.end_session(&seat.link).await,
        }
        Ok(Release::WasNotHeld)
    }
}

/// What it takes to give a lock back.
pub(crate) struct Farewell {
    pub(crate) links: Arc<Links>,
    pub(crate) ttl: Duration,
    pub(crate) label: Label,
    pub(crate) shared: bool,
}

impl Farewell {
    /// Awaits the answer to a release for as long as another claim relies on the session, and for some seconds if none
    /// does; then ends the session. So a release ends some seconds after the server has fallen silent, and a lease after that at
    /// the latest.
    async fn last_answer<T>(&self, link: &Arc<Link>, answer: impl Future<Output = T>) -> Result<T> {
        let _leaving = link.leaving();
        let began = Instant::now();
        let mut answer = std::pin::pin!(answer);
        loop {
            if let Ok(answer) = tokio::time::timeout(link.leave_within(), &mut answer).await {
                return Ok(answer);
            }
            if link.is_done_with() {
                self.end_session(link).await;
                return Err(unavailable(format!(
                    "no answer to the release within {:.1?}: its session was ended",
                    began.elapsed()
                )));
            }
        }
    }

    async fn end_session(&self, link: &Link) {
        let guest = Guest { key: NO_KEY, ttl: self.ttl, label: self.label.as_str() };
        self.links.end_session(link, guest).await;
    }
}

/// A future's output, if it is there already.
pub(crate) async fn at_once<T>(future: &mut BoxFuture<'_, T>) -> Option<T> {
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

fn fence(link: &Link, xid: i64) -> Option<Fence> {
    const XID_BITS: u32 = 48;
    let xid = xid.cast_unsigned() & ((1 << XID_BITS) - 1);
    Fence::new((link.timeline & 0x7fff) << XID_BITS | xid)
}

/// Unlocks a key, and returns whether the session had it. On an error the session may have it still, so its connection
/// is ended.
async fn unlock(link: &Link, shared: bool, key: Key) -> Result<bool> {
    let statement = Statement::new(Verb::Unlock, shared, key);
    for _ in 0..UNLOCK_TRIES {
        let error = match link.act(statement, key).await {
            Ok(Ok(row)) => return Ok(row.is_some_and(|row| row.get(0))),
            // A cancel that was meant for the wait before it.
            Ok(Err(error)) if error.code() == Some(&SqlState::QUERY_CANCELED) => continue,
            Ok(Err(error)) => translate(error),
            // The statement could not be prepared.
            Err(error) => error,
        };
        link.kill();
        return Err(error);
    }
    link.kill();
    Err(unavailable("the server cancels every unlock"))
}

/// Gives a lock back. `both`: it may be held in either mode, or in both.
pub(crate) async fn release(seat: Seat, farewell: Farewell, both: bool) -> Result<Release> {
    let link: Arc<Link> = seat.link.clone();
    if link.is_closed() || link.has_lapsed() {
        // What has ended has ended, even if the server is late to say so.
        return Ok(Release::WasNotHeld);
    }
    let unlocked = farewell.last_answer(&link, async {
        let mut held = unlock(&link, farewell.shared, seat.key).await?;
        if both {
            held |= unlock(&link, !farewell.shared, seat.key).await?;
        }
        Ok(held)
    });
    match unlocked.await? {
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
