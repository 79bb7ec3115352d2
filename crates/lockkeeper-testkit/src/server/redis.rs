//! Redis: one server. Several that belong together are in the files beneath.

mod cluster;
mod redlock;
mod resp;
mod sentinel;
mod tls;

pub use cluster::RedisCluster;
pub use redlock::RedlockNodes;
pub use sentinel::RedisSentinel;

use std::fmt;
use std::fs;
use std::io;
use std::net::TcpStream;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{self, sleep};
use std::time::Instant;

use rustix::process::{Pid, Signal};

use super::{
    Binaries, POLL_INTERVAL, Ports, Recipe, START_TIMEOUT, Server, ServerClock, StartError,
};
use resp::Client;

/// A Redis server without persistence by default. Its common methods are those of [`Server`].
///
/// ```
/// use lockkeeper_testkit::server::RedisServer;
///
/// let redis = RedisServer::builder().password("secret").start_or_panic();
/// assert_eq!(redis.command(&["SET", "a", "1"]), "OK");
/// assert_eq!(redis.command(&["DBSIZE"]), "1");
/// ```
pub struct RedisServer {
    server: Server,
    login: Option<Login>,
}

impl RedisServer {
    /// Starts one and waits until it answers.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not installed or does not come up.
    pub fn start() -> Result<Self, StartError> {
        Self::builder().start()
    }

    /// Starts one, and fails the test if that fails.
    ///
    /// # Panics
    ///
    /// If `redis-server` is not installed or does not come up.
    #[track_caller]
    pub fn start_or_panic() -> Self {
        Self::builder().start_or_panic()
    }

    /// One that is not started yet, to be set up otherwise.
    pub fn builder() -> RedisBuilder {
        RedisBuilder {
            args: Vec::new(),
            login: None,
            make: RedisMake::Installed,
            mode: Mode::Single,
            replica: false,
            clock: None,
        }
    }

    /// Starts one with further arguments, such as `["--maxmemory", "10mb"]`. Passwords are for the
    /// [`builder`](Self::builder), which then uses them too.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not installed or does not come up.
    pub fn with_args(args: &[&str]) -> Result<Self, StartError> {
        Self::from_binaries(&Binaries::installed(), args)
    }

    /// Starts one from programs in other places, with further arguments.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not there or does not come up.
    pub fn from_binaries(binaries: &Binaries, args: &[&str]) -> Result<Self, StartError> {
        Self::builder().args(args).start_from(binaries)
    }

    /// Runs a command on a connection of its own, logged in, and returns the answer as text: an
    /// array is its elements, one to a line, and nothing is `(nil)`.
    ///
    /// # Panics
    ///
    /// If the server answers with an error, or not at all.
    #[track_caller]
    pub fn command(&self, args: &[&str]) -> String {
        self.try_command(args).unwrap_or_else(|error| panic!("{self:?}: {args:?}: {error}"))
    }

    /// Runs a command as [`command`](Self::command) does, for where it may fail.
    ///
    /// # Errors
    ///
    /// The server's own, as it words it (`WRONGTYPE …`), or that of the connection.
    pub fn try_command(&self, args: &[&str]) -> io::Result<String> {
        let stream = TcpStream::connect_timeout(&self.addr(), START_TIMEOUT)?;
        stream.set_read_timeout(Some(START_TIMEOUT))?;
        stream.set_write_timeout(Some(START_TIMEOUT))?;
        let mut client = Client::new(stream);
        Login::log_in(self.login.as_ref(), &mut client)?;
        client.call(args)
    }

    /// Runs a command that is part of a start.
    fn ask_for(&self, command: &[&str]) -> Result<String, StartError> {
        let failed =
            |e| StartError(format!("redis-server: {command:?} on port {}: {e}", self.port()));
        self.try_command(command).map_err(failed)
    }

    /// The certificate, as PEM, of the authority that vouches for a server with [`tls`](RedisBuilder::tls).
    pub fn ca_file(&self) -> PathBuf {
        self.dir().join(tls::CA)
    }

    /// The port of its mode.
    fn second_port(&self) -> u16 {
        self.server.ports.second
    }

    /// Waits until the server's answer to a command contains this line.
    fn wait_for(&self, command: &[&str], line: &str) -> Result<(), StartError> {
        let start = Instant::now();
        let mut answer = String::new();
        while start.elapsed() < START_TIMEOUT {
            answer = self.try_command(command).unwrap_or_else(|error| error.to_string());
            if answer.lines().any(|got| got == line) {
                return Ok(());
            }
            sleep(POLL_INTERVAL);
        }
        let answer: Vec<&str> = answer.lines().collect();
        let (port, answer) = (self.port(), answer.join(" | "));
        Err(StartError(format!("redis-server: no {line:?} on port {port}, but: {answer}")))
    }
}

impl Deref for RedisServer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

impl DerefMut for RedisServer {
    fn deref_mut(&mut self) -> &mut Server {
        &mut self.server
    }
}

impl fmt::Debug for RedisServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.server.fmt(f)
    }
}

/// How to start a [`RedisServer`]: from [`RedisServer::builder`].
#[must_use]
pub struct RedisBuilder {
    args: Vec<String>,
    login: Option<Login>,
    make: RedisMake,
    mode: Mode,
    replica: bool,
    clock: Option<ServerClock>,
}

/// Which server to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RedisMake {
    /// The `redis-server` of the system.
    #[default]
    Installed,
    /// Redis 6.2, from `./check servers`.
    Redis62,
    /// Valkey, from `./check servers`.
    Valkey,
}

impl RedisBuilder {
    /// Chooses the server.
    pub fn make(mut self, make: RedisMake) -> Self {
        self.make = make;
        self
    }

    /// Adds an argument, such as `"--maxmemory", "1mb"`.
    pub fn arg(self, name: &str, value: &str) -> Self {
        self.args(&[name, value])
    }

    /// Adds arguments, such as `["--maxmemory", "1mb"]`.
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(ToString::to_string));
        self
    }

    /// Demands a password, which must be letters and digits. It is part of the server's url.
    pub fn password(mut self, password: &str) -> Self {
        self.login = Some(Login { user: None, password: password.to_owned() });
        self.args(&["--requirepass", password])
    }

    /// Demands this user's name and password, which must be letters and digits: the default user is
    /// off, and this one may do everything. They are part of the server's url.
    pub fn user(mut self, user: &str, password: &str) -> Self {
        self.login = Some(Login { user: Some(user.to_owned()), password: password.to_owned() });
        let rule = format!(">{password}");
        self.args(&["--user", user, "on", &rule, "~*", "&*", "+@all", "--user", "default", "off"])
    }

    /// Has it write every change to disk before it answers, so that a restart keeps its data.
    pub fn persistent(self) -> Self {
        self.args(&["--appendonly", "yes", "--appendfsync", "always"])
    }

    /// Enables TLS, with a new certificate for `localhost` and 127.0.0.1, on a second port: the
    /// url is `rediss://localhost:PORT/`. Clients need no certificate.
    ///
    /// [`addr`](Server::addr) and [`port`](Server::port) are still those without TLS, which
    /// [`command`](RedisServer::command) uses.
    pub fn tls(mut self) -> Self {
        self.mode = Mode::Tls;
        self
    }

    /// Gives it a wall clock of its own.
    pub fn clock(mut self, clock: &ServerClock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// Makes it a replica of another. It is started when it has all that the other has.
    pub fn replica_of(mut self, other: &RedisServer) -> Self {
        self.replica = true;
        if let Some(login) = &other.login {
            self = self.args(&["--masterauth", &login.password]);
            if let Some(user) = &login.user {
                self = self.args(&["--masteruser", user]);
            }
        }
        self.args(&["--replicaof", "127.0.0.1", &other.port().to_string()])
    }

    /// Starts it and waits until it answers.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not installed or does not come up.
    pub fn start(self) -> Result<RedisServer, StartError> {
        self.start_from(&Binaries::installed())
    }

    /// Starts it, and fails the test if that fails.
    ///
    /// # Panics
    ///
    /// If `redis-server` is not installed or does not come up.
    #[track_caller]
    pub fn start_or_panic(self) -> RedisServer {
        self.start().unwrap_or_else(|error| panic!("{error}"))
    }

    fn start_from(self, binaries: &Binaries) -> Result<RedisServer, StartError> {
        let Self { args, login, make, mode, replica, clock } = self;
        let program = match make {
            RedisMake::Installed => binaries.find("redis-server", "redis-server")?,
            RedisMake::Redis62 => Binaries::downloaded("redis-6.2", "redis-server")?,
            RedisMake::Valkey => Binaries::downloaded("valkey", "valkey-server")?,
        };
        let recipe = Redis { program, args, login: login.clone(), make, mode, clock };
        let server = Server::launch(recipe)?;
        let server = RedisServer { server, login };
        if replica {
            server.wait_for(&["INFO", "replication"], "master_link_status:up")?;
        }
        Ok(server)
    }
}

impl fmt::Debug for RedisBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Its arguments may contain a password.
        f.debug_struct("RedisBuilder").finish_non_exhaustive()
    }
}

/// Starts them all at once.
fn in_parallel(builders: Vec<RedisBuilder>) -> Result<Vec<RedisServer>, StartError> {
    thread::scope(|scope| {
        let starts = builders.into_iter().map(|builder| scope.spawn(|| builder.start()));
        let starts: Vec<_> = starts.collect();
        starts.into_iter().map(|start| start.join().expect("a start does not panic")).collect()
    })
}

/// Their addresses, with commas between.
fn addresses(servers: &[RedisServer]) -> String {
    let addresses: Vec<_> = servers.iter().map(|server| server.addr().to_string()).collect();
    addresses.join(",")
}

/// As whom to talk to a server.
#[derive(Clone)]
struct Login {
    user: Option<String>,
    password: String,
}

impl Login {
    fn log_in(login: Option<&Self>, client: &mut Client) -> io::Result<()> {
        if let Some(Self { user, password }) = login {
            client.call(&["AUTH", user.as_deref().unwrap_or("default"), password])?;
        }
        Ok(())
    }
}

/// What kind of server it is.
enum Mode {
    Single,
    /// One whose second port is for TLS.
    Tls,
    /// A node of a cluster, whose second port is for the other nodes.
    Cluster,
    /// A sentinel. It also writes down in this file what it learns.
    Sentinel {
        config: String,
    },
}

/// The name of its file.
const SENTINEL_CONF: &str = "sentinel.conf";

struct Redis {
    program: PathBuf,
    args: Vec<String>,
    login: Option<Login>,
    make: RedisMake,
    mode: Mode,
    clock: Option<ServerClock>,
}

impl Recipe for Redis {
    fn name(&self) -> &'static str {
        "redis-server"
    }

    fn url(&self, ports: Ports) -> String {
        let login = self.login.as_ref().map(|Login { user, password }| {
            format!("{}:{password}@", user.as_deref().unwrap_or_default())
        });
        let login = login.unwrap_or_default();
        match self.mode {
            Mode::Tls => format!("rediss://{login}localhost:{}/", ports.second),
            _ => format!("redis://{login}127.0.0.1:{}/", ports.main),
        }
    }

    fn prepare(&self, dir: &Path) -> Result<(), StartError> {
        let written = match &self.mode {
            Mode::Single | Mode::Cluster => Ok(()),
            Mode::Tls => tls::write_certificates(dir),
            Mode::Sentinel { config } => fs::write(dir.join(SENTINEL_CONF), config),
        };
        written.map_err(|e| StartError(format!("redis-server: cannot write its files: {e}")))
    }

    fn command(&self, dir: &Path, ports: Ports) -> Command {
        let mut command = Command::new(&self.program);
        command.envs(self.clock.iter().flat_map(ServerClock::environment));
        if let Mode::Sentinel { .. } = self.mode {
            // The name of a file comes before everything else.
            command.arg(dir.join(SENTINEL_CONF)).arg("--sentinel");
        }
        let port = ports.main.to_string();
        command.args(["--port", &port, "--bind", "127.0.0.1", "--daemonize", "no", "--dir"]);
        command.arg(dir);
        match self.mode {
            Mode::Sentinel { .. } => return command,
            Mode::Single => {}
            Mode::Tls => {
                command.args(["--tls-port", &ports.second.to_string(), "--tls-auth-clients", "no"]);
                command.args(["--tls-ca-cert-file", tls::CA]);
                command.args(["--tls-cert-file", tls::CERTIFICATE, "--tls-key-file", tls::KEY]);
            }
            Mode::Cluster => {
                let bus = ports.second.to_string();
                command.args(["--cluster-enabled", "yes", "--cluster-port", &bus]);
                // Longer than a busy machine keeps a node from answering the others.
                command.args(["--cluster-node-timeout", "10000"]);
            }
        }
        command.args(["--save", "", "--appendonly", "no"]);
        // A replica need not wait for others that might come.
        command.args(["--repl-diskless-sync-delay", "0"]);
        if self.make != RedisMake::Redis62 {
            // For `DEBUG SLEEP`, which older servers always allow.
            command.args(["--enable-debug-command", "yes"]);
        }
        command.args(&self.args);
        command
    }

    fn ask(&self, stream: TcpStream, pid: Pid, _: &Path) -> io::Result<bool> {
        let mut client = Client::new(stream);
        Login::log_in(self.login.as_ref(), &mut client)?;
        // While it loads its data, this is an error.
        client.call(&["PING"])?;
        let info = client.call(&["INFO", "server"])?;
        let own = format!("process_id:{}", pid.as_raw_pid());
        Ok(info.lines().any(|line| line == own))
    }

    fn shutdown_signal(&self) -> Signal {
        // It has nothing to save or to tidy up.
        Signal::KILL
    }

    fn clean_up(&self, _: &Path) {}
}
