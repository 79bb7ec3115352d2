//! Locks on files in a directory, between the processes of one machine.
//!
//! [`File`] is the store. A mutex or a readers-writer lock is one locked file, a semaphore is one file
//! per permit. A lock ends with the process that holds it, including by `kill -9`.
//!
//! # Examples
//!
//! ```
//! use lockkeeper_core::Keeper;
//! use lockkeeper_file::File;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let temporary = tempfile::tempdir()?;
//! # let dir = temporary.path().join("locks");
//! let keeper = Keeper::new(File::open(&dir)?); // created with mode 0700 if it is missing
//! let guard = keeper.mutex("orders/42").lock().await?;
//! assert!(dir.join("orders%2F42.lock").exists());
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```

#[cfg(not(unix))]
compile_error!("lockkeeper-file needs Unix: its locks use flock, and it identifies files by inode");

mod backend;
mod claim;
mod config;
mod diagnose;
mod dir;
mod error;
mod inspect;
mod lock_file;
mod names;
mod notify;
mod record;
mod store;
mod turnstile;

pub use backend::File;
pub use config::Options;
pub use diagnose::diagnose;
