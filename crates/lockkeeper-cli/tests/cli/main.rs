//! The command as its users meet it: real processes, real stores, a pseudo-terminal where one matters.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;
mod doctor;
mod help;
mod look;
mod loss;
mod namespaces;
mod own_store;
mod quorum;
mod run;
mod secrets;
mod signals;
mod terminal;
mod tickets;
mod usage;
