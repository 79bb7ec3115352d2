//! Redlock: locks that a majority of independent nodes grants.

use std::sync::Arc;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::{Backend, Error, ErrorKind, Quorum, Result};

use super::Redis;
use crate::claim::peers::Peer;
use crate::config::Config;

/// Connects to independent Redis nodes and returns a [`Quorum`] of them.
///
/// Returns when a majority of the nodes has answered. The others connect in the background, or with the first request after
/// they become available.
///
/// If two names lead to the same server, the connection that detects it is rejected with a [`Config`](ErrorKind::Config)
/// error that names both. If both have connected in this call, this call fails. If the second one connects later, every
/// attempt fails from then on.
///
/// # Errors
///
/// [`Config`](ErrorKind::Config) for fewer than three nodes or the same node twice,
/// [`Unavailable`](ErrorKind::Unavailable) if a majority does not answer.
pub async fn redlock(nodes: impl IntoIterator<Item = Config>) -> Result<Quorum> {
    let nodes: Vec<Config> = nodes.into_iter().collect();
    let min_uptime = nodes.iter().filter_map(|node| node.min_uptime).max();
    let mut stores: Vec<Redis> = Vec::new();
    let mut servers = Vec::new();
    let peers = Peer::all(nodes.len());
    for (config, peer) in nodes.into_iter().zip(&peers) {
        if servers.contains(&config.servers) {
            let message = "the list of nodes has a duplicate: list each node once";
            return Err(Error::new(ErrorKind::Config, message));
        }
        servers.push(config.servers.clone());
        stores.push(Redis::lazy(config, Some(peer.clone())));
    }
    let quorum = Quorum::new(stores.iter().map(|node| Arc::new(node.clone()) as Arc<dyn Backend>))?;
    let quorum = match min_uptime {
        Some(min_uptime) => quorum.min_uptime(min_uptime),
        None => quorum,
    };
    connect_to_majority(&stores, &peers).await?;
    Ok(quorum)
}

/// Connects to the nodes until a majority has answered. The others connect in the background.
async fn connect_to_majority(stores: &[Redis], peers: &[Peer]) -> Result<()> {
    let majority = stores.len() / 2 + 1;
    let mut connecting: FuturesUnordered<_> = stores.iter().map(Redis::connect_all).collect();
    let (mut there, mut why) = (0, None::<Error>);
    while there < majority {
        let connected = connecting.next().await;
        if let Some(error) = peers.first().and_then(Peer::duplicate) {
            return Err(Error::new(error.kind(), format!("redlock: connect: {error}")));
        }
        match connected {
            Some(Ok(_)) => there += 1,
            // Keeps an error that is not retryable: the user must fix it, while a node that is down may recover.
            Some(Err(error)) if why.as_ref().is_some_and(|why| !why.is_retryable()) => drop(error),
            Some(Err(error)) => why = Some(error),
            None => {
                let kind = why.as_ref().map_or(ErrorKind::Unavailable, Error::kind);
                let why = why.map_or_else(String::new, |why| format!(": {why}"));
                let message = format!(
                    "redlock: connect: only {there} of {} nodes answered{why}",
                    stores.len()
                );
                return Err(Error::new(kind, message));
            }
        }
    }
    Ok(())
}
