//! The store.

use std::fmt;
use std::sync::Arc;

use lockkeeper_core::{
    Backend, Capabilities, Claim, ClaimSpec, Error, ErrorKind, Fences, Inspector, Name, Result,
    Slots,
};
use tokio_postgres::Config;

use crate::claim::PgClaim;
use crate::config::{Options, Settings};
use crate::key::{Key, NO_KEY};
use crate::link::gone;
use crate::links::{Links, Source};
use crate::queue::Locals;
use crate::seat::Visit;
use crate::tls::Tls;

/// Locks on a PostgreSQL server, from version 14 on. Clones are the same store.
///
/// Connections are made when they are needed, and end by themselves when they no longer are. Each
/// belongs to the runtime that it was made in.
#[derive(Clone)]
pub struct Postgres {
    /// Semaphores are made of exclusive locks.
    slots: Slots,
    store: Arc<Store>,
}

impl Postgres {
    /// A store at a URL, `postgres://user:password@host/database?…`, without connecting yet.
    ///
    /// # Errors
    ///
    /// [`Config`](lockkeeper_core::ErrorKind::Config) if it is no such URL, or a parameter is not known.
    pub fn new(url: &str) -> Result<Self> {
        Self::from_settings(Settings::parse(url)?)
    }

    /// A store at a URL, after a look at whether it can be used.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and what is wrong with the server: it is not there, does not let us in, is
    /// a standby, is too old, or there is a pooler in between.
    pub async fn connect(url: &str) -> Result<Self> {
        let store = Self::from_settings_elsewhere(Settings::parse(url)?).await?;
        store.check().await?;
        Ok(store)
    }

    /// A store from the driver's own configuration. TLS as it says, with the roots that the operating
    /// system trusts.
    ///
    /// # Errors
    ///
    /// [`Config`](lockkeeper_core::ErrorKind::Config) if it names no host, or wants TLS and this build has none.
    pub fn from_config(config: Config) -> Result<Self> {
        Self::from_settings(Settings::new(config)?)
    }

    /// A store on the connections of a pool.
    ///
    /// A connection that is taken for locks does not go back to the pool: it counts as one of its for as
    /// long as it lives, and is then closed. So the pool's size is the limit, and a pool of one works.
    #[cfg(feature = "deadpool")]
    pub fn from_pool(pool: deadpool_postgres::Pool) -> Self {
        let mut options = Options::of(&Config::new());
        options.max_connections = usize::MAX;
        Self::from_links(Links::new(Source::Pool(pool), options.clone()), &options)
    }

    /// As [`from_settings`](Self::from_settings), without holding the runtime's thread up: reading certificates takes
    /// milliseconds.
    pub(crate) async fn from_settings_elsewhere(settings: Settings) -> Result<Self> {
        let made = tokio::task::spawn_blocking(move || Self::from_settings(settings));
        made.await.unwrap_or_else(|_| Err(gone()))
    }

    pub(crate) fn from_settings(settings: Settings) -> Result<Self> {
        let Settings { driver, options, root } = settings;
        let tls = Tls::new(root.as_deref(), driver.get_ssl_mode())?;
        let source = Source::Server { config: Box::new(driver), tls };
        Ok(Self::from_links(Links::new(source, options.clone()), &options))
    }

    fn from_links(links: Links, options: &Options) -> Self {
        Self::from_store(Store {
            links: Arc::new(links),
            locals: Arc::default(),
            fenced: options.fence,
            foreign_keys: options.foreign_keys,
        })
    }

    fn from_store(store: Store) -> Self {
        let store = Arc::new(store);
        Self { slots: Slots::new(Arc::new(Shared(store.clone()))), store }
    }

    /// Lets an [`AdvisoryKey`](crate::AdvisoryKey) be locked, shown and broken wherever a name can be given, to meet programs that choose their own
    /// keys. `foreign_keys=on` in the URL does the same.
    ///
    /// A `AdvisoryKey` is passed as the name that it is written as, `pg:42` or `pg:7,42`. So every such name reaches the
    /// advisory lock of that number. Without this, such names are refused with
    /// [`InvalidName`](lockkeeper_core::ErrorKind::InvalidName). Do not use it where names come from users.
    #[must_use]
    pub fn with_foreign_keys(self) -> Self {
        let Store { links, locals, fenced, .. } = &*self.store;
        let (links, locals, fenced) = (links.clone(), locals.clone(), *fenced);
        Self::from_store(Store { links, locals, fenced, foreign_keys: true })
    }

    /// Connects, if there is no connection yet, and asks for a sign of life.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn check(&self) -> Result<()> {
        let Visit(link) = &self.any_link().await?;
        link.ping().await
    }

    pub(crate) async fn any_link(&self) -> Result<Visit> {
        self.store.links.any_without(NO_KEY).await
    }
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres").field("links", &self.store.links).finish_non_exhaustive()
    }
}

/// What claims share.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) links: Arc<Links>,
    pub(crate) locals: Arc<Locals>,
    pub(crate) fenced: bool,
    pub(crate) foreign_keys: bool,
}

impl Store {
    /// The key of a name.
    pub(crate) fn key_of(&self, name: &Name) -> Result<Key> {
        match Key::spelled(name) {
            None => Ok(Key::of(name)),
            Some(key) if self.foreign_keys => Ok(key),
            Some(_) => Err(Error::new(
                ErrorKind::InvalidName,
                "this is how the key of another program is written: open the store with foreign_keys=on to \
                 lock such keys, or choose another name",
            )),
        }
    }
}

/// The store without semaphores.
#[derive(Debug)]
pub(crate) struct Shared(pub(crate) Arc<Store>);

impl Backend for Shared {
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
            fences: if self.0.fenced { Fences::Rising } else { Fences::None },
        }
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        let key = self.0.key_of(&spec.name)?;
        Ok(Box::new(PgClaim::new(self.0.clone(), spec, key)))
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
