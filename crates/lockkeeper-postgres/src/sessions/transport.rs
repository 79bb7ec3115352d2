//! The driver's client, and how its connection is closed.

use tokio::task::AbortHandle;
use tokio_postgres::Client;

use super::pooled::PooledConnection;

/// The client of the driver, with what is needed to close its connection.
pub(crate) enum Transport {
    /// Opened by this store. The handle is that of the task that runs the connection.
    Direct(Client, AbortHandle),
    /// Taken from the connection pool of the user, and never returned to it.
    Pooled(PooledConnection),
}

impl Transport {
    pub(crate) fn client(&self) -> &Client {
        match self {
            Transport::Direct(client, _) => client,
            Transport::Pooled(pooled) => pooled.client(),
        }
    }

    /// Closes the connection without a Terminate message. A pooled connection closes when it is dropped instead.
    pub(crate) fn close(&self) {
        if let Transport::Direct(_, task) = self {
            task.abort();
        }
    }
}
