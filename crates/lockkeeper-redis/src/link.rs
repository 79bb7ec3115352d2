//! The way to one server: a connection that is looked after, and replaced when it breaks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::select_ok;
use lockkeeper_core::{BoxFuture, Error, Result};
use redis::{ProtocolVersion, Value};
use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::config::{Address, Config};
use crate::connection::{Connection, Identity, at};
use crate::error::{config as config_error, translate, unavailable};
use crate::mailbox::Mailboxes;
use crate::renewals::Renewals;
use crate::steps::Steps;
use crate::stream;
use crate::wire::Wire;

/// The least pause between two tries to connect: a server that refuses is not asked in a loop.
const LEAST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause between two tries on behalf of those who listen.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The way to one server.
pub(crate) struct Link {
    config: Arc<Config>,
    target: Target,
    mailboxes: Arc<Mailboxes>,
    pub(crate) renewals: Renewals,
    pub(crate) steps: Steps,
    current: Mutex<Option<Arc<Connection>>>,
    /// One connects, the others wait for it.
    turn: tokio::sync::Mutex<Turn>,
    /// How many tries to connect have failed.
    failures: AtomicU64,
}

/// Where the server is.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    Fixed(Address),
    /// Wherever the sentinels say that the master is.
    Sentinel {
        sentinels: Vec<Address>,
        master: String,
    },
}

/// What whoever connects has to know.
#[derive(Default)]
struct Turn {
    /// The last connection there was.
    before: Option<Identity>,
    failure: Option<(Instant, Error)>,
}

impl Link {
    pub(crate) fn new(config: Arc<Config>, target: Target) -> Arc<Self> {
        Arc::new(Self {
            config,
            target,
            mailboxes: Arc::default(),
            renewals: Renewals::default(),
            steps: Steps::default(),
            current: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            failures: AtomicU64::new(0),
        })
    }

    pub(crate) fn mailboxes(&self) -> &Mailboxes {
        &self.mailboxes
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<Connection>>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(&self) -> Option<Arc<Connection>> {
        self.slot().as_ref().filter(|connection| !connection.gone().is_cancelled()).cloned()
    }

    /// Where to run what depends on the connection: if that runtime hangs, nothing more hangs than would anyway.
    pub(crate) fn runtime(&self) -> Handle {
        self.current().map_or_else(Handle::current, |connection| connection.runtime().clone())
    }

    /// The connection, made anew if there is none that works.
    pub(crate) async fn connection(self: &Arc<Self>) -> Result<Arc<Connection>> {
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        let seen = self.failures.load(Ordering::Relaxed);
        // In a task of its own: whoever needs it may not be polled for a while, and others wait behind it.
        let made = tokio::spawn(self.clone().make_connection(seen)).await;
        made.unwrap_or_else(|_| Err(unavailable("the connection is lost")))
    }

    /// Makes a connection when its turn comes, unless another has, or has failed to, since there had been `seen`
    /// failures.
    async fn make_connection(self: Arc<Self>, seen: u64) -> Result<Arc<Connection>> {
        let mut turn = self.turn.lock().await;
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        if let Some((when, error)) = &turn.failure
            && (self.failures.load(Ordering::Relaxed) != seen || when.elapsed() < LEAST_PAUSE)
        {
            return Err(error.clone());
        }
        match self.connect(turn.before.as_ref()).await {
            Ok(connection) => {
                let again = turn.before.replace(connection.identity().clone()).is_some();
                turn.failure = None;
                let connection = Arc::new(connection);
                *self.slot() = Some(connection.clone());
                tokio::spawn(look_after(Arc::downgrade(&self), connection.clone()));
                if again {
                    // Whatever was told in the meantime is lost.
                    self.mailboxes.tell_all();
                }
                Ok(connection)
            }
            Err(error) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
                turn.failure = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    async fn connect(&self, before: Option<&Identity>) -> Result<Connection> {
        let address = match &self.target {
            Target::Fixed(address) => address.clone(),
            Target::Sentinel { sentinels, master } => self.master(sentinels, master).await?,
        };
        let connection = Connection::open(&self.config, &address, before, &self.mailboxes).await?;
        if let Some(peer) = &self.config.peer {
            peer.connected(connection.identity())?;
        }
        Ok(connection)
    }

    /// Asks all sentinels at once, and believes the first that knows.
    async fn master(&self, sentinels: &[Address], master: &str) -> Result<Address> {
        let asked = sentinels.iter().map(|sentinel| {
            Box::pin(async move {
                let answer = ask_sentinel(&self.config, sentinel, master);
                let answer = tokio::time::timeout(self.config.connect_timeout, answer).await;
                let silent = || Err(unavailable("no answer in time"));
                answer.unwrap_or_else(|_| silent()).map_err(|error| at(sentinel, &error))
            })
        });
        let (address, _) = select_ok(asked).await.map_err(|error| {
            Error::new(error.kind(), format!("no sentinel knows the master: {error}"))
        })?;
        Ok(address)
    }
}

async fn ask_sentinel(config: &Config, sentinel: &Address, master: &str) -> Result<Address> {
    let mut plain = config.clone();
    (plain.username, plain.database) = (None, 0);
    plain.password.clone_from(&config.sentinel_password);
    let gone = CancellationToken::new();
    // Sentinels of one name all know the master: any of them will do.
    let places = stream::resolve(sentinel).await?;
    let wire = Wire::open(&plain, sentinel, &places, ProtocolVersion::RESP2, None, &gone).await?;
    let mut ask = redis::cmd("SENTINEL");
    ask.arg("get-master-addr-by-name").arg(master);
    let answer = wire.ask(&ask).await.map_err(translate)?;
    if answer == Value::Nil {
        return Err(config_error(format!("it knows no master {master:?}")));
    }
    let place = redis::from_redis_value::<(String, u16)>(answer);
    let (host, port) = place.map_err(|_| unavailable("it gave no address"))?;
    Ok(Address { host, port })
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(connection) = self.slot().take() {
            connection.gone().cancel();
        }
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("target", &self.target).finish_non_exhaustive()
    }
}

/// Asks the server for a sign of life now and then; when the connection is gone, makes another for as
/// long as somebody listens.
fn look_after(link: Weak<Link>, connection: Arc<Connection>) -> BoxFuture<'static, ()> {
    // A connection lives in the runtime that made it, as this does: when that ends, both do, also if this has
    // never been polled.
    let end = connection.gone().clone().drop_guard();
    // Boxed, because what it does comes back to it.
    Box::pin(tend(link, connection, end))
}

async fn tend(link: Weak<Link>, connection: Arc<Connection>, end: DropGuard) {
    let patience = match link.upgrade() {
        Some(link) => link.config.command_timeout,
        None => return,
    };
    loop {
        tokio::select! {
            () = connection.gone().cancelled() => break,
            () = tokio::time::sleep(patience / 3) => {}
        }
        if !connection.is_alive(patience * 2 / 3).await {
            connection.gone().cancel();
        }
    }
    drop((end, connection));
    let mut pause = LEAST_PAUSE;
    loop {
        // Held only while it connects, so that a store that nobody has any more ends.
        let Some(link) = link.upgrade().filter(|link| !link.mailboxes.is_empty()) else { return };
        match link.connection().await {
            // Which has somebody to look after it.
            Ok(_) => return,
            Err(error) => tracing::debug!(%error, "connecting again"),
        }
        drop(link);
        tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
