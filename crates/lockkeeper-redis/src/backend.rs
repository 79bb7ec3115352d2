//! The store.

use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{
    Backend, Capabilities, Claim, ClaimSpec, Error, ErrorKind, Fences, Inspector, Result,
};

use crate::claim::RedisClaim;
use crate::cluster::Nodes;
use crate::config::Config;
use crate::peers::Peer;

/// The longest ttl: a thousand years. Far more, and the server's clock would overflow.
const LONGEST_TTL: Duration = Duration::from_secs(1000 * 366 * 24 * 60 * 60);

/// Locks on Redis: one node, Sentinel or Cluster. Cheap to clone; clones share their connections.
///
/// See the [crate](crate) for what it guarantees.
#[derive(Debug, Clone)]
pub struct Redis {
    pub(crate) store: Arc<Store>,
}

#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) prefix: Arc<str>,
    pub(crate) min_replicas: u32,
    /// Whether a release tells those who listen without a place in the queue.
    pub(crate) tells: bool,
    pub(crate) nodes: Nodes,
    /// The place among the nodes of a quorum, for one of those.
    pub(crate) peer: Option<Peer>,
    /// Whether servers can tell us anything.
    hears: bool,
}

impl Redis {
    /// Connects, so that a wrong address or password shows at once.
    ///
    /// # Errors
    ///
    /// [`Config`](ErrorKind::Config) if the server refuses the credentials,
    /// [`Unavailable`](ErrorKind::Unavailable) if it does not answer within the connect timeout or is a
    /// replica.
    pub async fn connect(config: Config) -> Result<Self> {
        let mut made = Self::lazy(config);
        let hears = made.reach().await.map_err(|error| {
            Error::new(error.kind(), format!("redis: connect: {error}")).with_source(error)
        })?;
        if let Some(store) = Arc::get_mut(&mut made.store) {
            store.hears = hears;
        }
        Ok(made)
    }

    /// Connects when first needed.
    pub(crate) fn lazy(config: Config) -> Self {
        let (prefix, min_replicas, tells) =
            (config.prefix.clone(), config.min_replicas, config.tells);
        let peer = config.peer.clone();
        let nodes = Nodes::new(config);
        Self { store: Arc::new(Store { prefix, min_replicas, tells, nodes, peer, hears: true }) }
    }

    /// Connects to the server of a store that has one.
    pub(crate) async fn reach_one(&self) -> Result<()> {
        let link = self.store.nodes.link(0).await?;
        link.connection().await.map(drop)
    }

    /// Connects to all servers; whether they can tell us anything.
    async fn reach(&self) -> Result<bool> {
        let mut hears = true;
        for link in self.store.nodes.all().await? {
            hears &= link.connection().await?.hears();
        }
        Ok(hears)
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
            push: self.store.hears,
            shared: true,
            permits: true,
            downgrade: true,
            fences: Fences::Raisable,
        }
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        if spec.ttl > LONGEST_TTL {
            let message = "the ttl is longer than a thousand years";
            return Err(Error::new(ErrorKind::InvalidOption, message));
        }
        Ok(Box::new(RedisClaim::new(self.store.clone(), spec)))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        Some(self)
    }
}
