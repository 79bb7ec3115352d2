//! PostgreSQL store for Lockkeeper: advisory locks with loss detection and fencing tokens.
//!
//! A lock belongs to a session, and the session is its lease: the server ends a session that has been idle for a TTL. A
//! renewal is a heartbeat, a statement that restarts this timeout. Waiters wait in the server's own queue.
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
//! For locks that end with your own transaction, see [`TransactionLock`]. `docs/backends/postgres.md` states the guarantees
//! and their limits.

mod backend;
mod claim;
mod config;
mod diagnose;
mod error;
mod fences;
mod inspect;
mod local_claims;
mod name_table;
mod names;
mod sessions;
mod transaction;

pub use backend::Postgres;
pub use diagnose::diagnose;
pub use fences::Fences;
pub use names::AdvisoryKey;
pub use transaction::TransactionLock;
