//! `#[locked]` on functions of every shape, on the memory store.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

mod keys;
mod scopes;
mod shapes;
mod threads;
mod ways_out;
