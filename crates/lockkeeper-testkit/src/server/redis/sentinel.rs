//! Redis Sentinel.

use super::{Mode, RedisBuilder, RedisServer, StartError, addresses, in_parallel};

/// The name of the master in the sentinels' configuration.
const NAME: &str = "mymaster";

/// A Redis server, its replica, and three sentinels with a quorum of two.
///
/// The sentinels promote the replica when the master does not reply for a minute, or for a second after
/// [`fail_over_quickly`](Self::fail_over_quickly).
#[derive(Debug)]
pub struct RedisSentinel {
    // Dropped before the servers: after those, a port may belong to another test's server.
    sentinels: Vec<RedisServer>,
    servers: [RedisServer; 2],
}

impl RedisSentinel {
    /// Starts the servers and waits until every sentinel knows the replica and the other sentinels.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not installed, or the sentinels do not find each other.
    pub fn start() -> Result<Self, StartError> {
        let master = RedisServer::start()?;
        // Started before the sentinels, which search for replicas only every ten seconds.
        let replica = RedisServer::builder().replica_of(&master).start()?;
        let config = format!(
            "sentinel monitor {NAME} 127.0.0.1 {} 2\n\
             sentinel down-after-milliseconds {NAME} 60000\n\
             sentinel failover-timeout {NAME} 5000\n\
             sentinel parallel-syncs {NAME} 1\n",
            master.port(),
        );
        let mode = || Mode::Sentinel { config: config.clone() };
        let sentinel = || RedisBuilder { mode: mode(), ..RedisServer::builder() };
        let sentinels = in_parallel((0..3).map(|_| sentinel()).collect())?;
        for sentinel in &sentinels {
            // By default a sentinel that did not run for two seconds, as on a busy machine, does nothing for thirty
            // ("TILT mode" in the manual of Sentinel).
            let tilt = ["tilt-trigger", "20000", "tilt-period", "1000"];
            sentinel.start_command(&[&["SENTINEL", "DEBUG"][..], &tilt].concat())?;
        }
        let line =
            format!("master0:name={NAME},status=ok,address={},slaves=1,sentinels=3", master.addr());
        for sentinel in &sentinels {
            sentinel.wait_for(&["INFO", "sentinel"], &line)?;
        }
        Ok(Self { sentinels, servers: [master, replica] })
    }

    /// Starts the servers as [`start`](Self::start) does.
    ///
    /// # Panics
    ///
    /// If `redis-server` is not installed, or the sentinels do not find each other.
    #[track_caller]
    pub fn start_or_panic() -> Self {
        Self::start().unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns the URL for clients: `redis+sentinel://127.0.0.1:PORT,…,127.0.0.1:PORT/mymaster`, with the
    /// ports of the sentinels.
    pub fn url(&self) -> String {
        format!("redis+sentinel://{}/{NAME}", addresses(&self.sentinels))
    }

    /// Returns the sentinels.
    pub fn sentinels(&self) -> &[RedisServer] {
        &self.sentinels
    }

    /// Returns the sentinels, to kill and restart them.
    pub fn sentinels_mut(&mut self) -> &mut [RedisServer] {
        &mut self.sentinels
    }

    /// Returns the master, dead or alive, according to the first sentinel that replies.
    ///
    /// The server may not have been promoted yet, and other sentinels may still report the other one.
    ///
    /// # Panics
    ///
    /// If no sentinel replies.
    #[track_caller]
    pub fn master(&self) -> &RedisServer {
        &self.servers[self.master_index()]
    }

    /// Returns the other server, dead or alive.
    ///
    /// # Panics
    ///
    /// If no sentinel replies.
    #[track_caller]
    pub fn replica(&self) -> &RedisServer {
        &self.servers[1 - self.master_index()]
    }

    /// Makes the sentinels replace a master that does not reply for a second.
    ///
    /// Not the default: on a busy machine a healthy server may take that long to reply.
    pub fn fail_over_quickly(&self) {
        for sentinel in &self.sentinels {
            // A sentinel that the test has killed does not reply.
            let _ =
                sentinel.try_command(&["SENTINEL", "SET", NAME, "down-after-milliseconds", "1000"]);
        }
    }

    /// Kills the master with SIGKILL, after [`fail_over_quickly`](Self::fail_over_quickly). A few
    /// seconds later, [`master`](Self::master) is the other server.
    ///
    /// # Panics
    ///
    /// If no sentinel replies.
    #[track_caller]
    pub fn kill_master(&mut self) {
        self.fail_over_quickly();
        let index = self.master_index();
        self.servers[index].kill9();
    }

    /// Returns both servers, to kill and restart them. The first was the master at the start.
    pub fn servers_mut(&mut self) -> &mut [RedisServer; 2] {
        &mut self.servers
    }

    #[track_caller]
    fn master_index(&self) -> usize {
        let command = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME];
        let mut replies =
            self.sentinels.iter().filter_map(|sentinel| sentinel.try_command(&command).ok());
        let reply = replies.next().expect("a sentinel replies");
        let is_master = |server: &RedisServer| reply == format!("127.0.0.1\n{}", server.port());
        let index = self.servers.iter().position(is_master);
        index.unwrap_or_else(|| panic!("the master is neither server: {reply:?}"))
    }
}
