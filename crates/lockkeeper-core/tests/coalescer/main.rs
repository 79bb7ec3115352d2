//! Requests that share calls, in paused time.
#![allow(clippy::unwrap_used, reason = "a test says what went wrong by its panic")]

mod cancellation;
mod failures;
mod sharing;
mod store;
