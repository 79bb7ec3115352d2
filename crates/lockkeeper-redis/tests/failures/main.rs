//! Locks on Redis when processes, connections and servers fail.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;
mod connections;
mod election;
mod failover;
mod processes;
mod redlock;
mod redlock_fences;
mod servers;
mod torture;
mod votes;
