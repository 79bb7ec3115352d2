//! A server for the examples, and another client of Lockkeeper that they exclude.

use lockkeeper_core::{Guard, Keeper, Result};
use lockkeeper_postgres::Postgres;
use lockkeeper_testkit::server::PostgresServer;

/// A PostgreSQL server with a table of orders, and another client of its locks.
#[derive(Debug)]
pub struct Shop {
    server: PostgresServer,
    other: Keeper,
}

impl Shop {
    /// The SQL that creates the table.
    pub const TABLE: &str =
        "CREATE TABLE orders (id bigint PRIMARY KEY, booked boolean NOT NULL DEFAULT false);
         INSERT INTO orders (id) VALUES (42)";

    /// Starts a server.
    ///
    /// # Panics
    ///
    /// If PostgreSQL is not installed.
    #[allow(clippy::new_without_default, reason = "it starts a process")]
    pub fn open() -> Result<Self> {
        let server = PostgresServer::start_or_panic();
        let other = Keeper::new(Postgres::new(&server.url())?);
        Ok(Self { server, other })
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> String {
        self.server.url()
    }

    /// Tries to lock a name as another client, with a mutex.
    pub fn other_client_locks(&self, name: &str) -> Result<Option<Guard>> {
        self.other.mutex(name).blocking_try_lock()
    }
}
