//! Locks and fences around services: the responses, and the state of the store afterwards.
#![allow(clippy::unwrap_used, reason = "a test reports an error by a panic")]

mod common;
mod fences;
mod http;
mod keys;
mod layers;
mod loss;
mod problems;
