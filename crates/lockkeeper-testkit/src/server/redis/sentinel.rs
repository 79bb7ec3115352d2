//! Redis Sentinel.

use super::{Mode, RedisBuilder, RedisServer, StartError, addresses, in_parallel};

/// What the sentinels call the master.
const NAME: &str = "mymaster";

/// A Redis server, its replica, and three sentinels that make the replica the master when two of them
/// miss the master.
///
/// They do so after a minute, and from [`watch_closely`](Self::watch_closely) on after a second.
#[derive(Debug)]
pub struct RedisSentinel {
    // They go before the servers do, and so never see another's server on a port of ours.
    sentinels: Vec<RedisServer>,
    servers: [RedisServer; 2],
}

impl RedisSentinel {
    /// Starts them and waits until every sentinel knows the replica and the other sentinels.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not installed, or they do not come together.
    pub fn start() -> Result<Self, StartError> {
        let master = RedisServer::start()?;
        // Sentinels look for replicas only every ten seconds, so it is there before they are.
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
            // One that was kept from running for two seconds would do nothing for thirty.
            let patience = ["tilt-trigger", "20000", "tilt-period", "1000"];
            sentinel.ask_for(&[&["SENTINEL", "DEBUG"][..], &patience].concat())?;
        }
        let line =
            format!("master0:name={NAME},status=ok,address={},slaves=1,sentinels=3", master.addr());
        for sentinel in &sentinels {
            sentinel.wait_for(&["INFO", "sentinel"], &line)?;
        }
        Ok(Self { sentinels, servers: [master, replica] })
    }

    /// Starts them, and fails the test if that fails.
    ///
    /// # Panics
    ///
    /// If `redis-server` is not installed, or they do not come together.
    #[track_caller]
    pub fn start_or_panic() -> Self {
        Self::start().unwrap_or_else(|error| panic!("{error}"))
    }

    /// The address for a client: `redis+sentinel://127.0.0.1:PORT,…,127.0.0.1:PORT/mymaster`, with the
    /// ports of the sentinels.
    pub fn url(&self) -> String {
        format!("redis+sentinel://{}/{NAME}", addresses(&self.sentinels))
    }

    /// The sentinels.
    pub fn sentinels(&self) -> &[RedisServer] {
        &self.sentinels
    }

    /// The sentinels, to be killed and restarted.
    pub fn sentinels_mut(&mut self) -> &mut [RedisServer] {
        &mut self.sentinels
    }

    /// The server that the sentinels call the master, alive or not: the first that answers is asked.
    ///
    /// It may not know yet that it is, and other sentinels may still name the other.
    ///
    /// # Panics
    ///
    /// If no sentinel answers.
    #[track_caller]
    pub fn master(&self) -> &RedisServer {
        &self.servers[self.master_index()]
    }

    /// The other server, alive or not.
    ///
    /// # Panics
    ///
    /// If no sentinel answers.
    #[track_caller]
    pub fn replica(&self) -> &RedisServer {
        &self.servers[1 - self.master_index()]
    }

    /// Has the sentinels replace a master that does not answer for a second.
    ///
    /// Not from the start: on a busy machine a healthy server may take that long to answer.
    pub fn watch_closely(&self) {
        for sentinel in &self.sentinels {
            // One that the test has killed need not know.
            let _ =
                sentinel.try_command(&["SENTINEL", "SET", NAME, "down-after-milliseconds", "1000"]);
        }
    }

    /// Kills the master with SIGKILL, while the sentinels [watch it closely](Self::watch_closely). A few
    /// seconds later, [`master`](Self::master) is the other.
    ///
    /// # Panics
    ///
    /// If no sentinel answers.
    #[track_caller]
    pub fn kill_master(&mut self) {
        self.watch_closely();
        let index = self.master_index();
        self.servers[index].kill9();
    }

    /// Both servers, to be killed and restarted. The first is the one that was the master first.
    pub fn servers_mut(&mut self) -> &mut [RedisServer; 2] {
        &mut self.servers
    }

    #[track_caller]
    fn master_index(&self) -> usize {
        let ask = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME];
        let mut answers =
            self.sentinels.iter().filter_map(|sentinel| sentinel.try_command(&ask).ok());
        let answer = answers.next().expect("one of the sentinels answers");
        let is_it = |server: &RedisServer| answer == format!("127.0.0.1\n{}", server.port());
        let index = self.servers.iter().position(is_it);
        index.unwrap_or_else(|| panic!("the master is neither server: {answer:?}"))
    }
}
