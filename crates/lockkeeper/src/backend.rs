//! The contract between Lockkeeper and a store, for authors of stores, and stores around other stores.
//!
//! A store implements [`Backend`] and [`Claim`]. `docs/guides/writing-a-backend.md` builds one. [`register`] makes it known to
//! [`open`](crate::open()) under a URL scheme of its own.

pub use lockkeeper_core::{
    Attempt, Backend, Background, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fences, Grant,
    Holder, Inspector, Release, Renewal, Retry,
};

// Stores around other stores.
pub use lockkeeper_core::{LocalQueue, Prefixed, Quorum, Slots};

// Requests that share a call to the store.
pub use lockkeeper_core::coalescer;

pub use crate::open::register;
