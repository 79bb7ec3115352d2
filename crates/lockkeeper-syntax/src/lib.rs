//! Durations and key templates as Lockkeeper's command line, `#[locked]` and the axum layers read them.
//!
//! An internal part of Lockkeeper: it changes without notice. It is a crate of its own, without dependencies, because a
//! macro crate should not compile the locks to read `"1h30m"`.

pub mod duration;
pub mod template;
