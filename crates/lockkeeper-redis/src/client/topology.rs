//! Finds the server that has a key: the only one, or one of a cluster.

use std::sync::Arc;

use lockkeeper_core::{Error, Result};

use super::cluster::Cluster;
use super::node::{CreateNode, Node, Sharing};
use super::reconnecting::Target;
use super::session::Session;
use super::settings::Servers;
use crate::error::unavailable;
use crate::names::Keys;

/// The maximum number of redirects of a request, including pauses for a slot that is migrating.
const MAX_HOPS: usize = 6;

/// The servers of a store.
pub(crate) struct Topology<N>(Kind<N>);

enum Kind<N> {
    Single(Arc<N>),
    Cluster(Cluster<N>),
}

impl<N: Node> Topology<N> {
    pub(crate) fn new(servers: Servers, create: CreateNode<N>) -> Self {
        let target = match servers {
            Servers::One(address) => Target::Fixed(address),
            Servers::Sentinel { sentinels, master } => Target::Sentinel { sentinels, master },
            Servers::Cluster(seeds) => return Self(Kind::Cluster(Cluster::new(seeds, create))),
        };
        Self(Kind::Single(create(target, Sharing::AllKeys)))
    }

    /// Finds the node that has these keys.
    pub(crate) async fn route(&self, keys: &Keys) -> Result<Route<'_, N>> {
        match &self.0 {
            Kind::Single(node) => Ok(Route::Single(node)),
            Kind::Cluster(cluster) => {
                let slot = keys.slot();
                let node = cluster.node(slot).await?;
                Ok(Route::Cluster { node, cluster, slot, hops: 0 })
            }
        }
    }

    /// Returns the nodes of all masters.
    pub(crate) async fn nodes(&self) -> Result<Vec<Arc<N>>> {
        match &self.0 {
            Kind::Single(node) => Ok(vec![node.clone()]),
            Kind::Cluster(cluster) => cluster.nodes().await,
        }
    }
}

impl<N> std::fmt::Debug for Topology<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.0 {
            Kind::Single(_) => "Single",
            Kind::Cluster(_) => "Cluster",
        })
    }
}

/// The route of a request to the node that has its keys. Follows redirects.
pub(crate) enum Route<'a, N> {
    Single(&'a Arc<N>),
    Cluster { node: Arc<N>, cluster: &'a Cluster<N>, slot: u16, hops: usize },
}

impl<N: Node> Route<'_, N> {
    /// Returns the node to send the request to.
    pub(crate) fn node(&self) -> &Arc<N> {
        match self {
            Self::Single(node) => node,
            Self::Cluster { node, .. } => node,
        }
    }

    /// Returns a session on the node that has the keys.
    pub(crate) async fn session(mut self) -> Result<Arc<Session>> {
        loop {
            match self.node().client().session().await {
                Ok(session) => return Ok(session),
                Err(error) => self.redirect(error).await?,
            }
        }
    }

    /// Finds the node on which to retry a failed request. Returns the error if a retry would not help.
    pub(crate) async fn redirect(&mut self, error: Error) -> Result<()> {
        let Self::Cluster { node, cluster, slot, hops } = self else { return Err(error) };
        *hops += 1;
        if *hops == MAX_HOPS {
            return Err(unavailable("the cluster is migrating the lock's slot: try again later"));
        }
        // Boxed, because it is rare and every request would reserve memory for it.
        *node = Box::pin(cluster.redirect(node, *slot, error)).await?;
        Ok(())
    }
}
