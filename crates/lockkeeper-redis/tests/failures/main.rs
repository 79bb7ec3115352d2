//! What happens to locks on Redis when processes, connections and servers fail. All of them are real.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;
mod connections;
mod election;
mod failover;
mod processes;
mod redlock;
mod servers;
mod torture;
mod votes;
