//! Sessions: how many there are, how they end, and what happens to the claims that rely on them.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

#[path = "../common/mod.rs"]
mod common;

mod connections;
mod granted_despite_errors;
mod half_open;
mod heartbeats;
mod loss;
mod queue_order;
mod servers;
mod shared_tries;
mod unpolled_futures;
mod waits;
