//! The engine: acquire, wait, hold, renew, release or lose. Written once, for every store.
//!
//! Imports within it point downwards: `acquire` → `claim_handle` → `claim_driver` → `hold` → `context` → `maintenance` →
//! `pending` → `maintained`, and all of them may report to `observe`. `tests/layers.rs` checks that there is no cycle.

pub(crate) mod acquire;
pub(crate) mod claim_driver;
pub(crate) mod claim_handle;
pub(crate) mod context;
mod floors;
pub(crate) mod hold;
mod maintained;
mod maintenance;
pub(crate) mod observe;
pub(crate) mod outcome;
mod pending;
mod shared_future;
mod sync;
pub(crate) mod while_held;
