//! Questions about a session, on another connection.
//!
//! A session that waits for a lock answers nothing, and a line that is dead in one direction is as silent as a wait.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::Result;
use tokio::time::timeout;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::link::{Argument, Link};
use crate::links::{Guest, Links};
use crate::seat::Visit;
use crate::sql;

/// How long it may take to end a session from another connection.
const END_WITHIN: Duration = Duration::from_secs(2);
/// How much of that is spent on the connections that the store has: they may be cut off, too.
const END_AT_HAND_WITHIN: Duration = Duration::from_millis(500);
/// The pause between two looks at whether a terminated session is gone.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

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

    /// Ends a session from another connection, and waits until it is gone: its own does not reach the server, or the
    /// server does not hear that it was closed. Best effort: what is not ended here ends when it has been idle for its
    /// lease.
    pub(crate) async fn end_session(self: &Arc<Self>, dead: &Link, guest: Guest<'_>) {
        dead.kill();
        let end = async {
            let at_hand = timeout(END_AT_HAND_WITHIN, self.end_over(None, dead, guest));
            if let Ok(Ok(())) = at_hand.await {
                return Ok(());
            }
            // What cut this session off may have cut off all of them. Like one for a cancel, this connection is not
            // counted.
            let fresh = self.connect(guest.ttl, false).await?;
            self.end_over(Some(&fresh), dead, guest).await
        };
        match timeout(END_WITHIN, end).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::debug!(%error, pid = dead.pid, "a session that is cut off could not be ended");
            }
            Err(_) => {
                tracing::debug!(pid = dead.pid, "a session that is cut off did not end in time");
            }
        }
    }

    /// Terminates the session of `dead` until it is gone, over `fresh` or any connection of the store. The server frees
    /// what the session holds before the session is gone.
    async fn end_over(
        self: &Arc<Self>,
        fresh: Option<&Arc<Link>>,
        dead: &Link,
        guest: Guest<'_>,
    ) -> Result<()> {
        loop {
            let found = match fresh {
                Some(link) => link.ask(sql::END_SESSION, identity(dead)).await?,
                None => self.ask_about(dead, guest, sql::END_SESSION).await?,
            };
            if found.is_empty() {
                return Ok(());
            }
            tokio::time::sleep(LOOK_AGAIN).await;
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
            match answers.ask(text, identity(link)).await {
                // The server has ended an idle session meanwhile.
                Err(_) if answers.is_closed() && tries < 3 => tries += 1,
                answer => return answer,
            }
        }
    }
}

/// What identifies a session: the arguments of `confirm.sql` and `end_session.sql`.
fn identity(link: &Link) -> Vec<(Argument, Type)> {
    vec![(Box::new(link.pid), Type::INT4), (Box::new(link.started), Type::FLOAT8)]
}
