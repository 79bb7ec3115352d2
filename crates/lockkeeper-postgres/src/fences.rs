//! A fence register in a database table.

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lockkeeper_core::{BoxFuture, Error, Fence, FenceCheck, FenceStore, Name, Result};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Config, GenericClient, NoTls, Transaction};

use crate::config::{Settings, address};
use crate::error::{at, config, translate};
use crate::sessions::{Pool, PooledConnection, Tls};

const TABLE: &str = include_str!("fences/table.sql");
const CHECK: &str = include_str!("fences/check.sql");
const HIGHEST: &str = include_str!("fences/highest.sql");

/// How long the server may take to accept a cancel request.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause between two cancel requests. One that arrives before the query has no effect.
const CANCEL_INTERVAL: Duration = Duration::from_millis(200);
/// How many cancel requests are sent for a query.
const MAX_CANCELS: usize = 5;

/// Stores the fences of a [`FenceRegister`](lockkeeper_core::FenceRegister) in the table `lockkeeper_fences`
/// of a PostgreSQL database.
///
/// Each check is one statement. The recorded fence survives a crash of the server like any committed row. The register has
/// its own connections, because a check may have to wait for another transaction, and locks must not wait with it.
///
/// [`check_in`](Self::check_in) checks in a transaction of the caller. It is safer, because check and write are atomic.
///
/// The table has one row per name. Remove rows that are older than the longest possible pause of a holder with
/// `DELETE FROM lockkeeper_fences WHERE passed_at < now() - interval '30 days'`.
///
/// # Examples
///
/// ```
/// use lockkeeper_core::{Fence, FenceRegister};
/// use lockkeeper_postgres::Fences;
///
/// # #[tokio::main]
/// # async fn main() -> lockkeeper_core::Result<()> {
/// # let server = lockkeeper_testkit::server::PostgresServer::start_or_panic();
/// # let url = server.url();
/// let fences = Fences::new(&url)?;
/// fences.create_table().await?; // or with your other migrations: docs/guides/fencing.md
/// let register = FenceRegister::new(fences);
/// assert!(register.check("orders/42", Fence::new(7).unwrap()).await?.is_passed());
/// assert!(!register.check("orders/42", Fence::new(6).unwrap()).await?.is_passed());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Fences {
    source: Source,
}

/// Where the connections come from.
#[derive(Clone)]
enum Source {
    Own(Arc<RegisterPool>),
    #[cfg_attr(not(feature = "deadpool"), expect(dead_code, reason = "no pools in this build"))]
    Pool(Pool),
}

impl Fences {
    /// Creates a register from a URL as [`Postgres::new`](crate::Postgres::new) takes it, without connecting. The parameter
    /// `max_connections` limits how many checks are in flight concurrently.
    ///
    /// # Errors
    ///
    /// [`Config`](lockkeeper_core::ErrorKind::Config) if the URL is malformed or has an unknown parameter.
    pub fn new(url: &str) -> Result<Self> {
        let Settings { driver, options, root } = Settings::parse(url)?;
        let tls = Tls::new(root.as_deref(), driver.get_ssl_mode())?;
        let source = Source::Own(Arc::new(RegisterPool::new(driver, tls, options.max_connections)));
        Ok(Self { source })
    }

    /// Creates a register that uses the connections of a pool.
    #[cfg(feature = "deadpool")]
    pub fn from_pool(pool: deadpool_postgres::Pool) -> Self {
        Self { source: Source::Pool(pool) }
    }

    /// Creates the table if it does not exist.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](lockkeeper_core::ErrorKind::Unavailable) if the server cannot be reached;
    /// [`Config`](lockkeeper_core::ErrorKind::Config) if this role lacks the privilege to create it.
    pub async fn create_table(&self) -> Result<()> {
        let connection = RegisterConnection::get(self).await?;
        let mut created = connection.client().batch_execute(TABLE).await;
        // The errors of a concurrent `CREATE TABLE`, for the table's name, the table, and the type of its rows.
        let raced =
            [SqlState::UNIQUE_VIOLATION, SqlState::DUPLICATE_TABLE, SqlState::DUPLICATE_OBJECT];
        let raced = raced.map(Some);
        if created.as_ref().is_err_and(|error| raced.contains(&error.code().cloned())) {
            // Clients that create it concurrently may all find that it does not exist.
            created = connection.client().batch_execute(TABLE).await;
        }
        connection.return_client();
        created.map_err(translate)
    }

    /// Returns whether a holder with this fence may still write, and records the fence if the transaction is committed.
    ///
    /// Until the transaction ends, every other check of that name waits for it. So its writes are committed before a higher
    /// fence passes, or not at all.
    ///
    /// # Errors
    ///
    /// [`InvalidName`](lockkeeper_core::ErrorKind::InvalidName);
    /// [`Config`](lockkeeper_core::ErrorKind::Config) if the table does not exist;
    /// [`Unavailable`](lockkeeper_core::ErrorKind::Unavailable) if the server fails, or two transactions
    /// deadlock. Roll the transaction back in that case.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the server continues the check. Drop the transaction, too.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockkeeper_core::{Fence, FenceCheck};
    /// use lockkeeper_postgres::Fences;
    ///
    /// async fn book(
    ///     client: &mut tokio_postgres::Client,
    ///     fence: Fence,
    /// ) -> Result<bool, Box<dyn std::error::Error>> {
    ///     let transaction = client.transaction().await?;
    ///     let checked = Fences::check_in(&transaction, "orders/42", fence).await?;
    ///     if checked.is_passed() {
    ///         transaction.execute("UPDATE orders SET booked = true WHERE id = 42", &[]).await?;
    ///         transaction.commit().await?;
    ///     }
    ///     Ok(checked.is_passed())
    /// }
    /// ```
    pub async fn check_in(
        transaction: &Transaction<'_>,
        name: &str,
        fence: Fence,
    ) -> Result<FenceCheck> {
        check(transaction, &Name::new(name)?, fence).await.map_err(explain)
    }
}

impl FenceStore for Fences {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn check(&self, name: &Name, fence: Fence) -> BoxFuture<'_, Result<FenceCheck>> {
        let name = name.clone();
        Box::pin(async move {
            let connection = RegisterConnection::get(self).await?;
            let checked = check(connection.client(), &name, fence).await;
            connection.return_client();
            checked.map_err(explain)
        })
    }
}

impl fmt::Debug for Fences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The configuration contains the password.
        f.debug_struct("Fences").finish_non_exhaustive()
    }
}

async fn check(
    client: &impl GenericClient,
    name: &str,
    fence: Fence,
) -> Result<FenceCheck, tokio_postgres::Error> {
    // A fence is below 2^63.
    let number = fence.get().cast_signed();
    let arguments = [(&name as _, Type::TEXT), (&number as _, Type::INT8)];
    if !client.query_typed(CHECK, &arguments).await?.is_empty() {
        return Ok(FenceCheck::Passed);
    }
    // Only informative: the row may have changed or been removed since.
    let highest = client.query_typed(HIGHEST, &arguments[..1]).await?;
    let highest = highest.first().and_then(|row| Fence::new(row.get::<_, i64>(0).unsigned_abs()));
    let highest = highest.filter(|highest| *highest > fence).unwrap_or(fence.next());
    Ok(FenceCheck::Stale { highest })
}

fn explain(error: tokio_postgres::Error) -> Error {
    if error.code() == Some(&SqlState::UNDEFINED_TABLE) {
        let message = "the table lockkeeper_fences does not exist: call Fences::create_table, or \
                       see docs/guides/fencing.md";
        return config(message).with_source(error);
    }
    translate(error)
}

/// The connections of a register that has no pool, opened on demand up to a limit.
struct RegisterPool {
    config: Config,
    tls: Tls,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Client>>,
}

impl RegisterPool {
    fn new(config: Config, tls: Tls, limit: usize) -> Self {
        let permits = Arc::new(Semaphore::new(limit.min(Semaphore::MAX_PERMITS)));
        Self { config, tls, permits, idle: Mutex::default() }
    }

    /// Returns an idle or a new connection. Waits while the limit is reached.
    async fn get(&self) -> Result<(Client, OwnedSemaphorePermit)> {
        let permit = self.permits.clone().acquire_owned().await;
        let permit = permit.map_err(|error| config(error.to_string()))?;
        while let Some(client) = self.pop() {
            // The server, or the end of the runtime in which it was opened, may have closed it.
            if !client.is_closed() {
                return Ok((client, permit));
            }
        }
        let connected = self.tls.connect(&self.config).await;
        let (client, connection) = connected.map_err(|error| at(&address(&self.config), &error))?;
        tokio::spawn(connection);
        Ok((client, permit))
    }

    fn pop(&self) -> Option<Client> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn return_client(&self, client: Client) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(client);
    }
}

/// A connection that is returned only after its query was answered. An abandoned query may block its connection for as
/// long as another transaction lasts.
struct RegisterConnection(Option<Held>);

enum Held {
    Own(Arc<RegisterPool>, Client, OwnedSemaphorePermit),
    Pooled(PooledConnection),
}

impl RegisterConnection {
    async fn get(fences: &Fences) -> Result<Self> {
        let held = match &fences.source {
            Source::Own(connections) => {
                let (client, permit) = connections.get().await?;
                Held::Own(connections.clone(), client, permit)
            }
            Source::Pool(pool) => Held::Pooled(PooledConnection::get(pool, Duration::MAX).await?),
        };
        Ok(Self(Some(held)))
    }

    fn client(&self) -> &Client {
        match self.0.as_ref().expect("present until it is returned") {
            Held::Own(_, client, _) => client,
            Held::Pooled(pooled) => pooled.client(),
        }
    }

    fn return_client(mut self) {
        match self.0.take() {
            Some(Held::Own(connections, client, _permit)) => connections.return_client(client),
            Some(Held::Pooled(pooled)) => pooled.return_to_pool(),
            None => {}
        }
    }
}

impl Drop for RegisterConnection {
    fn drop(&mut self) {
        let (Some(held), Ok(runtime)) = (self.0.take(), Handle::try_current()) else { return };
        // The permit is released now: another connection may be opened while this one ends.
        match held {
            Held::Own(connections, client, _permit) => {
                runtime.spawn(async move { close(&client, Some(&connections.tls)).await });
            }
            Held::Pooled(mut pooled) => {
                pooled.detach();
                runtime.spawn(async move { close(pooled.client(), None).await });
            }
        }
    }
}

/// Cancels the abandoned query of a connection and closes the connection. The driver closes a dropped connection only
/// after every query was answered: while a transaction blocks a name, each abandoned check of it would leave one more
/// session on the server, beyond the limit of this register. Covered by `tests/store/registers.rs`.
async fn close(client: &Client, tls: Option<&Tls>) {
    let token = client.cancel_token();
    // An empty statement, which the server answers after all earlier queries.
    let mut last = pin!(client.batch_execute(""));
    for _ in 0..MAX_CANCELS {
        let cancel = async {
            match tls {
                Some(tls) => tls.cancel(&token).await,
                // The TLS settings of the pool are not known here. If the server requires TLS, this fails.
                None => token.cancel_query(NoTls).await.map_err(translate),
            }
        };
        let cancelled = timeout(CANCEL_TIMEOUT, cancel).await;
        if !matches!(cancelled, Ok(Ok(()))) || timeout(CANCEL_INTERVAL, &mut last).await.is_ok() {
            return;
        }
    }
}
