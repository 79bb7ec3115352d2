//! A client of one server that reconnects when its session breaks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use lockkeeper_core::{BoxFuture, Error, Result};
use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_util::sync::DropGuard;

use super::events::EventHandler;
use super::identity::Identity;
use super::sentinel;
use super::session::{Opening, Session};
use super::settings::{Address, Settings};
use crate::error::unavailable;

/// The minimum pause between two attempts to connect.
const MIN_PAUSE: Duration = Duration::from_millis(50);
/// The maximum pause between two attempts to reconnect in the background.
const MAX_PAUSE: Duration = Duration::from_secs(2);

/// A client of one server.
pub(crate) struct ReconnectingClient {
    settings: Arc<Settings>,
    target: Target,
    handler: Arc<dyn EventHandler>,
    current: Mutex<Option<Arc<Session>>>,
    /// Locked by the task that connects. Other tasks wait for it.
    connecting: tokio::sync::Mutex<Connecting>,
    /// The number of failed attempts to connect.
    failures: AtomicU64,
}

/// How to find the server.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    Fixed(Address),
    /// The master that the sentinels report.
    Sentinel {
        sentinels: Vec<Address>,
        master: String,
    },
}

#[derive(Default)]
struct Connecting {
    /// The previous session.
    before: Option<Identity>,
    failure: Option<(Instant, Error)>,
}

impl ReconnectingClient {
    pub(crate) fn new(
        settings: Arc<Settings>,
        target: Target,
        handler: Arc<dyn EventHandler>,
    ) -> Arc<Self> {
        Arc::new(Self {
            settings,
            target,
            handler,
            current: Mutex::default(),
            connecting: tokio::sync::Mutex::default(),
            failures: AtomicU64::new(0),
        })
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<Session>>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(&self) -> Option<Arc<Session>> {
        self.slot().as_ref().filter(|session| !session.gone().is_cancelled()).cloned()
    }

    /// Returns an estimate of the server's clock, in microseconds. `None` if the clock cannot be read without a script.
    pub(crate) fn time(&self) -> Option<u64> {
        let session = self.current().filter(|session| session.clock().is_plain());
        session.map(|session| session.clock().now())
    }

    /// Returns the runtime for tasks that depend on the session. If that runtime hangs, so does the session.
    pub(crate) fn runtime(&self) -> Handle {
        self.current().map_or_else(Handle::current, |session| session.runtime().clone())
    }

    /// Returns the current session, or opens a new one.
    pub(crate) async fn session(self: &Arc<Self>) -> Result<Arc<Session>> {
        if let Some(session) = self.current() {
            return Ok(session);
        }
        let seen = self.failures.load(Ordering::Relaxed);
        // In a separate task: other callers wait for the same session while this one may not be polled.
        let opened = tokio::spawn(self.clone().open_session(seen)).await;
        opened.unwrap_or_else(|_| Err(unavailable("the connection is lost")))
    }

    /// Opens a session, unless another task has opened one, or has failed to since the caller counted `seen` failures.
    async fn open_session(self: Arc<Self>, seen: u64) -> Result<Arc<Session>> {
        let mut connecting = self.connecting.lock().await;
        if let Some(session) = self.current() {
            return Ok(session);
        }
        if let Some((when, error)) = &connecting.failure
            && (self.failures.load(Ordering::Relaxed) != seen || when.elapsed() < MIN_PAUSE)
        {
            return Err(error.clone());
        }
        match self.connect(connecting.before.as_ref()).await {
            Ok(session) => {
                let is_reconnect = connecting.before.replace(session.identity().clone()).is_some();
                connecting.failure = None;
                let session = Arc::new(session);
                *self.slot() = Some(session.clone());
                tokio::spawn(watch(Arc::downgrade(&self), session.clone()));
                if is_reconnect {
                    self.handler.reconnected();
                }
                Ok(session)
            }
            Err(error) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                connecting.failure = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    async fn connect(&self, before: Option<&Identity>) -> Result<Session> {
        let address = match &self.target {
            Target::Fixed(address) => address.clone(),
            Target::Sentinel { sentinels, master } => {
                sentinel::find_master(&self.settings, sentinels, master).await?
            }
        };
        let (settings, handler) = (&*self.settings, &self.handler);
        let session = Opening { settings, address: &address, before, handler }.open().await?;
        self.handler.connected(session.identity())?;
        Ok(session)
    }
}

impl Drop for ReconnectingClient {
    fn drop(&mut self) {
        if let Some(session) = self.slot().take() {
            session.gone().cancel();
        }
    }
}

impl std::fmt::Debug for ReconnectingClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReconnectingClient").field("target", &self.target).finish_non_exhaustive()
    }
}

/// Pings the server at intervals. When the session is gone, reconnects if messages are expected.
fn watch(client: Weak<ReconnectingClient>, session: Arc<Session>) -> BoxFuture<'static, ()> {
    // When the runtime ends, it drops this task, and the guard marks the session as gone, even if the task was never
    // polled.
    let end = session.gone().clone().drop_guard();
    // Boxed, because opening a session spawns this future again.
    Box::pin(ping_and_reconnect(client, session, end))
}

async fn ping_and_reconnect(
    client: Weak<ReconnectingClient>,
    session: Arc<Session>,
    end: DropGuard,
) {
    let timeout = match client.upgrade() {
        Some(client) => client.settings.command_timeout,
        None => return,
    };
    loop {
        tokio::select! {
            () = session.gone().cancelled() => break,
            () = tokio::time::sleep(timeout / 3) => {}
        }
        if !session.is_alive(timeout * 2 / 3).await {
            session.gone().cancel();
        }
    }
    drop((end, session));
    let mut pause = MIN_PAUSE;
    loop {
        // Upgraded only while it connects, so that an unused store is dropped.
        let Some(client) = client.upgrade().filter(|client| client.handler.expects_messages())
        else {
            return;
        };
        match client.session().await {
            // The new session has its own `watch` task.
            Ok(_) => return,
            Err(error) => tracing::debug!(%error, ?pause, "reconnect failed, retrying"),
        }
        drop(client);
        tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
}
