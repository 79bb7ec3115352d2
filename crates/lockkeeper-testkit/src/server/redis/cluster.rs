//! Redis Cluster.

use super::{Mode, RedisBuilder, RedisServer, StartError, addresses, in_parallel};

/// A cluster of three Redis servers without replicas.
#[derive(Debug)]
pub struct RedisCluster(Vec<RedisServer>);

impl RedisCluster {
    /// Starts a cluster and waits until every node reports `cluster_state:ok`.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not installed, or the cluster does not form.
    pub fn start() -> Result<Self, StartError> {
        let node = || RedisBuilder { mode: Mode::Cluster, ..RedisServer::builder() };
        let nodes = in_parallel((0..3).map(|_| node()).collect())?;
        let slots = [("0", "5460"), ("5461", "10922"), ("10923", "16383")];
        for ((node, (first, last)), epoch) in nodes.iter().zip(slots).zip(1..) {
            node.start_command(&["CLUSTER", "ADDSLOTSRANGE", first, last])?;
            // Otherwise all nodes start with the same epoch, and resolving the collision takes a while.
            node.start_command(&["CLUSTER", "SET-CONFIG-EPOCH", &i32::to_string(&epoch)])?;
        }
        for node in &nodes {
            for other in nodes.iter().filter(|other| other.port() != node.port()) {
                let (port, bus) = (other.port().to_string(), other.second_port().to_string());
                node.start_command(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus])?;
            }
        }
        let cluster = Self(nodes);
        cluster.wait_until_ok()?;
        Ok(cluster)
    }

    /// Starts a cluster as [`start`](Self::start) does.
    ///
    /// # Panics
    ///
    /// If `redis-server` is not installed, or the cluster does not form.
    #[track_caller]
    pub fn start_or_panic() -> Self {
        Self::start().unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns the URL for clients: `redis+cluster://127.0.0.1:PORT,127.0.0.1:PORT,127.0.0.1:PORT/`.
    pub fn url(&self) -> String {
        format!("redis+cluster://{}/", addresses(&self.0))
    }

    /// Returns the nodes, in the order of their slots.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.0
    }

    /// Returns the nodes, to kill and restart them. A restarted node keeps its slots and loses its data.
    pub fn nodes_mut(&mut self) -> &mut [RedisServer] {
        &mut self.0
    }

    /// Returns the number of keys on all nodes.
    ///
    /// # Panics
    ///
    /// If a node does not reply.
    #[track_caller]
    pub fn dbsize(&self) -> usize {
        let sizes = self.0.iter().map(|node| node.command(&["DBSIZE"]));
        sizes.map(|size| size.parse::<usize>().unwrap_or_else(|_| panic!("{size:?}"))).sum()
    }

    /// Waits until all nodes know each other and report `cluster_state:ok`, for example after a restart of one.
    ///
    /// # Errors
    ///
    /// If a node does not within 20 seconds.
    pub fn wait_until_ok(&self) -> Result<(), StartError> {
        for node in &self.0 {
            node.wait_for(&["CLUSTER", "INFO"], "cluster_known_nodes:3")?;
            node.wait_for(&["CLUSTER", "INFO"], "cluster_slots_ok:16384")?;
            node.wait_for(&["CLUSTER", "INFO"], "cluster_state:ok")?;
        }
        Ok(())
    }
}
