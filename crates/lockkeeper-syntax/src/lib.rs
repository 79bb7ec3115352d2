//! Parsers for durations and key templates, shared by Lockkeeper's command line, `#[locked]` and the axum layers.
//!
//! Internal to Lockkeeper: it changes without notice. It is a separate crate without dependencies, so that the
//! macro crate does not have to compile the locks.

pub mod duration;
pub mod template;
