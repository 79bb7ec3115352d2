//! Servers that know nothing of each other.

use super::{RedisBuilder, RedisServer, StartError, addresses, in_parallel};

/// Several Redis servers that know nothing of each other, for locks that a majority of them grants.
#[derive(Debug)]
pub struct RedlockNodes(Vec<RedisServer>);

impl RedlockNodes {
    /// Starts so many, all at once, and waits until they answer.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not installed or one does not come up.
    pub fn start(count: usize) -> Result<Self, StartError> {
        Self::from_builders((0..count).map(|_| RedisServer::builder()).collect())
    }

    /// Starts the servers of these builders, all at once, and waits until they answer.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not installed or one does not come up.
    pub fn from_builders(builders: Vec<RedisBuilder>) -> Result<Self, StartError> {
        in_parallel(builders).map(Self)
    }

    /// Starts so many, and fails the test if that fails.
    ///
    /// # Panics
    ///
    /// If `redis-server` is not installed or one does not come up.
    #[track_caller]
    pub fn start_or_panic(count: usize) -> Self {
        Self::start(count).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The address for a client: `redlock://127.0.0.1:PORT,127.0.0.1:PORT,…?min_uptime=0s`. Nodes that have just been
    /// started would not vote otherwise.
    pub fn url(&self) -> String {
        format!("{}?min_uptime=0s", self.cautious_url())
    }

    /// The same without the option: nodes do not vote before they have been up for a ttl.
    pub fn cautious_url(&self) -> String {
        format!("redlock://{}", addresses(&self.0))
    }

    /// The servers.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.0
    }

    /// The servers, to be killed and restarted.
    pub fn nodes_mut(&mut self) -> &mut [RedisServer] {
        &mut self.0
    }
}
