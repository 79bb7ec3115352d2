//! What is Redis's own, on real servers: keys, scripts, fences, refusals, inspection.
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
mod many_locks;
mod no_keys_left;
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
mod urls;
