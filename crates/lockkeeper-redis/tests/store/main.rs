//! Behaviour that is specific to Redis, on real servers: keys, scripts, fences, errors, inspection.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod batching;
mod cleanup;
mod client_clocks;
mod clock_skew;
mod cluster;
mod common;
mod fence_register;
mod fences;
mod inspection;
mod key_template;
mod many_locks;
mod no_keys_left;
mod ordering;
mod permits;
mod plain_key;
mod proxies;
mod pushes;
mod queues;
mod refusals;
mod regressions;
mod replicas;
mod requests;
mod scripts;
#[cfg(unix)]
mod unix_socket;
mod urls;
