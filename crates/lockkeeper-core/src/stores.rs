//! The memory store, and the combinators that make stores of stores.

pub(crate) mod local_queue;
pub(crate) mod memory;
pub(crate) mod prefixed;
pub(crate) mod quorum;
pub(crate) mod slots;
