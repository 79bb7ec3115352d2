//! Locks on a quorum of memory stores, in paused time.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

#[path = "../common/mod.rs"]
mod common;
mod fences;
mod nodes;
mod slow_nodes;
mod split_votes;
