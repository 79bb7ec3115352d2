//! What the engine tells of itself: metrics and spans, in paused time.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

#[path = "../common/mod.rs"]
mod common;

mod collector;
mod metrics;
mod recorder;
mod spans;
