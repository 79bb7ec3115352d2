//! The engine drives a claim on any store: attempt, wait, hold, renew, release or loss.
//!
//! Its modules import each other in one direction: `acquire` → `claim_driver` → `hold` → `context` → `maintenance`. All
//! of them may report to `observe`. `tests/layers.rs` checks that there is no cycle.

pub(crate) mod acquire;
pub(crate) mod claim_driver;
pub(crate) mod context;
mod floors;
pub(crate) mod hold;
mod maintenance;
pub(crate) mod observe;
pub(crate) mod outcome;
mod shared_future;
mod sync;
pub(crate) mod while_held;
