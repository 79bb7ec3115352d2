//! Locks and fences around services: what is answered, and what is left afterwards.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;
mod fences;
mod http;
mod keys;
mod layers;
mod loss;
mod problems;
