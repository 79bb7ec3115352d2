//! Redlock: a lock that a majority of independent nodes agrees on.

use std::sync::Arc;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use lockkeeper_core::{Backend, Error, ErrorKind, Quorum, Result};

use crate::backend::Redis;
use crate::config::Config;

/// A [`Quorum`] of Redis nodes that know nothing of each other.
///
/// It opens when a majority of the nodes is there; the others are connected to when they come.
///
/// # Errors
///
/// [`Config`](ErrorKind::Config) for fewer than three nodes or the same node twice,
/// [`Unavailable`](ErrorKind::Unavailable) if there is no majority.
pub async fn redlock(nodes: impl IntoIterator<Item = Config>) -> Result<Quorum> {
    let mut stores: Vec<Redis> = Vec::new();
    let mut servers = Vec::new();
    for mut config in nodes {
        if servers.contains(&config.servers) {
            let message =
                "a quorum needs nodes that are not the same: one stands in the list twice";
            return Err(Error::new(ErrorKind::Config, message));
        }
        servers.push(config.servers.clone());
        config.tells = true;
        stores.push(Redis::lazy(config));
    }
    let quorum = Quorum::new(stores.iter().map(|node| Arc::new(node.clone()) as Arc<dyn Backend>))?;
    let majority = stores.len() / 2 + 1;
    let mut connecting: FuturesUnordered<_> = stores.iter().map(Redis::run_id).collect();
    let (mut there, mut why) = (Vec::new(), None::<Error>);
    while there.len() < majority {
        match connecting.next().await {
            Some(Ok(run)) if run.is_some() && there.contains(&run) => {
                let message = "redlock: connect: two of the nodes are the same server";
                return Err(Error::new(ErrorKind::Config, message));
            }
            Some(Ok(run)) => there.push(run),
            // One that is down may come up; one that refuses us will not change its mind.
            Some(Err(error)) if why.as_ref().is_some_and(|why| !why.is_retryable()) => drop(error),
            Some(Err(error)) => why = Some(error),
            None => {
                let kind = why.as_ref().map_or(ErrorKind::Unavailable, Error::kind);
                let there = there.len();
                let why = why.map_or_else(String::new, |why| format!(": {why}"));
                let message =
                    format!("redlock: connect: only {there} of {} nodes answer{why}", stores.len());
                return Err(Error::new(kind, message));
            }
        }
    }
    Ok(quorum)
}
