//! Tests of the command with real processes, real stores, and a pseudo-terminal where one matters.
#![allow(clippy::unwrap_used, reason = "a test reports an error by a panic")]

mod common;
mod doctor;
mod help;
mod inspect;
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
