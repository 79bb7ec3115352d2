//! What the lock layer keeps for each server.

use std::sync::Arc;

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

/// Creates the node for a server.
pub(crate) type CreateNode<N> = Box<dyn Fn(Target, Sharing) -> Arc<N> + Send + Sync>;
