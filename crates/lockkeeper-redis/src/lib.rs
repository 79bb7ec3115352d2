//! Locks on Redis: one node, Sentinel, Cluster, and Redlock over independent nodes.
//!
//! Users take the `lockkeeper` crate with its feature `redis`, and open a URL. This crate is for programs that create the
//! store themselves.
//!
//! # What it guarantees
//!
//! - The exclusive holder of the lock `orders/42` is the string key `lockkeeper:{orders/42}`, with an
//!   expiry, whose value is the owner: `redis-cli GET` and `PTTL` show it. A client of any make that
//!   follows the usual recipe on that key (`SET NX PX`, compare and delete) excludes these locks and is
//!   excluded by them.
//! - Releasing hands the lock to the next waiter within the same command, and notifies it. Waiters enter
//!   in the order in which they asked.
//! - Every request is one script, on the server's clock alone, and idempotent; except a break, which run twice also takes
//!   the lock from the holder that it was handed to. Every key has an expiry.
//!
//! # What it does not
//!
//! - A server that forgets (a restart without persistence, a failover to a replica that was behind) gives
//!   a lock twice. [`Config::min_replicas`] prevents that for failovers if it counts all replicas that may be
//!   promoted, [`redlock`] survives a minority of it.
//! - Leases follow the server's wall clock: a jump of it ends them early or late.
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
mod inspect;
mod names;

pub use backend::Redis;
pub use backend::fences::Fences;
pub use backend::redlock::redlock;
pub use config::{Config, Protocol};
pub use diagnose::diagnose;
