//! The slot map of a cluster.

use std::collections::HashMap;
use std::error::Error as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{Error, Result};
use redis::{ErrorKind, RedisError, ServerErrorKind, Value};

use super::node::{CreateNode, Node, Sharing};
use super::reconnecting::{ReconnectingClient, Target};
use super::settings::Address;
use crate::error::{ErrorClass, classify, translate, unavailable};

/// The pause before a request is repeated while its slot is migrating.
const PAUSE: Duration = Duration::from_millis(100);

/// The masters of a cluster. Each key is on the master of its slot.
pub(crate) struct Cluster<N> {
    create: CreateNode<N>,
    seeds: Vec<Address>,
    map: Mutex<Map<N>>,
    /// Locked by the task that reads the map; the others wait for it.
    reading: tokio::sync::Mutex<()>,
}

struct Map<N> {
    /// First and last slot, and the address of their master.
    ranges: Vec<(u16, u16, Address)>,
    nodes: HashMap<Address, Arc<N>>,
    /// How often the map was read.
    version: u64,
}

impl<N: Node> Cluster<N> {
    pub(super) fn new(seeds: Vec<Address>, create: CreateNode<N>) -> Self {
        let map = Map { ranges: Vec::new(), nodes: HashMap::new(), version: 0 };
        Self { create, seeds, map: Mutex::new(map), reading: tokio::sync::Mutex::default() }
    }

    fn map(&self) -> MutexGuard<'_, Map<N>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the node that has a slot.
    pub(super) async fn node(&self, slot: u16) -> Result<Arc<N>> {
        let (node, version) = self.known(slot);
        if let Some(node) = node {
            return Ok(node);
        }
        self.read_map(version).await?;
        self.known(slot).0.ok_or_else(|| unavailable(format!("no node has slot {slot}")))
    }

    /// Returns all masters. Reads the map first, because no request to a slot corrects it after a failover.
    pub(super) async fn nodes(&self) -> Result<Vec<Arc<N>>> {
        let version = self.map().version;
        self.read_map(version).await?;
        let mut map = self.map();
        let mut addresses: Vec<Address> = map.ranges.iter().map(|range| range.2.clone()).collect();
        addresses.sort_by_key(ToString::to_string);
        addresses.dedup();
        Ok(addresses.iter().map(|address| self.node_at(&mut map, address)).collect())
    }

    fn known(&self, slot: u16) -> (Option<Arc<N>>, u64) {
        let mut map = self.map();
        let range = map.ranges.iter().find(|(first, last, _)| (*first..=*last).contains(&slot));
        let address = range.map(|range| range.2.clone());
        (address.map(|address| self.node_at(&mut map, &address)), map.version)
    }

    fn node_at(&self, map: &mut Map<N>, address: &Address) -> Arc<N> {
        let create = || (self.create)(Target::Fixed(address.clone()), Sharing::None);
        map.nodes.entry(address.clone()).or_insert_with(create).clone()
    }

    /// Returns the node on which to retry a request that failed on `node`, or the error if a retry would not help.
    pub(super) async fn redirect(&self, node: &Arc<N>, slot: u16, error: Error) -> Result<Arc<N>> {
        let version = self.map().version;
        let Some(reply) = error.source().and_then(|source| source.downcast_ref::<RedisError>())
        else {
            // The node could not be reached: a failover may have replaced it.
            self.read_map(version).await?;
            let now = self.node(slot).await?;
            return if Arc::ptr_eq(&now, node) { Err(error) } else { Ok(now) };
        };
        match reply.kind() {
            ErrorKind::Server(ServerErrorKind::Moved) => {
                let address = destination(reply);
                self.read_map(version).await?;
                if let Some(address) = address {
                    // The redirect is newer than the map, which may come from another node.
                    let mut map = self.map();
                    map.ranges.retain(|range| (range.0, range.1) != (slot, slot));
                    map.ranges.insert(0, (slot, slot, address.clone()));
                    return Ok(self.node_at(&mut map, &address));
                }
                self.node(slot).await
            }
            // The slot is migrating: neither node has all keys, so neither runs a script on them.
            ErrorKind::Server(ServerErrorKind::TryAgain | ServerErrorKind::Ask) => {
                tokio::time::sleep(PAUSE).await;
                Ok(node.clone())
            }
            _ if classify(reply) == ErrorClass::Broken => {
                // The server may have executed the request. The engine repeats it, perhaps on another node.
                let _ = self.read_map(version).await;
                Err(error)
            }
            _ => Err(error),
        }
    }

    /// Reads the map from the first node that replies, unless another task has read it since `version`.
    async fn read_map(&self, version: u64) -> Result<()> {
        let _reading = self.reading.lock().await;
        let known: Vec<Address> = {
            let map = self.map();
            if map.version != version {
                return Ok(());
            }
            map.ranges.iter().map(|range| range.2.clone()).collect()
        };
        let mut failure: Option<Error> = None;
        let mut tried = Vec::new();
        for address in known.into_iter().chain(self.seeds.iter().cloned()) {
            if tried.contains(&address) {
                continue;
            }
            tried.push(address.clone());
            let node = self.node_at(&mut self.map(), &address);
            match read_ranges(node.client(), &address).await {
                Ok(ranges) => {
                    let mut map = self.map();
                    // Claims keep references to the nodes that they use.
                    map.nodes.retain(|at, _| ranges.iter().any(|range| range.2 == *at));
                    map.ranges = ranges;
                    map.version += 1;
                    return Ok(());
                }
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or_else(|| unavailable("no node of the cluster replies")))
    }
}

/// Parses the address (`host:port`) from the redirect of a node that does not have the slot.
fn destination(error: &RedisError) -> Option<Address> {
    let (host, port) = error.redirect_node()?.0.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let port = port.parse().ok()?;
    // The host is empty if the node does not know it. Then the map has the address.
    (!host.is_empty()).then(|| Address::tcp(host, port))
}

async fn read_ranges(
    client: &Arc<ReconnectingClient>,
    from: &Address,
) -> Result<Vec<(u16, u16, Address)>> {
    let session = client.session().await?;
    let slots = session.send(redis::cmd("CLUSTER").arg("SLOTS")).await.map_err(translate)?;
    let ranges = ranges(&slots, from);
    if ranges.is_empty() {
        return Err(unavailable(format!("{from}: the cluster has assigned no slots")));
    }
    Ok(ranges)
}

/// Reads the reply to `CLUSTER SLOTS` of the node at an address.
pub(crate) fn ranges(slots: &Value, from: &Address) -> Vec<(u16, u16, Address)> {
    let ranges = slots.as_sequence().unwrap_or_default().iter().filter_map(|range| {
        let [Value::Int(first), Value::Int(last), master, ..] = range.as_sequence()? else {
            return None;
        };
        let [host, Value::Int(port), ..] = master.as_sequence()? else { return None };
        let host: Option<String> = redis::from_redis_value(host.clone()).ok().flatten();
        // The host is empty if the node does not know its own address.
        let host = host.filter(|host| !host.is_empty()).unwrap_or_else(|| from.host().to_owned());
        let port = u16::try_from(*port).ok()?;
        let address = Address::tcp(host, port);
        Some((u16::try_from(*first).ok()?, u16::try_from(*last).ok()?, address))
    });
    ranges.collect()
}
