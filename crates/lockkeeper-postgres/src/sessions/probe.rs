//! Queries about a session, over another connection.
//!
//! A session that waits for a lock answers nothing, and a connection that is dead in one direction is as silent as a
//! wait.

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

/// How long it may take to end a session over another connection.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// How much of that is spent on the connections of the pool: they may be cut off, too.
const END_OVER_POOL_TIMEOUT: Duration = Duration::from_millis(500);
/// The pause between two checks whether a terminated session is gone.
const END_CHECK_INTERVAL: Duration = Duration::from_millis(10);
/// How often a query is sent whose session the server has ended for being idle.
const MAX_QUERY_ATTEMPTS: usize = 4;

impl SessionPool {
    /// Asks, over another connection, whether the session of `waiting` still waits for its lock on the server, or is
    /// executing a statement.
    pub(crate) async fn is_executing(
        self: &Arc<Self>,
        waiting: &Connection,
        request: SessionRequest<'_>,
    ) -> Result<bool> {
        let rows = self.query_about(waiting, request, statements::CONFIRM_WAIT).await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }

    /// Ends a session over another connection, and waits until it is gone: its own connection does not reach the server,
    /// or the server does not notice that it was closed. Best effort: otherwise the session ends when its idle timeout
    /// has passed.
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
            // What cut this session off may have cut off all sessions of the pool. Like the connection of a cancel
            // request, this one does not count towards the limit.
            let fresh = QueryPermit::acquire(
                &self.connect(request.ttl, Purpose::Hold).await?,
                Duration::MAX,
            );
            self.end_over(fresh.as_ref(), dead, request).await
        };
        match timeout(END_TIMEOUT, end).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::debug!(%error, pid = dead.pid, "could not end a session that is cut off");
            }
            Err(_) => {
                tracing::debug!(pid = dead.pid, "a session that is cut off did not end in time");
            }
        }
    }

    /// Terminates the session of `dead` until it is gone, over `fresh` or any session of the pool. The server frees the
    /// locks of a session before the session is gone.
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
                // The server has ended an idle session meanwhile.
                Err(_) if permit.0.connection.is_closed() && attempts < MAX_QUERY_ATTEMPTS => {
                    attempts += 1;
                }
                answer => return answer,
            }
        }
    }
}

/// What identifies a session: the arguments of `confirm_wait.sql` and `end_session.sql`.
fn identity(connection: &Connection) -> Vec<(Argument, Type)> {
    vec![(Box::new(connection.pid), Type::INT4), (Box::new(connection.started), Type::FLOAT8)]
}
