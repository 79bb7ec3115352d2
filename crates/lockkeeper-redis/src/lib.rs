//! Locks on Redis: one node, Sentinel, Cluster, and Redlock over independent nodes.
//!
//! Most programs use the `lockkeeper` crate with its feature `redis` and open a URL. This crate is for programs that
//! create the store themselves.
//!
//! # What it guarantees
//!
//! - The exclusive holder of the lock `orders/42` is the string key `lockkeeper:{orders/42}`, with an
//!   expiry, whose value is a record of the holder. `redis-cli GET` and `PTTL` show it. A client that follows the plain
//!   recipe on that key (`SET NX PX`, compare-and-delete) excludes these locks and is excluded by them.
//! - A release hands the lock off to the next waiter in the same request and notifies it. Waiters acquire in order of
//!   arrival.
//! - A free lock is acquired without a script, by `SET NX PX`, `EXISTS` and `TIME` in one write. Every other request is one
//!   script; a release within 100 ms of such a grant takes a second one if a claim of another process waits. Leases and fences follow the server's clock, never the client's.
//! - Every request is idempotent, except a break: a second one also breaks the lock of the waiter to which the first one
//!   handed it off. Every key has an expiry.
//!
//! # What it does not guarantee
//!
//! - A server that loses data (a restart without persistence, a failover to a replica that lags) may grant a held lock
//!   again. [`Config::min_replicas`] prevents this for failovers if it counts all replicas that may be promoted.
//!   [`redlock`] survives the loss of a minority.
//! - Leases follow the server's wall clock. A clock that jumps ends them early or late.
//!
//! # Examples
//!
//! ```
//! use lockkeeper_core::Keeper;
//! use lockkeeper_redis::{Config, Redis};
//!
//! # #[tokio::main]
//! # async fn main() -> lockkeeper_core::Result<()> {
//! # let server = lockkeeper_testkit::server::RedisServer::start_or_panic();
//! # let url = server.url();
//! // let url = "redis://user:password@127.0.0.1:6379/";
//! let store = Redis::connect(Config::from_url(&url)?.prefix("shop")?).await?;
//! let keeper = Keeper::new(store);
//! let guard = keeper.mutex("orders/42").lock().await?; // the key shop:{orders/42}
//! guard.release().await?;
//! # keeper.close().await;
//! # Ok(())
//! # }
//! ```

mod backend;
mod claim;
mod client;
mod config;
mod diagnose;
mod error;
#[cfg(any(fuzzing, test))]
#[doc(hidden)]
pub mod fuzzing;
mod inspect;
mod names;

pub use backend::Redis;
pub use backend::fences::Fences;
pub use backend::redlock::redlock;
pub use config::{Config, Protocol};
pub use diagnose::diagnose;
