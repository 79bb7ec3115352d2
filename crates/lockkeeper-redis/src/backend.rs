//! The store.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{
    Backend, Capabilities, Claim, ClaimSpec, Error, ErrorKind, Fences, Inspector, Result,
};

use crate::claim::RedisClaim;
use crate::claim::node::LockNode;
use crate::claim::peers::Peer;
use crate::claim::store::Store;
use crate::client::node::Node as _;
use crate::client::topology::Topology;
use crate::config::Config;
use crate::error::{at, translate};

pub(crate) mod fences;
pub(crate) mod redlock;

/// The maximum TTL: a thousand years. A longer one would overflow the server's clock.
const MAX_TTL: Duration = Duration::from_secs(1000 * 366 * 24 * 60 * 60);

/// Locks on Redis: one node, Sentinel or Cluster. Cheap to clone; clones share their connections.
///
/// See the [crate](crate) for what it guarantees.
#[derive(Debug, Clone)]
pub struct Redis {
    pub(crate) store: Arc<Store>,
}

impl Redis {
    /// Connects to the servers, so that a wrong address or password is reported here and not by the first lock.
    ///
    /// # Errors
    ///
    /// [`Config`](ErrorKind::Config) if the server refuses the credentials,
    /// [`Unavailable`](ErrorKind::Unavailable) if it does not answer within the connect timeout or is a
    /// replica.
    pub async fn connect(config: Config) -> Result<Self> {
        let mut made = Self::lazy(config, None);
        let receives_messages = made.connect_all().await.map_err(|error| {
            Error::new(error.kind(), format!("redis: connect: {error}")).with_source(error)
        })?;
        if let Some(store) = Arc::get_mut(&mut made.store) {
            store.receives_messages = receives_messages;
        }
        Ok(made)
    }

    /// Sends a `PING` to the server, or to every master of a cluster in turn, and waits for the replies. Connects if there
    /// is no connection. For health checks.
    ///
    /// Does not show that locks can be granted: a replica that was just demoted and a server without memory reply, too.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](ErrorKind::Unavailable) if a server does not connect or reply within its timeout,
    /// [`Config`](ErrorKind::Config) if it refuses the credentials or the command.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves nothing behind.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> lockkeeper_core::Result<()> {
    /// # let server = lockkeeper_testkit::server::RedisServer::start_or_panic();
    /// # let config = lockkeeper_redis::Config::from_url(&server.url())?;
    /// let store = lockkeeper_redis::Redis::connect(config).await?;
    /// store.ping().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn ping(&self) -> Result<()> {
        for node in self.store.topology.nodes().await? {
            let session = node.client().session().await?;
            let address = session.identity().address();
            let replied = session.send(&redis::cmd("PING")).await;
            replied.map_err(|error| at(address, &translate(error)))?;
        }
        Ok(())
    }

    /// Creates a store that connects at its first request. `peer` is set for a node of a quorum: its place among the nodes.
    pub(crate) fn lazy(config: Config, peer: Option<Peer>) -> Self {
        let (prefix, template) = (config.key_prefix(), config.template());
        let Config { servers, client, min_replicas, .. } = config;
        let (settings, node_peer) = (Arc::new(client), peer.clone());
        let topology = Topology::new(
            servers,
            Box::new(move |target, sharing| {
                LockNode::new(settings.clone(), target, sharing, node_peer.clone(), min_replicas)
            }),
        );
        let store =
            Store { prefix, template, min_replicas, topology, peer, receives_messages: true };
        Self { store: Arc::new(store) }
    }

    /// Connects to all servers. Returns whether all of them deliver messages to this client.
    pub(crate) async fn connect_all(&self) -> Result<bool> {
        let mut receives_messages = true;
        for node in self.store.topology.nodes().await? {
            receives_messages &= node.client().session().await?.receives_messages();
        }
        Ok(receives_messages)
    }
}

impl Backend for Redis {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            leases: true,
            fair: true,
            push: self.store.receives_messages,
            shared: true,
            permits: true,
            downgrade: true,
            fences: Fences::Raisable,
        }
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        if spec.ttl > MAX_TTL {
            let message = "the TTL exceeds the maximum of a thousand years";
            return Err(Error::new(ErrorKind::InvalidOption, message));
        }
        Ok(Box::new(RedisClaim::new(self.store.clone(), spec)?))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        Some(self)
    }
}
