//! Connections from a pool, where the build has pools.

use std::sync::Weak;
use std::time::Duration;

use crate::link::Link;

#[cfg(feature = "deadpool")]
pub(crate) use with::{Pool, Pooled, limit};
#[cfg(not(feature = "deadpool"))]
pub(crate) use without::{Pool, Pooled, limit};

/// How often to look whether a pool's connection is still open: the pool runs its task, and does not tell.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[cfg(feature = "deadpool")]
mod with {
    use std::time::Duration;

    use deadpool_postgres::{ClientWrapper, Object, PoolError, TimeoutType, Timeouts};
    use lockkeeper_core::Result;
    use tokio_postgres::Client;

    use crate::error::{translate, unavailable};

    pub(crate) use deadpool_postgres::Pool;

    /// Returns how many connections a pool may have.
    pub(crate) fn limit(pool: &Pool) -> usize {
        pool.status().max_size
    }

    /// A connection from a pool.
    ///
    /// It goes back only by [`give_back`](Self::give_back). Otherwise it is closed when it is dropped: its session has
    /// settings that other users of the pool do not expect, or a query that was given up. Until then it counts as one of
    /// the pool's.
    pub(crate) struct Pooled {
        object: Option<Object>,
        taken: Option<Box<ClientWrapper>>,
    }

    impl Pooled {
        /// Returns a connection, if the pool has one to give within that time; at once, if it is zero.
        pub(crate) async fn get(pool: &Pool, within: Duration) -> Result<Self> {
            let none = || {
                Err(unavailable(format!(
                    "the pool had no connection to give within {within:.1?}: make it larger"
                )))
            };
            let got = if within.is_zero() {
                let wait = Some(Duration::ZERO);
                Ok(pool.timeout_get(&Timeouts { wait, ..pool.timeouts() }).await)
            } else {
                // Not the pool's own clock, which it may have none of.
                tokio::time::timeout(within, pool.get()).await
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
            counted.or(self.taken.as_deref()).expect("it is there until it is dropped")
        }

        /// Returns it to its pool.
        pub(crate) fn give_back(mut self) {
            self.object = None;
        }

        /// Stops counting it as one of the pool's.
        pub(crate) fn take_out(&mut self) {
            self.taken = self.object.take().map(|object| Box::new(Object::take(object)));
        }
    }

    impl Drop for Pooled {
        fn drop(&mut self) {
            self.take_out();
        }
    }
}

#[cfg(not(feature = "deadpool"))]
mod without {
    use std::time::Duration;

    use lockkeeper_core::Result;
    use tokio_postgres::Client;

    /// There is none in this build.
    #[derive(Clone)]
    pub(crate) enum Pool {}

    pub(crate) fn limit(pool: &Pool) -> usize {
        match *pool {}
    }

    /// There is none in this build.
    pub(crate) enum Pooled {}

    impl Pooled {
        #[expect(clippy::unused_async, reason = "with pools it is async")]
        pub(crate) async fn get(pool: &Pool, _within: Duration) -> Result<Self> {
            match *pool {}
        }

        pub(crate) fn client(&self) -> &Client {
            match *self {}
        }

        pub(crate) fn give_back(self) {
            match self {}
        }

        pub(crate) fn take_out(&mut self) {
            match *self {}
        }
    }
}

/// Ready when a pool's connection has ended, or is no longer used. Notifies its users.
pub(crate) async fn ended(link: &Weak<Link>) {
    while let Some(link) = link.upgrade() {
        let closed = link.closed.clone();
        if link.is_closed() {
            return closed.cancel();
        }
        drop(link);
        tokio::select! {
            () = closed.cancelled() => return,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
    }
}
