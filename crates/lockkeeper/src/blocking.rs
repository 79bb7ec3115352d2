//! Locks in blocking code.
//!
//! Async and blocking code use the same types. Every async method has a counterpart that blocks the calling thread, with
//! the prefix `blocking_`: [`Mutex::lock`](crate::Mutex::lock) and [`Mutex::blocking_lock`](crate::Mutex::blocking_lock).
//! [`lockkeeper_core::blocking`] states their guarantees.
//!
//! Blocking methods may be called on a plain thread, inside `spawn_blocking`, and inside an async task, whose thread they
//! block. In the last case use a keeper from [`open`] in this module: its connections run on Lockkeeper's own runtime and
//! not on the blocked thread. Such a keeper works in async code as well.
//!
//! # Examples
//!
//! ```
//! # fn main() -> lockkeeper::Result<()> {
//! # if !cfg!(feature = "memory") { return Ok(()) }
//! let keeper = lockkeeper::blocking::open("memory:")?;
//! let guard = keeper.mutex("orders/42").blocking_lock()?;
//! println!("fence {:?}", guard.fence());
//! guard.blocking_release()?;
//! keeper.blocking_close();
//! # Ok(())
//! # }
//! ```

use lockkeeper_core::{Keeper, Result};

pub use lockkeeper_core::blocking::{block_on, scope};

/// Opens the store that a URL names, and returns a keeper on it. Blocks until the store is open.
///
/// The connections of the store and all background tasks run on Lockkeeper's blocking runtime, which is never shut down.
/// So the keeper works on plain threads and in every async runtime. URLs are those of [`open`](crate::open()).
///
/// # Errors
///
/// Those of [`open`](crate::open()).
pub fn open(url: &str) -> Result<Keeper> {
    block_on(crate::open(url))
}

#[cfg(all(test, feature = "memory"))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ErrorKind;

    #[test]
    fn a_url_is_opened_on_a_plain_thread() {
        let keeper = open("memory:").unwrap().max_wait(Duration::ZERO).label("me");
        let keeper = keeper.ttl(Duration::from_secs(7)).max_hold(Duration::from_secs(5));
        let guard = keeper.mutex("a").blocking_lock().unwrap();
        assert_eq!(guard.label().as_str(), "me");
        assert!(guard.remaining().unwrap() <= Duration::from_secs(5));
        assert_eq!(keeper.mutex("a").blocking_lock().unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(open("nosuch:").unwrap_err().kind(), ErrorKind::Config);
    }

    #[test]
    fn a_keeper_from_blocking_open_survives_the_runtime_it_was_opened_in() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let keeper = runtime.block_on(async { open("memory:").unwrap() });
        let guard = runtime.block_on(keeper.mutex("a").lock()).unwrap();
        drop(runtime);
        assert!(guard.is_held(), "the blocking runtime renews it");
        guard.blocking_release().unwrap();
    }
}
