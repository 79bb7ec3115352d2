//! Opening sessions.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use lockkeeper_core::Result;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_postgres::Config;
use tokio_util::sync::CancellationToken;

use super::super::connection::{Connection, connection_closed, idle_timeout_for};
use super::super::pooled::PooledConnection;
use super::super::session::{Purpose, Session};
use super::super::transport::Transport;
use super::{SessionPool, SessionRequest, Source, Table};
use crate::config::address;
use crate::error::{at, unavailable};

/// How often to check whether a pooled connection has closed. The pool runs its task and does not notify.
const POOLED_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A session that a background task is opening. The task does not depend on the polling of any claim.
#[derive(Clone)]
pub(super) struct Opening {
    done: watch::Receiver<Option<Result<()>>>,
    started: Instant,
}

impl Opening {
    pub(super) fn is_in_progress(&self) -> bool {
        // `has_changed` is an error if the task was dropped with its runtime.
        self.done.has_changed().is_ok() && self.done.borrow().is_none()
    }

    /// Returns whether it has taken so long that a claim of `ttl` should open another session. If a message of the server was
    /// lost, it hangs until `connect_timeout`.
    pub(super) fn is_late(&self, ttl: Duration) -> bool {
        self.started.elapsed() >= idle_timeout_for(ttl) / 2
    }

    pub(super) async fn done(mut self) -> Result<()> {
        match self.done.wait_for(Option::is_some).await {
            Ok(done) => done.clone().unwrap_or(Ok(())),
            Err(_) => Err(connection_closed()),
        }
    }
}

impl SessionPool {
    /// Returns the task that opens a session and adds it to the pool. The session counts towards the limit from now on.
    pub(super) fn open(
        self: &Arc<Self>,
        table: &mut Table,
        request: SessionRequest<'_>,
        purpose: Purpose,
    ) -> (Opening, impl Future<Output = ()> + Send + use<>) {
        let reservation = Reservation::new(self, table, purpose);
        let (pool, ttl, label) = (self.clone(), request.ttl, self.label(&request).to_owned());
        let fencing = request.fencing.cloned();
        let (sender, done) = watch::channel(None);
        let task = async move {
            let limit = pool.options.connect_timeout;
            let opened = tokio::time::timeout(limit, async {
                let session = pool.connect(ttl, purpose).await?;
                session.connection.configure_here(ttl, &label).await?;
                if let Some(fencing) = fencing {
                    fencing.prepare_here(&session.connection).await?;
                }
                Ok(session)
            });
            let opened = opened.await.unwrap_or_else(|_| {
                Err(unavailable(format!(
                    "the connection was not ready within {limit:.1?} (connect_timeout)"
                )))
            });
            let opened = opened.map_err(|error| match &pool.source {
                Source::Server { config, .. } => at(&address(config), &error),
                Source::Pool(_) => error,
            });
            let opened = opened.map(|session| pool.table().sessions.push(session));
            drop(reservation);
            sender.send_replace(Some(opened));
        };
        (Opening { done, started: Instant::now() }, task)
    }

    /// Opens a session that is not in the pool and does not count towards its limit.
    pub(in super::super) async fn connect(
        self: &Arc<Self>,
        ttl: Duration,
        purpose: Purpose,
    ) -> Result<Arc<Session>> {
        let closed = CancellationToken::new();
        let notifier = || CloseNotifier { closed: closed.clone(), freed: self.freed.clone() };
        match &self.source {
            Source::Server { config, tls } => {
                let (client, connection) = tls.connect(&with_keepalives(config, ttl)).await?;
                let notifier = notifier();
                let task = tokio::spawn(async move {
                    let _notifier = notifier;
                    connection.await;
                });
                let transport = Transport::Direct(client, task.abort_handle());
                let connection = Connection::handshake(transport, closed).await?;
                Ok(Arc::new(Session::new(connection, self.freed.clone(), self.options.fences)))
            }
            Source::Pool(pool) => {
                // A waiter that gets no connection polls instead, so it does not wait for the pool.
                let timeout = match purpose {
                    Purpose::Wait => Duration::ZERO,
                    Purpose::Hold => self.options.connect_timeout,
                };
                let transport = Transport::Pooled(PooledConnection::get(pool, timeout).await?);
                let notifier = notifier();
                let connection = Connection::handshake(transport, closed).await?;
                let session =
                    Arc::new(Session::new(connection, self.freed.clone(), self.options.fences));
                let (pool, watched) = (Arc::downgrade(self), Arc::downgrade(&session));
                tokio::spawn(async move {
                    pooled_connection_closed(&watched).await;
                    // A pooled connection closes only when it is dropped.
                    if let Some(pool) = pool.upgrade() {
                        pool.table().sessions.retain(|session| !session.connection.is_closed());
                    }
                    drop(notifier);
                });
                Ok(session)
            }
        }
    }
}

/// Returns the configuration with TCP keepalives about as frequent as those of the server. Settings of the user take
/// precedence.
pub(super) fn with_keepalives(config: &Config, ttl: Duration) -> Config {
    const UNSET: Duration = Duration::from_secs(2 * 60 * 60);
    let (mut config, idle_timeout) = (config.clone(), idle_timeout_for(ttl));
    let clamped = |time: Duration| time.clamp(Duration::from_secs(1), UNSET);
    if config.get_keepalives_idle() == UNSET {
        config.keepalives_idle(clamped(idle_timeout / 2));
    }
    if config.get_keepalives_interval().is_none() {
        config.keepalives_interval(clamped(idle_timeout / 6)).keepalives_retries(3);
    }
    if config.get_tcp_user_timeout().is_none() {
        config.tcp_user_timeout(clamped(idle_timeout));
    }
    config
}

/// Waits until a pooled connection has closed or is no longer referenced, and cancels its token.
async fn pooled_connection_closed(session: &Weak<Session>) {
    while let Some(session) = session.upgrade() {
        let closed = session.connection.closed.clone();
        if session.connection.is_closed() {
            return closed.cancel();
        }
        drop(session);
        tokio::select! {
            () = closed.cancelled() => return,
            () = tokio::time::sleep(POOLED_CHECK_INTERVAL) => {}
        }
    }
}

/// Notifies, when it is dropped, that a connection has closed: its session has ended, and another may be opened.
struct CloseNotifier {
    closed: CancellationToken,
    freed: Arc<Notify>,
}

impl Drop for CloseNotifier {
    fn drop(&mut self) {
        self.closed.cancel();
        self.freed.notify_one();
    }
}

/// Counts a session that is being opened towards the limit.
struct Reservation {
    pool: Arc<SessionPool>,
    purpose: Purpose,
}

impl Reservation {
    fn new(pool: &Arc<SessionPool>, table: &mut Table, purpose: Purpose) -> Self {
        table.opening += 1;
        table.opening_for_waiters += usize::from(purpose == Purpose::Wait);
        Self { pool: pool.clone(), purpose }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut table = self.pool.table();
        table.opening -= 1;
        table.opening_for_waiters -= usize::from(self.purpose == Purpose::Wait);
    }
}
