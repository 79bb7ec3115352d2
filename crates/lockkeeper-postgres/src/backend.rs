//! The store: its constructors and its [`Backend`] implementation.

use std::fmt;
use std::sync::Arc;

use lockkeeper_core::{
    Backend, Capabilities, Claim, ClaimSpec, Fences, Inspector, LocalQueue, Result, Slots,
};
use tokio_postgres::Config;

use crate::claim::{PostgresClaim, Store};
use crate::config::{ObjectName, Options, Settings};
use crate::local_claims::LocalClaims;
use crate::name_table::NameTable;
use crate::names::NO_KEY;
use crate::sessions::{Fencing, QueryPermit, SessionPool, Source, Tls, connection_closed};

/// Locks on a PostgreSQL server, version 14 or newer. Clones share one store.
///
/// Connections are opened on demand, and close when they have been idle for a TTL. A connection belongs to the runtime in
/// which it was opened, and closes with it.
#[derive(Clone)]
pub struct Postgres {
    /// Builds semaphores from exclusive locks, each with a local queue.
    slots: Slots,
    store: Arc<Store>,
}

impl Postgres {
    /// Creates a store from a URL, `postgres://user:password@host/database?…`, without connecting.
    ///
    /// # Errors
    ///
    /// [`Config`](lockkeeper_core::ErrorKind::Config) if the URL is malformed or has an unknown parameter.
    pub fn new(url: &str) -> Result<Self> {
        Self::from_settings(Settings::parse(url)?)
    }

    /// Creates a store from a URL, connects, and checks that the server can be used.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new), and those of the server: it cannot be reached, refuses the login, is a standby, is too
    /// old, is behind a pooler, or does not let this role draw fences.
    pub async fn connect(url: &str) -> Result<Self> {
        let store = Self::from_settings_blocking(Settings::parse(url)?).await?;
        store.check().await.map_err(|error| error.during("postgres", "connect"))?;
        Ok(store)
    }

    /// Creates a store from the driver's configuration. TLS uses the roots that the operating system trusts.
    ///
    /// # Errors
    ///
    /// [`Config`](lockkeeper_core::ErrorKind::Config) if it names no host, or requires TLS and this build has none.
    pub fn from_config(config: Config) -> Result<Self> {
        Self::from_settings(Settings::new(config)?)
    }

    /// Creates a store that takes its connections from a pool.
    ///
    /// The store never returns a connection to the pool. Each counts towards the pool's size until it closes, so the size
    /// of the pool limits the connections of the store. A pool of one connection is enough.
    #[cfg(feature = "deadpool")]
    pub fn from_pool(pool: deadpool_postgres::Pool) -> Self {
        let mut options = Options::of(&Config::new());
        options.max_connections = usize::MAX;
        Self::from_sessions(SessionPool::new(Source::Pool(pool), options.clone()), &options)
    }

    /// Creates a store on a blocking thread, because reading certificates takes milliseconds.
    pub(crate) async fn from_settings_blocking(settings: Settings) -> Result<Self> {
        let made = tokio::task::spawn_blocking(move || Self::from_settings(settings));
        made.await.unwrap_or_else(|_| Err(connection_closed()))
    }

    pub(crate) fn from_settings(settings: Settings) -> Result<Self> {
        let Settings { driver, options, root } = settings;
        let tls = Tls::new(root.as_deref(), driver.get_ssl_mode())?;
        let source = Source::Server { config: Box::new(driver), tls };
        Ok(Self::from_sessions(SessionPool::new(source, options.clone()), &options))
    }

    fn from_sessions(sessions: SessionPool, options: &Options) -> Self {
        let sessions = Arc::new(sessions);
        let (local_claims, names) = name_table(options.names_table.clone(), &sessions);
        let fencing = Arc::new(Fencing::new(options.fences, options.fence_sequence.clone()));
        let foreign_keys = options.foreign_keys;
        Self::from_store(Store { sessions, local_claims, fencing, foreign_keys, names })
    }

    fn from_store(store: Store) -> Self {
        let store = Arc::new(store);
        let queue = LocalQueue::one_by_one(Arc::new(RawBackend(store.clone())));
        Self { slots: Slots::new(Arc::new(queue)), store }
    }

    /// Accepts an [`AdvisoryKey`](crate::AdvisoryKey) as a name, to share locks with programs that choose their own keys.
    /// `foreign_keys=on` in the URL does the same.
    ///
    /// A key is passed as a name, `pg:42` or `pg:7,42`. Every name of this form then locks the advisory key with that number,
    /// so do not use this where names come from users. Without it, such names are refused with
    /// [`InvalidName`](lockkeeper_core::ErrorKind::InvalidName).
    #[must_use]
    pub fn with_foreign_keys(self) -> Self {
        Self::from_store(Store { foreign_keys: true, ..Store::clone(&self.store) })
    }

    /// Draws fences from this sequence, `name` or `schema.name`, instead of `public.lockkeeper_fence`. `fence_sequence=` in
    /// the URL does the same. All clients of a database must use the same sequence.
    ///
    /// # Errors
    ///
    /// [`Config`](lockkeeper_core::ErrorKind::Config) if it contains anything but letters, digits, `_`, `$` and `-` in ASCII.
    pub fn with_fence_sequence(self, sequence: &str) -> Result<Self> {
        let sequence = ObjectName::parse("fence_sequence", sequence)?;
        let fencing = Arc::new(Fencing::new(self.store.fencing.source, sequence));
        Ok(Self::from_store(Store { fencing, ..Store::clone(&self.store) }))
    }

    /// Writes the names of locks, for inspection, to this table, `name` or `schema.name`, instead of `public.lockkeeper_names`;
    /// with `None`, to none. `names_table=` in the URL does the same. It does not apply to locks that are already held.
    ///
    /// # Errors
    ///
    /// [`Config`](lockkeeper_core::ErrorKind::Config) if it contains anything but letters, digits, `_`, `$` and `-` in ASCII.
    pub fn with_names_table(self, table: Option<&str>) -> Result<Self> {
        let table = table.map(|table| ObjectName::parse("names_table", table)).transpose()?;
        let store = Store::clone(&self.store);
        let (local_claims, names) = name_table(table, &store.sessions);
        Ok(Self::from_store(Store { local_claims, names, ..store }))
    }

    /// Checks that the server answers, and that this role can draw fences. Connects if there is no connection.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect).
    pub async fn check(&self) -> Result<()> {
        let permit = self.query_permit().await?;
        permit.0.connection.ping().await?;
        self.check_fences(&permit).await
    }

    /// Checks that this role can draw fences, over the session of a permit.
    pub(crate) async fn check_fences(&self, QueryPermit(session): &QueryPermit) -> Result<()> {
        self.store.fencing.check(&session.connection).await
    }

    pub(crate) fn names(&self) -> Option<&NameTable> {
        self.store.names.as_ref()
    }

    pub(crate) async fn query_permit(&self) -> Result<QueryPermit> {
        self.store.sessions.query_permit_without(NO_KEY).await
    }
}

/// Creates the table of this process's claims, and the table of names.
fn name_table(
    table: Option<ObjectName>,
    sessions: &Arc<SessionPool>,
) -> (Arc<LocalClaims>, Option<NameTable>) {
    let local_claims = Arc::new(LocalClaims::new(table.is_some()));
    let new = |table| NameTable::new(table, sessions.clone(), local_claims.clone());
    let names = table.map(new);
    (local_claims, names)
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres").field("sessions", &self.store.sessions).finish_non_exhaustive()
    }
}

/// The store without semaphores, which [`Slots`] adds, and without the queue of local waiters, which [`LocalQueue`] adds.
#[derive(Debug)]
pub(crate) struct RawBackend(pub(crate) Arc<Store>);

impl Backend for RawBackend {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            leases: false,
            fair: true,
            push: true,
            shared: true,
            permits: false,
            downgrade: true,
            fences: if self.0.fencing.is_on() { Fences::Rising } else { Fences::None },
        }
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        let key = self.0.key_of(&spec.name)?;
        Ok(Box::new(PostgresClaim::new(self.0.clone(), spec, key)))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        Some(self)
    }
}

impl Backend for Postgres {
    fn name(&self) -> &'static str {
        self.slots.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.slots.capabilities()
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        self.slots.claim(spec)
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.slots.inspector()
    }
}
