//! Sessions: how many are opened, how they end, and how claims that rely on them behave.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

#[path = "../common/mod.rs"]
mod common;

mod connections;
mod fences;
mod granted_despite_errors;
mod half_open;
mod heartbeats;
mod loss;
mod queue_order;
mod servers;
mod shared_tries;
mod unpolled_futures;
mod waits;
