//! The coalescer: requests that share calls, in paused time.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod cancellation;
mod failures;
mod sharing;
mod store;
