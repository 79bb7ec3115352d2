//! Lockkeeper's locks on PostgreSQL: advisory locks that know when they are lost.
//!
//! A lock belongs to a session, and the session is its lease: the server ends one that has been silent
//! for a ttl, and every renewal is a sign of life. Waiting is done by the server, in its own queue.
//!
//! ```
//! use lockkeeper_core::Keeper;
//! use lockkeeper_postgres::Postgres;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockkeeper_core::Result<()> {
//! let store = Postgres::new("postgres://postgres@localhost/app?fence=off")?; // connects later
//! let keeper = Keeper::new(store);
//! let orders = keeper.mutex("orders/42");
//! # let _ = orders;
//! # Ok(())
//! # }
//! ```
//!
//! On a transaction of one's own, see [`TransactionLock`]. What is guaranteed and what is not stands in
//! `docs/backends/postgres.md`.

mod backend;
mod claim;
mod config;
mod diagnose;
mod error;
mod fences;
mod flight;
mod inspect;
mod key;
mod link;
mod links;
mod pooled;
mod pooler;
mod probe;
mod queue;
mod seat;
mod sql;
mod tls;
mod together;
mod transaction;

pub use backend::Postgres;
pub use diagnose::diagnose;
pub use fences::PostgresFences;
pub use key::Key;
pub use transaction::TransactionLock;
