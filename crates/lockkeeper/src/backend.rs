//! The contract that a store implements, and stores that wrap other stores.
//!
//! A store implements [`Backend`] and [`Claim`]. `docs/guides/writing-a-backend.md` builds one step by step. [`register`]
//! adds a URL scheme for it to [`open`](crate::open()).

pub use lockkeeper_core::{
    Attempt, Backend, Background, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fences, Grant,
    Holder, Inspector, Release, Renewal, Retry,
};

// Stores that wrap other stores.
pub use lockkeeper_core::{LocalQueue, Prefixed, Quorum, Slots};

// Batching of concurrent requests.
pub use lockkeeper_core::coalescer;

pub use crate::open::register;
