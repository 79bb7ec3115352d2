//! Locks in code that is not async: where blocking methods may be called, and how to open a keeper there.
//!
//! Every type is used by both kinds of code. A method that waits has a counterpart that blocks its thread instead, with
//! the prefix `blocking_`: [`Mutex::lock`](crate::Mutex::lock) and [`Mutex::blocking_lock`](crate::Mutex::blocking_lock).
//! See [`lockkeeper_core::blocking`] for what they guarantee.
//!
//! They may be called on a plain thread, inside of `spawn_blocking`, and inside of an async task, whose thread they block.
//! A keeper from [`open`] in this module depends on no runtime but the blocking one, and works in async code as
//! well: take it if blocking methods are called on threads of an async runtime.
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

/// Opens the store that a URL names, for blocking code first of all, and returns a keeper on it.
///
/// Does what [`open`](crate::open()) does. The connections of the store and everything in the background belong to the blocking
/// runtime, which is never shut down. So the keeper works everywhere: on plain threads and in every async runtime.
///
/// # Errors
///
/// As [`open`](crate::open()).
pub fn open(url: &str) -> Result<Keeper> {
    block_on(crate::open(url))
}

#[cfg(all(test, feature = "memory"))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ErrorKind;

    #[test]
    fn a_keeper_opens_a_url_on_a_plain_thread() {
        let keeper = open("memory:").unwrap().max_wait(Duration::ZERO).label("me");
        let keeper = keeper.ttl(Duration::from_secs(7)).max_hold(Duration::from_secs(5));
        let guard = keeper.mutex("a").blocking_lock().unwrap();
        assert_eq!(guard.label().as_str(), "me");
        assert!(guard.remaining().unwrap() <= Duration::from_secs(5));
        assert_eq!(keeper.mutex("a").blocking_lock().unwrap_err().kind(), ErrorKind::TimedOut);
        assert_eq!(open("nosuch:").unwrap_err().kind(), ErrorKind::Config);
    }

    #[test]
    fn a_keeper_of_blocking_code_that_was_opened_in_a_runtime_outlives_it() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let keeper = runtime.block_on(async { open("memory:").unwrap() });
        let guard = runtime.block_on(keeper.mutex("a").lock()).unwrap();
        drop(runtime);
        assert!(guard.is_held(), "it is renewed by the blocking runtime");
        guard.blocking_release().unwrap();
    }
}
