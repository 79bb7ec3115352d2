//! Connections from a pool of `deadpool-postgres`, with the feature `deadpool`.

#[cfg(feature = "deadpool")]
pub(crate) use with::{Pool, PooledConnection, max_size};
#[cfg(not(feature = "deadpool"))]
pub(crate) use without::{Pool, PooledConnection, max_size};

#[cfg(feature = "deadpool")]
mod with {
    use std::time::Duration;

    use deadpool_postgres::{ClientWrapper, Object, PoolError, TimeoutType, Timeouts};
    use lockkeeper_core::Result;
    use tokio_postgres::Client;

    use crate::error::{translate, unavailable};

    pub(crate) use deadpool_postgres::Pool;

    /// Returns how many connections a pool may open.
    pub(crate) fn max_size(pool: &Pool) -> usize {
        pool.status().max_size
    }

    /// A connection from a pool.
    ///
    /// Only [`return_to_pool`](Self::return_to_pool) returns it. Dropping it closes it, because its session has settings that
    /// other users of the pool do not expect, or an abandoned query. Until then it counts towards the pool's size.
    pub(crate) struct PooledConnection {
        object: Option<Object>,
        taken: Option<Box<ClientWrapper>>,
    }

    impl PooledConnection {
        /// Takes a connection if the pool has one within `timeout`. A timeout of zero does not wait.
        pub(crate) async fn get(pool: &Pool, timeout: Duration) -> Result<Self> {
            let none = || {
                Err(unavailable(format!(
                    "the connection pool had no free connection within {timeout:.1?}: increase its size"
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
                Ok(Ok(object)) => Ok(Self { object: Some(object), taken: None }),
                Ok(Err(PoolError::Backend(error))) => Err(translate(error)),
                Ok(Err(PoolError::Timeout(TimeoutType::Wait))) | Err(_) => none(),
                Ok(Err(error)) => Err(unavailable(error.to_string()).with_source(error)),
            }
        }

        pub(crate) fn client(&self) -> &Client {
            let counted = self.object.as_deref();
            counted.or(self.taken.as_deref()).expect("present until it is dropped")
        }

        /// Returns the connection to its pool.
        pub(crate) fn return_to_pool(mut self) {
            self.object = None;
        }

        /// Detaches the connection from the pool, so that it no longer counts towards the pool's size.
        pub(crate) fn detach(&mut self) {
            self.taken = self.object.take().map(|object| Box::new(Object::take(object)));
        }
    }

    impl Drop for PooledConnection {
        fn drop(&mut self) {
            self.detach();
        }
    }
}

#[cfg(not(feature = "deadpool"))]
mod without {
    use std::time::Duration;

    use lockkeeper_core::Result;
    use tokio_postgres::Client;

    /// No pool, because this build does not have the feature `deadpool`.
    #[derive(Clone)]
    pub(crate) enum Pool {}

    pub(crate) fn max_size(pool: &Pool) -> usize {
        match *pool {}
    }

    /// No pool, because this build does not have the feature `deadpool`.
    pub(crate) enum PooledConnection {}

    impl PooledConnection {
        #[expect(clippy::unused_async, reason = "with pools it is async")]
        pub(crate) async fn get(pool: &Pool, _timeout: Duration) -> Result<Self> {
            match *pool {}
        }

        pub(crate) fn client(&self) -> &Client {
            match *self {}
        }

        pub(crate) fn return_to_pool(self) {
            match self {}
        }

        pub(crate) fn detach(&mut self) {
            match *self {}
        }
    }
}
