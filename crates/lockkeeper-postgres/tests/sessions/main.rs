//! Sessions: how many there are, how they end, and what becomes of those who rely on them.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

#[path = "../kit/mod.rs"]
mod kit;

mod connections;
mod half_open;
mod in_spite;
mod left;
mod loss;
mod queues;
mod servers;
mod together;
mod waits;
