//! Connections from a pool.

use std::sync::Weak;
use std::time::Duration;

use deadpool_postgres::{Object, Pool, PoolError, TimeoutType, Timeouts};
use lockkeeper_core::Result;
use tokio_postgres::Client;

use crate::error::{translate, unavailable};
use crate::link::Link;

/// How often to look whether a pool's connection still is: the pool runs its task, and tells nobody.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A connection from a pool. It does not go back: its session has settings that others do not expect.
/// While it lives it counts as one of the pool's.
pub(crate) struct Pooled(Option<Object>);

impl Pooled {
    /// A connection, if the pool has one to give within that time; at once, if it is none.
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
            Ok(Ok(object)) => Ok(Self(Some(object))),
            Ok(Err(PoolError::Backend(error))) => Err(translate(error)),
            Ok(Err(PoolError::Timeout(TimeoutType::Wait))) | Err(_) => none(),
            Ok(Err(error)) => Err(unavailable(error.to_string()).with_source(error)),
        }
    }

    pub(crate) fn client(&self) -> &Client {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if let Some(object) = self.0.take() {
            drop(Object::take(object));
        }
    }
}

/// Ready when a pool's connection has ended, or nobody uses it any more. Tells whoever does.
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
