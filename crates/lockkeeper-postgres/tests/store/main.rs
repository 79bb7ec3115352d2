//! Keys, transactions, errors, inspection, fence registers, and ways to connect.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

#[path = "../common/mod.rs"]
mod common;

mod connecting;
mod diagnosis;
mod inspection;
mod keys;
mod names;
#[cfg(feature = "deadpool")]
mod pools;
mod refusals;
mod registers;
#[cfg(feature = "tls")]
mod tls;
mod transactions;
