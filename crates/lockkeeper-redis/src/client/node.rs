//! The lock layer's view of a server.

use std::sync::Arc;

use lockkeeper_core::coalescer::Limits;

use super::reconnecting::{ReconnectingClient, Target};

/// The state that the lock layer keeps for each server.
pub(crate) trait Node: Send + Sync + 'static {
    fn client(&self) -> &Arc<ReconnectingClient>;
}

/// Which requests may share a call (one batch) on a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Requests of all keys.
    AllKeys,
    /// No requests: on a cluster, one command cannot use keys of different slots.
    None,
}

impl Sharing {
    /// Returns the limits for batching: `shared`, or limits with which every request is sent on its own.
    pub(crate) fn limits(self, shared: Limits) -> Limits {
        match self {
            Self::AllKeys => shared,
            Self::None => Limits { max_direct: usize::MAX, max_batch: 1, ..shared },
        }
    }
}

/// Creates the node for a server.
pub(crate) type CreateNode<N> = Box<dyn Fn(Target, Sharing) -> Arc<N> + Send + Sync>;
