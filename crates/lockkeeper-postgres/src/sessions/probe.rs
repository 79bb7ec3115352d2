//! Queries about a session over another connection.
//!
//! A session that waits for a lock sends nothing. Only over another connection can the client distinguish such a wait from a
//! connection that is dead in one direction.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::Result;
use tokio::time::timeout;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::connection::Connection;
use super::pool::{SessionPool, SessionRequest};
use super::session::{Argument, Purpose, QueryPermit};
use super::statements;

/// The timeout for ending a session over another connection.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// The part of that timeout for which sessions of the pool are used. They may be unreachable, too.
const END_OVER_POOL_TIMEOUT: Duration = Duration::from_millis(500);
/// The pause between two checks whether a terminated session has ended.
const END_CHECK_INTERVAL: Duration = Duration::from_millis(10);
/// How many times a query is sent if its session turns out to have ended.
const MAX_QUERY_ATTEMPTS: usize = 4;

impl SessionPool {
    /// Returns whether the session of `waiting` waits for its lock on the server, or executes a statement.
    pub(crate) async fn is_executing(
        self: &Arc<Self>,
        waiting: &Connection,
        request: SessionRequest<'_>,
    ) -> Result<bool> {
        let rows = self.query_about(waiting, request, statements::CONFIRM_WAIT).await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }

    /// Terminates a session over another connection, and waits until it has ended. For sessions whose own connection does not
    /// reach the server. Best effort: if it fails, the session ends with its idle timeout.
    pub(crate) async fn end_session(
        self: &Arc<Self>,
        dead: &Connection,
        request: SessionRequest<'_>,
    ) {
        dead.close();
        let end = async {
            let over_pool = timeout(END_OVER_POOL_TIMEOUT, self.end_over(None, dead, request));
            if let Ok(Ok(())) = over_pool.await {
                return Ok(());
            }
            // All sessions of the pool may be unreachable, too. The new session does not count towards the limit.
            let fresh = QueryPermit::acquire(
                &self.connect(request.ttl, Purpose::Hold).await?,
                Duration::MAX,
            );
            self.end_over(fresh.as_ref(), dead, request).await
        };
        match timeout(END_TIMEOUT, end).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::debug!(%error, pid = dead.pid, "could not terminate an unreachable session");
            }
            Err(_) => {
                tracing::debug!(
                    pid = dead.pid,
                    "an unreachable session did not end within {END_TIMEOUT:?}"
                );
            }
        }
    }

    /// Terminates the session of `dead` over `fresh` or any session of the pool, and repeats this until the session has ended.
    /// The server frees the locks of a session before it removes the session.
    async fn end_over(
        self: &Arc<Self>,
        fresh: Option<&QueryPermit>,
        dead: &Connection,
        request: SessionRequest<'_>,
    ) -> Result<()> {
        loop {
            let found = match fresh {
                Some(permit) => permit.query(statements::END_SESSION, identity(dead)).await?,
                None => self.query_about(dead, request, statements::END_SESSION).await?,
            };
            if found.is_empty() {
                return Ok(());
            }
            tokio::time::sleep(END_CHECK_INTERVAL).await;
        }
    }

    /// Sends a query about the session of `connection` over another connection.
    async fn query_about(
        self: &Arc<Self>,
        connection: &Connection,
        request: SessionRequest<'_>,
        text: &'static str,
    ) -> Result<Vec<Row>> {
        let mut attempts = 1;
        loop {
            let permit = self.query_permit(request).await?;
            match permit.query(text, identity(connection)).await {
                // The server had ended this session because it was idle.
                Err(_) if permit.0.connection.is_closed() && attempts < MAX_QUERY_ATTEMPTS => {
                    attempts += 1;
                }
                answer => return answer,
            }
        }
    }
}

/// Returns the arguments of `confirm_wait.sql` and `end_session.sql`, which identify a session.
fn identity(connection: &Connection) -> Vec<(Argument, Type)> {
    vec![(Box::new(connection.pid), Type::INT4), (Box::new(connection.started), Type::FLOAT8)]
}
