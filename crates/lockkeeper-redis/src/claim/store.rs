//! What all claims of a store share.

use std::sync::Arc;

use lockkeeper_core::Result;
use redis::Value;

use super::node::LockNode;
use super::peers::Peer;
use crate::client::resp::Words;
use crate::client::script::Script;
use crate::client::session::Session;
use crate::client::topology::Topology;
use crate::names::{KeyTemplate, Keys};

#[derive(Debug)]
pub(crate) struct Store {
    /// The prefix of the keys of a fence register.
    pub(crate) prefix: Arc<str>,
    /// The template of the keys of locks.
    pub(crate) template: KeyTemplate,
    pub(crate) min_replicas: u32,
    pub(crate) topology: Topology<LockNode>,
    /// Set if the store is a node of a quorum.
    pub(crate) peer: Option<Peer>,
    /// Whether the servers can send messages.
    pub(crate) receives_messages: bool,
}

impl Store {
    /// Returns whether a release notifies waiters without a queue entry: on nodes of a quorum, which has no queue.
    pub(crate) fn notifies_unqueued(&self) -> bool {
        self.peer.is_some()
    }

    /// Runs a script on the server that has some keys. Also returns the session that it ran on.
    pub(crate) async fn run(
        &self,
        keys: &Keys,
        script: &Script,
        add: impl Fn(&mut Words),
    ) -> Result<(Arc<Session>, Value)> {
        let mut route = self.topology.route(keys).await?;
        loop {
            match route.node().run(script, &add).await {
                Ok(reply) => return Ok(reply),
                Err(error) => route.redirect(error).await?,
            }
        }
    }
}
