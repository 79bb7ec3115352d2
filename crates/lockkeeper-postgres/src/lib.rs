//! Lockkeeper's locks on PostgreSQL: advisory locks that know when they are lost.
//!
//! A lock belongs to a session, and the session is its lease: the server ends a session that has been idle for a TTL, and
//! every renewal is a heartbeat. Waiters wait on the server, in its own queue.
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
//! For locks that end with a transaction of your own, see [`TransactionLock`]. `docs/backends/postgres.md` states what is
//! guaranteed and what is not.

mod backend;
mod claim;
mod config;
mod diagnose;
mod error;
mod fences;
mod inspect;
mod locals;
mod names;
mod sessions;
mod transaction;

pub use backend::Postgres;
pub use diagnose::diagnose;
pub use fences::Fences;
pub use names::AdvisoryKey;
pub use transaction::TransactionLock;
