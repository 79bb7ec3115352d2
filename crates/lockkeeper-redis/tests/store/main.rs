//! What is Redis's own, on real servers: keys, scripts, fences, refusals, inspection.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod cleanup;
mod clocks;
mod cluster;
mod fences;
mod inspection;
mod kit;
mod leftovers;
mod many;
mod permits;
mod plain_key;
mod proxies;
mod pushes;
mod queues;
mod refusals;
mod registers;
mod regressions;
mod replicas;
mod requests;
mod scripts;
mod sharing;
mod skew;
mod urls;
