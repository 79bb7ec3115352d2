//! The driver's client, and how its connection is closed.

use std::time::Duration;

use deadpool_postgres::{Object, Pool, PoolError, TimeoutType, Timeouts};
use lockkeeper_core::Result;
use tokio::task::AbortHandle;
use tokio_postgres::Client;

use crate::error::{translate, unavailable};

/// A driver's client, and what it takes to close its connection.
pub(crate) enum Transport {
    /// Opened by this store. The handle is that of the task that runs the connection.
    Direct(Client, AbortHandle),
    /// Taken from the user's connection pool.
    Pooled(PooledConnection),
}

impl Transport {
    pub(crate) fn client(&self) -> &Client {
        match self {
            Transport::Direct(client, _) => client,
            Transport::Pooled(pooled) => pooled.client(),
        }
    }

    /// Closes the connection without a Terminate message. One from a pool closes when it is dropped.
    pub(crate) fn close(&self) {
        if let Transport::Direct(_, task) = self {
            task.abort();
        }
    }
}

/// A connection taken from a pool. It is never returned: its session has settings that other users of the pool do not
/// expect. Until it is dropped it counts towards the pool's size.
pub(crate) struct PooledConnection(Option<Object>);

impl PooledConnection {
    /// Takes a connection if the pool has one within `timeout`. A timeout of zero does not wait.
    pub(crate) async fn get(pool: &Pool, timeout: Duration) -> Result<Self> {
        let none = || {
            Err(unavailable(format!(
                "the pool had no free connection within {timeout:.1?}: make it larger"
            )))
        };
        let got = if timeout.is_zero() {
            let wait = Some(Duration::ZERO);
            Ok(pool.timeout_get(&Timeouts { wait, ..pool.timeouts() }).await)
        } else {
            // The pool's own timeout needs a runtime that the pool may have been built without.
            tokio::time::timeout(timeout, pool.get()).await
        };
        match got {
            Ok(Ok(object)) => Ok(Self(Some(object))),
            Ok(Err(PoolError::Backend(error))) => Err(translate(error)),
            Ok(Err(PoolError::Timeout(TimeoutType::Wait))) | Err(_) => none(),
            Ok(Err(error)) => Err(unavailable(error.to_string()).with_source(error)),
        }
    }

    fn client(&self) -> &Client {
        self.0.as_ref().expect("present until it is dropped")
    }
}

impl Drop for PooledConnection {
    fn drop(&mut self) {
        if let Some(object) = self.0.take() {
            drop(Object::take(object));
        }
    }
}
