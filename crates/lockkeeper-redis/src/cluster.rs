//! Which server a lock is on.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lockkeeper_core::{Error, Result};
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};

use crate::config::{Address, Config, Servers};
use crate::connection::Connection;
use crate::error::{ErrorClass, classify, translate, unavailable};
use crate::key::Keys;
use crate::link::{Link, Target};
use crate::scripts::Script;

/// How often a request follows a slot that has moved, or waits for it to arrive.
const MOST_HOPS: usize = 6;
/// How long it waits each time for a slot that is on its way.
const PAUSE: Duration = Duration::from_millis(100);

/// The servers that keep the locks.
#[derive(Debug)]
pub(crate) enum Nodes {
    One(Arc<Link>),
    Cluster(Cluster),
}

/// The masters of a cluster. Each lock is on the one that has its slot.
#[derive(Debug)]
pub(crate) struct Cluster {
    config: Arc<Config>,
    seeds: Vec<Address>,
    map: Mutex<Map>,
    /// One asks for the map, the others wait for it.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Map {
    /// First and last slot, and who has them.
    ranges: Vec<(u16, u16, Address)>,
    links: HashMap<Address, Arc<Link>>,
    /// Counts how often it was read.
    version: u64,
}

impl Nodes {
    pub(crate) fn new(config: Config) -> Self {
        let config = Arc::new(config);
        let target = match config.servers.clone() {
            Servers::One(address) => Target::Fixed(address),
            Servers::Sentinel { sentinels, master } => Target::Sentinel { sentinels, master },
            Servers::Cluster(seeds) => {
                let (map, turn) = (Mutex::default(), tokio::sync::Mutex::default());
                return Self::Cluster(Cluster { config, seeds, map, turn });
            }
        };
        Self::One(Link::new(config, target))
    }

    /// The slot that the keys are in; only a cluster has any.
    pub(crate) fn slot(&self, keys: &Keys) -> u16 {
        match self {
            Self::One(_) => 0,
            Self::Cluster(_) => keys.slot(),
        }
    }

    /// Runs a script on the server that has the slot. `prepare` is called with each link before it is
    /// used, `add` adds keys and arguments. Also answers which connection it ran on.
    pub(crate) async fn run(
        &self,
        slot: u16,
        script: &Script,
        mut prepare: impl FnMut(&Arc<Link>),
        add: impl Fn(&mut Cmd, &Connection),
    ) -> Result<(Arc<Connection>, Value)> {
        let mut link = self.link(slot).await?;
        for _ in 0..MOST_HOPS {
            prepare(&link);
            let answer = match link.connection().await {
                Ok(connection) => {
                    let add = |command: &mut Cmd| add(command, &connection);
                    match connection.run(script, add).await {
                        Ok(answer) => return Ok((connection, answer)),
                        Err(error) => Err(error),
                    }
                }
                Err(error) => Ok(error),
            };
            link = match (self, answer) {
                (Self::Cluster(cluster), Ok(error)) => {
                    cluster.elsewhere(&link, slot, error).await?
                }
                (Self::Cluster(cluster), Err(error)) => cluster.follow(&link, slot, error).await?,
                (Self::One(_), Ok(error)) => return Err(error),
                (Self::One(_), Err(error)) => return Err(translate(error)),
            };
        }
        Err(unavailable("the slot of the lock is on its way to another node"))
    }

    /// The link to whoever has the slot.
    pub(crate) async fn link(&self, slot: u16) -> Result<Arc<Link>> {
        match self {
            Self::One(link) => Ok(link.clone()),
            Self::Cluster(cluster) => cluster.link(slot).await,
        }
    }

    /// The links to all servers that keep locks.
    pub(crate) async fn all(&self) -> Result<Vec<Arc<Link>>> {
        match self {
            Self::One(link) => Ok(vec![link.clone()]),
            Self::Cluster(cluster) => cluster.all().await,
        }
    }
}

impl Cluster {
    fn map(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn link(&self, slot: u16) -> Result<Arc<Link>> {
        let (link, version) = self.known(slot);
        if let Some(link) = link {
            return Ok(link);
        }
        self.read_map(version).await?;
        self.known(slot).0.ok_or_else(|| unavailable(format!("no node has slot {slot}")))
    }

    async fn all(&self) -> Result<Vec<Arc<Link>>> {
        let version = self.map().version;
        if version == 0 {
            self.read_map(version).await?;
        }
        let mut map = self.map();
        let mut addresses: Vec<Address> = map.ranges.iter().map(|range| range.2.clone()).collect();
        addresses.sort_by_key(ToString::to_string);
        addresses.dedup();
        Ok(addresses.into_iter().map(|address| self.link_to(&mut map, address)).collect())
    }

    fn known(&self, slot: u16) -> (Option<Arc<Link>>, u64) {
        let mut map = self.map();
        let range = map.ranges.iter().find(|(first, last, _)| (*first..=*last).contains(&slot));
        let address = range.map(|range| range.2.clone());
        (address.map(|address| self.link_to(&mut map, address)), map.version)
    }

    fn link_to(&self, map: &mut Map, address: Address) -> Arc<Link> {
        let target = Target::Fixed(address.clone());
        let make = || Link::new(self.config.clone(), target);
        map.links.entry(address).or_insert_with(make).clone()
    }

    /// Where to ask instead after an answer that was an error.
    async fn follow(&self, link: &Arc<Link>, slot: u16, error: RedisError) -> Result<Arc<Link>> {
        match error.kind() {
            ErrorKind::Server(ServerErrorKind::Moved) => {
                let version = self.map().version;
                let address = destination(&error);
                self.read_map(version).await?;
                if let Some(address) = address {
                    // The node that said so knows better than the one that gave the map.
                    let mut map = self.map();
                    map.ranges.retain(|range| (range.0, range.1) != (slot, slot));
                    map.ranges.insert(0, (slot, slot, address.clone()));
                    return Ok(self.link_to(&mut map, address));
                }
                self.link(slot).await
            }
            // Between two nodes: neither has all keys, so neither runs a script on them.
            ErrorKind::Server(ServerErrorKind::TryAgain | ServerErrorKind::Ask) => {
                tokio::time::sleep(PAUSE).await;
                Ok(link.clone())
            }
            _ if classify(&error) == ErrorClass::Broken => {
                // Whether it was obeyed is not known: the engine asks again, perhaps elsewhere.
                let version = self.map().version;
                let _ = self.read_map(version).await;
                Err(translate(error))
            }
            _ => Err(translate(error)),
        }
    }

    /// Where to ask instead if a node cannot be reached: perhaps another has taken over.
    async fn elsewhere(&self, link: &Arc<Link>, slot: u16, error: Error) -> Result<Arc<Link>> {
        let version = self.map().version;
        self.read_map(version).await?;
        let now = self.link(slot).await?;
        if Arc::ptr_eq(&now, link) { Err(error) } else { Ok(now) }
    }

    /// Asks one node after the other for the map, unless somebody else has since `version`.
    async fn read_map(&self, version: u64) -> Result<()> {
        let _turn = self.turn.lock().await;
        let known: Vec<Address> = {
            let map = self.map();
            if map.version != version {
                return Ok(());
            }
            map.ranges.iter().map(|range| range.2.clone()).collect()
        };
        let mut why: Option<Error> = None;
        let mut asked = Vec::new();
        for address in known.into_iter().chain(self.seeds.iter().cloned()) {
            if asked.contains(&address) {
                continue;
            }
            asked.push(address.clone());
            let link = self.link_to(&mut self.map(), address.clone());
            match read_map(&link, &address).await {
                Ok(ranges) => {
                    let mut map = self.map();
                    // Claims keep the links that they need.
                    map.links.retain(|at, _| ranges.iter().any(|range| range.2 == *at));
                    map.ranges = ranges;
                    map.version += 1;
                    return Ok(());
                }
                Err(error) => why = Some(error),
            }
        }
        Err(why.unwrap_or_else(|| unavailable("no node of the cluster answers")))
    }
}

/// Where a slot is, in the words of a node that does not have it: `host:port`.
fn destination(error: &RedisError) -> Option<Address> {
    let (host, port) = error.redirect_node()?.0.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let port = port.parse().ok()?;
    // A node that does not know the other's address leaves it empty: the map has it.
    (!host.is_empty()).then(|| Address { host: host.to_owned(), port })
}

async fn read_map(link: &Arc<Link>, from: &Address) -> Result<Vec<(u16, u16, Address)>> {
    let connection = link.connection().await?;
    let slots = connection.send(redis::cmd("CLUSTER").arg("SLOTS")).await.map_err(translate)?;
    let ranges = slots.as_sequence().unwrap_or_default().iter().filter_map(|range| {
        let [Value::Int(first), Value::Int(last), master, ..] = range.as_sequence()? else {
            return None;
        };
        let [host, Value::Int(port), ..] = master.as_sequence()? else { return None };
        let host: Option<String> = redis::from_redis_value(host.clone()).ok().flatten();
        // A node that does not know its own address leaves it empty.
        let host = host.filter(|host| !host.is_empty()).unwrap_or_else(|| from.host.clone());
        let port = u16::try_from(*port).ok()?;
        let address = Address { host, port };
        Some((u16::try_from(*first).ok()?, u16::try_from(*last).ok()?, address))
    });
    let ranges: Vec<_> = ranges.collect();
    if ranges.is_empty() {
        return Err(unavailable(format!("{from}: the cluster has no slots assigned")));
    }
    Ok(ranges)
}
