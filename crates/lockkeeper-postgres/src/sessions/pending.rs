//! Queries in flight that lock or unlock a key.
//!
//! A query outlives the future that awaits it. If that future is dropped, the next call of the claim receives the answer. So
//! no answer is lost, and the client always learns whether the session holds the lock.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use lockkeeper_core::{BoxFuture, Fence, Label, Release, Result};
use tokio::time::Instant;
use tokio_postgres::error::SqlState;

use super::batch::{Try, TryAnswer};
use super::connection::Connection;
use super::fencing::Fencing;
use super::pool::{SessionPool, SessionRequest};
use super::session::{ReleaseInProgress, Session, SessionSlot};
use super::statements::{Operation, Statement};
use crate::config::FenceSource;
use crate::error::{is_wait_over, translate, unavailable};
use crate::names::{AdvisoryKey, Form, NO_KEY};

/// The pause between two cancel requests for a wait. One that arrives before the wait has no effect.
const CANCEL_INTERVAL: Duration = Duration::from_millis(200);
/// How many cancel requests are sent for a wait. If none ends it, the connection is dead.
const MAX_CANCELS: usize = 5;
/// The timeout for sending a cancel request, and for repeating it.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(2);
/// How many times an unlock is sent if late cancel requests end it.
const MAX_UNLOCK_ATTEMPTS: usize = 5;

/// A granted lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Granted {
    pub(crate) fence: Option<Fence>,
    /// A time at which the session was alive. The validity counts from here.
    pub(crate) alive_at: Instant,
}

/// A try or a wait that has been sent, or is being sent. After an error, the session does not hold the lock.
pub(crate) struct PendingQuery {
    pub(crate) slot: SessionSlot,
    pub(crate) answer: BoxFuture<'static, Result<Option<Granted>>>,
    /// Since when the server has not confirmed that it executes the query.
    pub(crate) unconfirmed_since: Option<Instant>,
}

impl fmt::Debug for PendingQuery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingQuery").field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl PendingQuery {
    /// Tries to lock, without waiting for other holders.
    pub(crate) fn attempt(slot: SessionSlot, shared: bool, fencing: Arc<Fencing>) -> Self {
        let (session, key) = (slot.session.clone(), slot.key);
        let answer = Box::pin(async move {
            let (alive_at, before) = (Instant::now(), fencing.highest());
            let answer = match key.0 {
                Form::One(key) if fencing.is_on() => {
                    try_fenced(&session, Try { key, shared }, fencing.source).await?
                }
                _ => try_alone(&session.connection, key, shared, fencing.source).await?,
            };
            let Some(value) = answer else { return Ok(None) };
            let fence = accept(&session.connection, &fencing, key, value, (before, shared)).await?;
            Ok(Some(Granted { fence, alive_at }))
        });
        Self { slot, answer, unconfirmed_since: None }
    }

    /// Waits for the lock on the server, for at most `limit` if there is one.
    pub(crate) fn wait(
        slot: SessionSlot,
        shared: bool,
        fencing: Arc<Fencing>,
        limit: Option<Duration>,
    ) -> Self {
        let (session, key) = (slot.session.clone(), slot.key);
        let statement = Statement::new(Operation::Wait { fences: fencing.source }, shared, key);
        let answer = Box::pin(async move {
            let connection = &session.connection;
            // Zero would mean no limit.
            let limit = limit.map(|limit| {
                limit.clamp(Duration::from_millis(1), Duration::from_millis(i32::MAX as u64))
            });
            connection.set_lock_timeout(limit.unwrap_or_default()).await?;
            let before = fencing.highest();
            let (sent, answer) = connection.wait(statement, key).await?;
            let error = match answer {
                Ok(row) => {
                    let row = row.ok_or_else(no_answer)?;
                    let waited = Duration::try_from_secs_f64(row.get(0)).unwrap_or_default();
                    let alive_at = connection.record_wait(sent, waited);
                    let value = if fencing.is_on() { row.get(1) } else { None };
                    let fence = accept(connection, &fencing, key, value, (before, shared)).await?;
                    return Ok(Some(Granted { fence, alive_at }));
                }
                Err(error) => error,
            };
            // The server may grant the lock and still answer with an error: see `tests/sessions/granted_despite_errors.rs`.
            unlock(connection, shared, key).await?;
            if is_wait_over(&error) { Ok(None) } else { Err(translate(error)) }
        });
        Self { slot, answer, unconfirmed_since: None }
    }

    /// Sends the query now, and not when the answer is first polled.
    pub(crate) fn send(mut self, context: &mut Context<'_>) -> Self {
        if let Poll::Ready(answer) = self.answer.as_mut().poll(context) {
            self.answer = Box::pin(std::future::ready(answer));
        }
        self
    }

    /// Abandons a try. Awaits its answer, which does not depend on other holders, and unlocks the key if it was granted.
    pub(crate) async fn abandon_try(self, context: ReleaseContext) -> Result<Release> {
        let Self { slot, answer, .. } = self;
        if let Ok(Some(_)) = context.release_answer(&slot.session, answer).await? {
            return release(slot, context, HeldModes::One).await;
        }
        slot.end_unused();
        Ok(Release::WasNotHeld)
    }

    /// Cancels a wait, and unlocks the key if it was granted nevertheless.
    ///
    /// The server does not confirm cancel requests. One that arrives after the end of the wait would end the next statement on
    /// the connection. So the connection is used again only if every cancel request has ended a statement.
    pub(crate) async fn abandon_wait(self, context: ReleaseContext) -> Result<Release> {
        let Self { slot, mut answer, .. } = self;
        let connection = slot.session.connection.clone();
        let (mut sent, cancelled_before) = (0, connection.cancelled_statements());
        // The wait may have ended already.
        let mut ended = poll_once(&mut answer).await;
        let started = Instant::now();
        while ended.is_none() && sent < MAX_CANCELS && started.elapsed() < CANCEL_TIMEOUT {
            sent += 1;
            let cancel = context.pool.cancel(&connection);
            let accepted = tokio::time::timeout(CANCEL_TIMEOUT, cancel).await;
            ended = tokio::time::timeout(CANCEL_INTERVAL, &mut answer).await.ok();
            if !matches!(accepted, Ok(Ok(()))) {
                break;
            }
        }
        let arrived = connection.cancelled_statements() - cancelled_before;
        match ended {
            Some(Ok(Some(_))) if sent == 0 => return release(slot, context, HeldModes::One).await,
            Some(Ok(Some(_))) => {
                // Granted despite the cancel request, which may still be in flight.
                let unlock = unlock(&connection, context.shared, slot.key);
                let held = context.release_answer(&slot.session, unlock).await??;
                return Ok(if held { Release::Released } else { Release::WasNotHeld });
            }
            Some(Ok(None) | Err(_)) if arrived >= sent => slot.end_unused(),
            // Dropping the slot closes the connection.
            Some(_) => {}
            // The cancel requests had no effect, so the connection is dead. The server may still grant the lock.
            None => context.end_session(&connection).await,
        }
        Ok(Release::WasNotHeld)
    }
}

/// Tries to lock a key with a fence, perhaps in a batch with other tries of the session. Returns `Some` if the lock was
/// granted, with the value of its fence, as [`try_alone`] does.
async fn try_fenced(
    session: &Session,
    item: Try,
    fences: FenceSource,
) -> Result<Option<Option<i64>>> {
    let error = match session.tries.send(item).await {
        Ok(TryAnswer::Granted(value)) => return Ok(Some(Some(value))),
        Ok(TryAnswer::Contended) => return Ok(None),
        Ok(TryAnswer::Failed(error)) => Some(error),
        // The cause may be another key of the batch.
        Ok(TryAnswer::BatchFailed) | Err(_) => None,
    };
    // Boxed because it is rare and would enlarge the future of every try.
    Box::pin(async {
        let (connection, key) = (&session.connection, AdvisoryKey::from_i64(item.key));
        // The lock may have been granted before the error.
        unlock(connection, item.shared, key).await?;
        match error {
            Some(error) if error.code() != Some(&SqlState::QUERY_CANCELED) => Err(translate(error)),
            // Sent alone, this try has its own answer.
            _ => try_alone(connection, key, item.shared, fences).await,
        }
    })
    .await
}

/// Tries to lock a key. Returns `Some` if the lock was granted, with the value that was drawn for its fence, if any.
async fn try_alone(
    connection: &Connection,
    key: AdvisoryKey,
    shared: bool,
    fences: FenceSource,
) -> Result<Option<Option<i64>>> {
    let statement = Statement::new(Operation::Try { fences }, shared, key);
    let mut cancels = 0;
    loop {
        let error = match connection.execute(statement, key).await? {
            Ok(row) => {
                let row = row.ok_or_else(no_answer)?;
                return Ok(match fences {
                    FenceSource::Off => row.get::<_, bool>(0).then_some(None),
                    _ => row.get::<_, Option<i64>>(0).map(Some),
                });
            }
            Err(error) => error,
        };
        // The lock may have been granted before the error.
        unlock(connection, shared, key).await?;
        // A cancelled try has no result. The key is unlocked, so the try can be sent again.
        if error.code() != Some(&SqlState::QUERY_CANCELED) || cancels == MAX_CANCELS {
            return Err(translate(error));
        }
        cancels += 1;
    }
}

fn no_answer() -> lockkeeper_core::Error {
    unavailable("the server sent no answer")
}

/// The properties of a claim that its release needs, because it may outlive the claim.
pub(crate) struct ReleaseContext {
    pub(crate) pool: Arc<SessionPool>,
    pub(crate) ttl: Duration,
    pub(crate) label: Label,
    pub(crate) shared: bool,
}

impl ReleaseContext {
    /// Awaits the answer to a release, and ends the session if there is none within [`Session::release_timeout`].
    async fn release_answer<T>(
        &self,
        session: &Arc<Session>,
        answer: impl Future<Output = T>,
    ) -> Result<T> {
        let _release = ReleaseInProgress::new(session);
        let started = Instant::now();
        let mut answer = std::pin::pin!(answer);
        loop {
            let timeout = session.release_timeout();
            if let Ok(answer) = tokio::time::timeout(timeout, &mut answer).await {
                return Ok(answer);
            }
            if session.can_be_ended() {
                self.end_session(&session.connection).await;
                return Err(unavailable(format!(
                    "the server did not answer the release within {:.1?}: its session was ended",
                    started.elapsed()
                )));
            }
        }
    }

    async fn end_session(&self, connection: &Connection) {
        let (ttl, label) = (self.ttl, self.label.as_str());
        let request = SessionRequest { key: NO_KEY, ttl, label, fencing: None };
        self.pool.end_session(connection, request).await;
    }
}

/// Returns a future's output if it is ready.
pub(crate) async fn poll_once<T>(future: &mut BoxFuture<'_, T>) -> Option<T> {
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// Returns the fence of a grant. If it is too low or cannot be flushed, unlocks the key and returns an error.
async fn accept(
    connection: &Arc<Connection>,
    fencing: &Arc<Fencing>,
    key: AdvisoryKey,
    value: Option<i64>,
    drawn: (u64, bool),
) -> Result<Option<Fence>> {
    let Some(value) = value else { return Ok(None) };
    let accepted = match fencing.accept(connection, value, drawn) {
        Ok(fence) => fencing.limit_unflushed(connection, fence).await.map(|()| fence),
        Err(error) => Err(error),
    };
    match accepted {
        Ok(fence) => Ok(Some(fence)),
        // Boxed because it is rare and would enlarge the future of every claim.
        Err(error) => Box::pin(unlock(connection, drawn.1, key)).await.and(Err(error)),
    }
}

/// Unlocks a key, and returns whether the session held it. Closes the connection on an error, because the session may still
/// hold the key.
async fn unlock(connection: &Connection, shared: bool, key: AdvisoryKey) -> Result<bool> {
    let statement = Statement::new(Operation::Unlock, shared, key);
    for _ in 0..MAX_UNLOCK_ATTEMPTS {
        let error = match connection.execute(statement, key).await {
            Ok(Ok(row)) => return Ok(row.is_some_and(|row| row.get(0))),
            // A late cancel request, meant for the wait before it, ended the unlock.
            Ok(Err(error)) if error.code() == Some(&SqlState::QUERY_CANCELED) => continue,
            Ok(Err(error)) => translate(error),
            // The statement could not be prepared.
            Err(error) => error,
        };
        connection.close();
        return Err(error);
    }
    connection.close();
    Err(unavailable("the server cancelled every unlock: its session was ended"))
}

/// The modes in which a session may hold a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeldModes {
    /// The mode of the claim.
    One,
    /// Exclusive, shared or both, after a downgrade was sent.
    Either,
}

/// Releases a lock.
pub(crate) async fn release(
    slot: SessionSlot,
    context: ReleaseContext,
    modes: HeldModes,
) -> Result<Release> {
    let connection = slot.session.connection.clone();
    if connection.is_closed() || connection.has_expired() {
        // The session has ended, or the server is about to end it.
        return Ok(Release::WasNotHeld);
    }
    let unlocked = context.release_answer(&slot.session, async {
        let mut held = unlock(&connection, context.shared, slot.key).await?;
        if modes == HeldModes::Either {
            held |= unlock(&connection, !context.shared, slot.key).await?;
        }
        Ok(held)
    });
    match unlocked.await? {
        Ok(held) => {
            slot.end_unlocked();
            Ok(if held { Release::Released } else { Release::WasNotHeld })
        }
        // The session has ended, and its locks are free.
        Err(_) if connection.is_closed() => Ok(Release::WasNotHeld),
        Err(error) => Err(error),
    }
}

/// Turns an exclusive lock into a shared one. Idempotent.
pub(crate) async fn downgrade(slot: &SessionSlot) -> Result<()> {
    let connection = &slot.session.connection;
    let share = Statement::new(Operation::Share, true, slot.key);
    connection.execute(share, slot.key).await?.map_err(translate)?;
    unlock(connection, false, slot.key).await.map(drop)
}
