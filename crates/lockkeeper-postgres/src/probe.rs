//! Questions about a session, on another connection.
//!
//! A session that waits for a lock answers nothing, and a line that is dead in one direction is as silent as a wait.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::Result;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::link::{Argument, Link};
use crate::links::{Guest, Links};
use crate::seat::Visit;
use crate::sql;

/// How long it may take to end a session from another connection.
const END_WITHIN: Duration = Duration::from_secs(2);

impl Links {
    /// Whether the session of `waiting` still waits for its lock on the server, or is at work. The question is sent
    /// on another connection, since a session that waits answers nothing, and a dead line is as silent as a wait.
    pub(crate) async fn is_at_work(
        self: &Arc<Self>,
        waiting: &Link,
        guest: Guest<'_>,
    ) -> Result<bool> {
        let rows = self.ask_about(waiting, guest, sql::CONFIRM).await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }

    /// Ends a session from another connection: its own does not reach the server, or the server does not hear
    /// that it was closed. Best effort: what is not ended here ends when it has been idle for its lease.
    pub(crate) async fn end_session(self: &Arc<Self>, dead: &Link, guest: Guest<'_>) {
        dead.kill();
        let ended = tokio::time::timeout(END_WITHIN, self.ask_about(dead, guest, sql::END_SESSION));
        if let Ok(Err(error)) = ended.await {
            tracing::debug!(%error, pid = dead.pid, "a session that is cut off could not be ended");
        }
    }

    /// Asks something about the session of `link`, on another connection.
    async fn ask_about(
        self: &Arc<Self>,
        link: &Link,
        guest: Guest<'_>,
        text: &'static str,
    ) -> Result<Vec<Row>> {
        let mut tries = 0;
        loop {
            let Visit(answers) = &self.visit(guest).await?;
            let (pid, started): (Argument, Argument) = (Box::new(link.pid), Box::new(link.started));
            let arguments = vec![(pid, Type::INT4), (started, Type::FLOAT8)];
            match answers.ask(text, arguments).await {
                // The server has ended an idle session meanwhile.
                Err(_) if answers.is_closed() && tries < 3 => tries += 1,
                answer => return answer,
            }
        }
    }
}
