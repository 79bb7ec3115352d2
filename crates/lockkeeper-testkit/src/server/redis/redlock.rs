//! Independent Redis servers.

use super::{RedisBuilder, RedisServer, StartError, addresses, in_parallel};

/// Independent Redis servers, for locks on a majority of them.
#[derive(Debug)]
pub struct RedlockNodes(Vec<RedisServer>);

impl RedlockNodes {
    /// Starts `count` servers concurrently and waits until they reply.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not installed or a server does not start.
    pub fn start(count: usize) -> Result<Self, StartError> {
        Self::from_builders((0..count).map(|_| RedisServer::builder()).collect())
    }

    /// Starts the servers of these builders concurrently and waits until they reply.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not installed or a server does not start.
    pub fn from_builders(builders: Vec<RedisBuilder>) -> Result<Self, StartError> {
        in_parallel(builders).map(Self)
    }

    /// Starts servers as [`start`](Self::start) does.
    ///
    /// # Panics
    ///
    /// If `redis-server` is not installed or a server does not start.
    #[track_caller]
    pub fn start_or_panic(count: usize) -> Self {
        Self::start(count).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns the URL for clients: `redlock://127.0.0.1:PORT,127.0.0.1:PORT,…?min_uptime=0s`. Without the option, nodes
    /// that have just started would not vote.
    pub fn url(&self) -> String {
        format!("{}?min_uptime=0s", self.cautious_url())
    }

    /// Returns the URL without the option: nodes do not vote before they have been up for a TTL.
    pub fn cautious_url(&self) -> String {
        format!("redlock://{}", addresses(&self.0))
    }

    /// Returns the servers.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.0
    }

    /// Returns the servers, to kill and restart them.
    pub fn nodes_mut(&mut self) -> &mut [RedisServer] {
        &mut self.0
    }
}
