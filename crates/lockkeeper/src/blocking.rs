//! The same locks for code that is not async: the same names and methods, without the `await`.
//!
//! They work from a plain thread, from inside `spawn_blocking` and, if you must, from inside an async
//! task, where they block that task's thread like any blocking call. Renewals and background releases
//! run on a thread of their own, so a blocked caller holds none of them up.
//!
//! # Examples
//!
//! ```
//! use lockkeeper::blocking::Keeper;
//!
//! # fn main() -> lockkeeper::Result<()> {
//! # if !cfg!(feature = "memory") { return Ok(()) }
//! let keeper = Keeper::open("memory:")?;
//! let guard = keeper.mutex("orders/42").lock()?;
//! println!("fence {:?}", guard.fence());
//! guard.release()?;
//! keeper.close();
//! # Ok(())
//! # }
//! ```

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{AnyKeeper, Backend, Result, blocking};

pub use lockkeeper_core::blocking::{
    Guard, Guards, Inspect, LockAll, Mutex, RwLock, ScopedGuard, Semaphore, Watch, scope, wait,
};

use crate::open;

/// The blocking twin of [`Keeper`](crate::Keeper).
///
/// Locks are made by the methods of the [core's](lockkeeper_core::blocking::Keeper), which this
/// dereferences to.
#[derive(Debug, Clone)]
pub struct Keeper(blocking::Keeper);

impl Keeper {
    /// A keeper on a store.
    pub fn new(backend: impl Backend) -> Self {
        Self(blocking::Keeper::new(backend))
    }

    /// A keeper on a store that others use too.
    pub fn from_backend(backend: Arc<dyn Backend>) -> Self {
        Self(blocking::Keeper::from_backend(backend))
    }

    /// A keeper on the store that a URL names. See [`Keeper::open`](crate::Keeper::open).
    ///
    /// # Errors
    ///
    /// As the async twin's.
    pub fn open(url: &str) -> Result<Self> {
        wait(open::open(url)).map(Self::from_backend)
    }

    /// The blocking twin of an async keeper: the same store, the same options. See the
    /// [core's](lockkeeper_core::blocking::Keeper::of) for what of it still needs the other's runtime.
    pub fn of(keeper: &crate::Keeper) -> Self {
        Self(blocking::Keeper::of(keeper))
    }

    /// Sets how long a lock lasts in the store without renewal. As the async twin's.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        Self(self.0.ttl(ttl))
    }

    /// Sets how long to wait for other holders. As the async twin's.
    #[must_use]
    pub fn max_wait(self, max_wait: Duration) -> Self {
        Self(self.0.max_wait(max_wait))
    }

    /// Sets after how long a hold is lost even though its holder lives. As the async twin's.
    #[must_use]
    pub fn max_hold(self, max_hold: Duration) -> Self {
        Self(self.0.max_hold(max_hold))
    }

    /// Sets who asks, for people who inspect the lock. As the async twin's.
    #[must_use]
    pub fn label(self, label: impl Into<Arc<str>>) -> Self {
        Self(self.0.label(label))
    }
}

impl Deref for Keeper {
    type Target = blocking::Keeper;

    fn deref(&self) -> &blocking::Keeper {
        &self.0
    }
}

impl AnyKeeper for Keeper {
    fn as_async(&self) -> &lockkeeper_core::Keeper {
        self.0.as_async()
    }

    fn to_blocking(&self) -> blocking::Keeper {
        self.0.clone()
    }
}

#[cfg(all(test, feature = "memory"))]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn a_blocking_keeper_opens_a_url_on_a_plain_thread() {
        let keeper = Keeper::open("memory:").unwrap().max_wait(Duration::ZERO).label("me");
        let keeper = keeper.ttl(Duration::from_secs(7)).max_hold(Duration::from_secs(5));
        let guard = keeper.mutex("a").lock().unwrap();
        assert_eq!(guard.label().as_str(), "me");
        assert!(guard.remaining().unwrap() <= Duration::from_secs(5));
        assert_eq!(keeper.mutex("a").lock().unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(Keeper::open("nosuch:").unwrap_err().kind(), ErrorKind::Config);
    }
}
