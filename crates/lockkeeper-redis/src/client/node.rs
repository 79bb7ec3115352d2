//! What the lock layer keeps for each server.

use std::sync::Arc;

use lockkeeper_core::coalescer::Limits;

use super::reconnecting::{ReconnectingClient, Target};

/// A server as the lock layer sees it.
pub(crate) trait Node: Send + Sync + 'static {
    fn client(&self) -> &Arc<ReconnectingClient>;
}

/// Which requests may share a call on a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Those of all keys.
    AllKeys,
    /// None: keys in different slots of a cluster cannot be used by one command.
    None,
}

impl Sharing {
    /// The limits of requests: `shared`, or that every caller sends its own.
    pub(crate) fn limits(self, shared: Limits) -> Limits {
        match self {
            Self::AllKeys => shared,
            Self::None => Limits { max_direct: usize::MAX, max_batch: 1, ..shared },
        }
    }
}

/// Creates the node for a server.
pub(crate) type CreateNode<N> = Box<dyn Fn(Target, Sharing) -> Arc<N> + Send + Sync>;
