//! The keeper that users meet: the core's, and `open`.
//!
//! A newtype and not the core's own type, because `open` has to know the crates of the stores, each of
//! which depends on the core. All else is the core's, through `Deref`; only what returns a keeper is
//! repeated here.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{AnyKeeper, Backend, Result, blocking};

use crate::open;

/// The entry: a store with default options, from which locks are made.
///
/// Cheap to clone; clones share everything. Belongs to the runtime in which it was made (or, if that
/// was outside of one, first used): renewals and background releases run there.
///
/// It makes locks ([`mutex`], [`rw_lock`], [`semaphore`], [`lock_all`]) and [elections][election], runs work
/// under one ([`with_lock`]), takes up a detached hold ([`adopt`]), looks into the store ([`inspect`]) and ends
/// in good order ([`close`]).
///
/// [`mutex`]: lockkeeper_core::Keeper::mutex
/// [`rw_lock`]: lockkeeper_core::Keeper::rw_lock
/// [`semaphore`]: lockkeeper_core::Keeper::semaphore
/// [`lock_all`]: lockkeeper_core::Keeper::lock_all
/// [election]: lockkeeper_core::Keeper::election
/// [`with_lock`]: lockkeeper_core::Keeper::with_lock
/// [`adopt`]: lockkeeper_core::Keeper::adopt
/// [`inspect`]: lockkeeper_core::Keeper::inspect
/// [`close`]: lockkeeper_core::Keeper::close
///
/// It does not release anything when it is dropped: guards do.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use lockkeeper::{Keeper, Memory};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkeeper::Result<()> {
/// let keeper = Keeper::new(Memory::new()).ttl(Duration::from_secs(10)).label("billing");
/// let guard = keeper.mutex("orders/42").lock().await?;
/// assert_eq!(guard.label().as_str(), "billing");
/// guard.release().await?;
/// keeper.close().await;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Keeper(lockkeeper_core::Keeper);

impl Keeper {
    /// A keeper on a store.
    pub fn new(backend: impl Backend) -> Self {
        Self(lockkeeper_core::Keeper::new(backend))
    }

    /// A keeper on a store that others use too.
    pub fn from_backend(backend: Arc<dyn Backend>) -> Self {
        Self(lockkeeper_core::Keeper::from_backend(backend))
    }

    /// A keeper on the store that a URL names.
    ///
    /// | URL | store | feature |
    /// |---|---|---|
    /// | `memory:` | a new [`Memory`](crate::Memory) | `memory` (on by default) |
    /// | `redis://[user:password@]host[:port][/database]` | Redis, one node | `redis` |
    /// | `redis+sentinel://host,host,…/master[/database]` | Redis, wherever sentinels say | `redis` |
    /// | `redis+cluster://host,host,…` | Redis Cluster | `redis` |
    /// | `redlock://host,host,host[,…]` | a [`Quorum`](crate::Quorum) of independent Redis nodes | `redis` |
    /// | `rediss://…`, `rediss+sentinel://…`, `rediss+cluster://…` | the same over TLS | `redis-tls` |
    /// | `file:/run/locks`, `file:locks` | `File`, in a directory | `file` |
    /// | `postgres://user:password@host/database?…` | a PostgreSQL server | `postgres`, `postgres-tls` |
    ///
    /// The part before the colon, the scheme, may be in upper or lower case. Each call to open
    /// `memory:` makes a store of its own: **two opens do not exclude each other**, clones of one
    /// keeper do.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config), at once, if the URL is not one, names no store that this
    /// build knows, or needs a feature that is off; the message says which. It shows no more of the
    /// URL than its scheme, because the rest may hold a password. (A directory is shown, if it cannot be
    /// used.) [`Unavailable`](crate::ErrorKind::Unavailable) if the store cannot be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping it opens nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockkeeper::Keeper;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockkeeper::Result<()> {
    /// # if !cfg!(feature = "memory") { return Ok(()) }
    /// let keeper = Keeper::open("memory:").await?;
    /// let guard = keeper.mutex("orders/42").lock().await?;
    /// # drop(guard);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn open(url: &str) -> Result<Self> {
        open::open(url).await.map(Self::from_backend)
    }

    /// Sets how long a lock lasts in the store without renewal (30 s if not set).
    ///
    /// While its guard lives it is renewed every third of this, so the ttl is not a limit on how long
    /// you may hold. It is how long the lock stays taken after your process died, and how long it
    /// survives a store that does not answer.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        Self(self.0.ttl(ttl))
    }

    /// Sets how long to wait for other holders (for ever if not set).
    ///
    /// Zero is one attempt. The first answer of the store is awaited for at least a second even if
    /// this is shorter, so that a short wait does not turn a slow network into an error.
    #[must_use]
    pub fn max_wait(self, max_wait: Duration) -> Self {
        Self(self.0.max_wait(max_wait))
    }

    /// Sets after how long a hold is lost even though its holder lives (never if not set).
    ///
    /// The lease is not renewed past that moment, so the guard says that it lost the lock, and the
    /// store frees it. For a job that must not block the others for ever when it hangs.
    #[must_use]
    pub fn max_hold(self, max_hold: Duration) -> Self {
        Self(self.0.max_hold(max_hold))
    }

    /// Sets who asks, for people who inspect the lock (host, process id and program if not set).
    #[must_use]
    pub fn label(self, label: impl Into<Arc<str>>) -> Self {
        Self(self.0.label(label))
    }
}

impl Deref for Keeper {
    type Target = lockkeeper_core::Keeper;

    fn deref(&self) -> &lockkeeper_core::Keeper {
        &self.0
    }
}

impl AnyKeeper for Keeper {
    fn as_async(&self) -> &lockkeeper_core::Keeper {
        &self.0
    }

    fn to_blocking(&self) -> blocking::Keeper {
        self.0.to_blocking()
    }
}

impl From<lockkeeper_core::Keeper> for Keeper {
    fn from(keeper: lockkeeper_core::Keeper) -> Self {
        Self(keeper)
    }
}

impl From<Keeper> for lockkeeper_core::Keeper {
    fn from(keeper: Keeper) -> Self {
        keeper.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ErrorKind, Memory};

    #[tokio::test]
    async fn a_keeper_goes_to_the_core_and_back_with_its_store_and_its_options() {
        let keeper = Keeper::from_backend(Arc::new(Memory::new()))
            .ttl(Duration::from_secs(7))
            .max_wait(Duration::ZERO)
            .max_hold(Duration::from_secs(5))
            .label("me");
        let guard = keeper.mutex("a").lock().await.unwrap();
        assert_eq!(guard.label().as_str(), "me");
        assert!(guard.remaining().unwrap() <= Duration::from_secs(5));

        let back = Keeper::from(lockkeeper_core::Keeper::from(keeper.clone()));
        assert_eq!(back.mutex("a").lock().await.unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(format!("{back:?}"), format!("{keeper:?}"));
        let longer = back.mutex("b").max_hold(Duration::from_secs(60)).lock().await.unwrap();
        assert!(longer.remaining().unwrap() > Duration::from_secs(5));
        assert!(longer.remaining().unwrap() <= Duration::from_secs(7));
    }
}
