//! The memory store, and combinators that build a store from other stores.

pub(crate) mod local_queue;
pub(crate) mod memory;
pub(crate) mod prefixed;
pub(crate) mod quorum;
pub(crate) mod slots;
