//! Redis: one server. Submodules have groups of servers.

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

/// A Redis server, by default without persistence. Its common methods are those of [`Server`].
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
    /// Starts a server and waits until it replies.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not installed or does not start.
    pub fn start() -> Result<Self, StartError> {
        Self::builder().start()
    }

    /// Starts a server as [`start`](Self::start) does.
    ///
    /// # Panics
    ///
    /// If `redis-server` is not installed or does not start.
    #[track_caller]
    pub fn start_or_panic() -> Self {
        Self::builder().start_or_panic()
    }

    /// Returns a builder for a server with other settings.
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

    /// Starts a server with further arguments, such as `["--maxmemory", "10mb"]`. Set passwords with the
    /// [`builder`](Self::builder), which also logs in with them.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not installed or does not start.
    pub fn with_args(args: &[&str]) -> Result<Self, StartError> {
        Self::from_binaries(&Binaries::installed(), args)
    }

    /// Starts a server from a program in these directories, with further arguments.
    ///
    /// # Errors
    ///
    /// If `redis-server` is missing or does not start.
    pub fn from_binaries(binaries: &Binaries, args: &[&str]) -> Result<Self, StartError> {
        Self::builder().args(args).start_from(binaries)
    }

    /// Runs a command on a new connection, logged in, and returns the reply as text. The text of an array is its elements,
    /// one per line; that of a null is `(nil)`.
    ///
    /// # Panics
    ///
    /// If the server replies with an error or does not reply.
    #[track_caller]
    pub fn command(&self, args: &[&str]) -> String {
        self.try_command(args).unwrap_or_else(|error| panic!("{self:?}: {args:?}: {error}"))
    }

    /// Runs a command as [`command`](Self::command) does.
    ///
    /// # Errors
    ///
    /// The server's error in its own words (`WRONGTYPE …`), or an error of the connection.
    pub fn try_command(&self, args: &[&str]) -> io::Result<String> {
        let stream = TcpStream::connect_timeout(&self.addr(), START_TIMEOUT)?;
        stream.set_read_timeout(Some(START_TIMEOUT))?;
        stream.set_write_timeout(Some(START_TIMEOUT))?;
        let mut client = Client::new(stream);
        Login::log_in(self.login.as_ref(), &mut client)?;
        client.call(args)
    }

    /// Runs a command that is part of the start of a group.
    fn start_command(&self, command: &[&str]) -> Result<String, StartError> {
        let failed =
            |e| StartError(format!("redis-server: {command:?} on port {}: {e}", self.port()));
        self.try_command(command).map_err(failed)
    }

    /// Returns the path of the CA certificate (PEM) of a server with [`tls`](RedisBuilder::tls).
    pub fn ca_file(&self) -> PathBuf {
        self.dir().join(tls::CA)
    }

    /// Returns the port of the cluster bus or of TLS.
    fn second_port(&self) -> u16 {
        self.server.ports.second
    }

    /// Waits until the server's reply to a command contains this line.
    fn wait_for(&self, command: &[&str], line: &str) -> Result<(), StartError> {
        let start = Instant::now();
        let mut reply = String::new();
        while start.elapsed() < START_TIMEOUT {
            reply = self.try_command(command).unwrap_or_else(|error| error.to_string());
            if reply.lines().any(|got| got == line) {
                return Ok(());
            }
            sleep(POLL_INTERVAL);
        }
        let reply: Vec<&str> = reply.lines().collect();
        let (port, reply) = (self.port(), reply.join(" | "));
        Err(StartError(format!(
            "redis-server: no {line:?} on port {port} within {START_TIMEOUT:?}, but: {reply}"
        )))
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

/// A builder for a [`RedisServer`], from [`RedisServer::builder`].
#[must_use]
pub struct RedisBuilder {
    args: Vec<String>,
    login: Option<Login>,
    make: RedisMake,
    mode: Mode,
    replica: bool,
    clock: Option<ServerClock>,
}

/// The server program to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RedisMake {
    /// The `redis-server` of the system.
    #[default]
    Installed,
    /// Redis 6.2, from `./check servers`.
    Redis62,
    /// Redis 8.2, from `./check servers`.
    Redis82,
    /// Valkey 9.1, from `./check servers`.
    Valkey,
}

impl RedisBuilder {
    /// Sets the server program.
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

    /// Requires a password, which must be letters and digits. The server's URL contains it.
    pub fn password(mut self, password: &str) -> Self {
        self.login = Some(Login { user: None, password: password.to_owned() });
        self.args(&["--requirepass", password])
    }

    /// Requires a user name and a password, which must be letters and digits. The user has all permissions, and the
    /// default user is off. The server's URL contains both.
    pub fn user(mut self, user: &str, password: &str) -> Self {
        self.login = Some(Login { user: Some(user.to_owned()), password: password.to_owned() });
        let rule = format!(">{password}");
        self.args(&["--user", user, "on", &rule, "~*", "&*", "+@all", "--user", "default", "off"])
    }

    /// Makes the server flush every change to disk before it replies, so that a restart keeps its data.
    pub fn persistent(self) -> Self {
        self.args(&["--appendonly", "yes", "--appendfsync", "always"])
    }

    /// Enables TLS on a second port, with a new certificate for `localhost` and 127.0.0.1. The
    /// URL is `rediss://localhost:PORT/`. Clients need no certificate.
    ///
    /// [`addr`](Server::addr), [`port`](Server::port) and [`command`](RedisServer::command) still use the port without TLS.
    pub fn tls(mut self) -> Self {
        self.mode = Mode::Tls;
        self
    }

    /// Runs the server on this wall clock.
    pub fn clock(mut self, clock: &ServerClock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// Makes the server a replica. The start waits until it is in sync with its master.
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

    /// Starts the server and waits until it replies.
    ///
    /// # Errors
    ///
    /// If its program is not installed or does not start.
    pub fn start(self) -> Result<RedisServer, StartError> {
        self.start_from(&Binaries::installed())
    }

    /// Starts the server as [`start`](Self::start) does.
    ///
    /// # Panics
    ///
    /// If its program is not installed or does not start.
    #[track_caller]
    pub fn start_or_panic(self) -> RedisServer {
        self.start().unwrap_or_else(|error| panic!("{error}"))
    }

    fn start_from(self, binaries: &Binaries) -> Result<RedisServer, StartError> {
        let Self { args, login, make, mode, replica, clock } = self;
        let program = match make {
            RedisMake::Installed => binaries.find("redis-server", "redis-server")?,
            RedisMake::Redis62 => Binaries::downloaded("redis-6.2", "redis-server")?,
            RedisMake::Redis82 => Binaries::downloaded("redis-8.2", "redis-server")?,
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

/// Starts all servers concurrently.
fn in_parallel(builders: Vec<RedisBuilder>) -> Result<Vec<RedisServer>, StartError> {
    thread::scope(|scope| {
        let starts = builders.into_iter().map(|builder| scope.spawn(|| builder.start()));
        let starts: Vec<_> = starts.collect();
        starts.into_iter().map(|start| start.join().expect("a start does not panic")).collect()
    })
}

/// Returns the addresses of the servers, joined by commas.
fn addresses(servers: &[RedisServer]) -> String {
    let addresses: Vec<_> = servers.iter().map(|server| server.addr().to_string()).collect();
    addresses.join(",")
}

/// The credentials for a server.
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

/// The mode of a server.
enum Mode {
    Single,
    /// The second port is for TLS.
    Tls,
    /// A node of a cluster. The second port is the cluster bus.
    Cluster,
    /// A sentinel. It rewrites its configuration file at run time.
    Sentinel {
        config: String,
    },
}

/// The name of a sentinel's configuration file.
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
            // The configuration file must be the first argument.
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
                // Long enough that a busy machine does not make a node look dead.
                command.args(["--cluster-node-timeout", "10000"]);
            }
        }
        command.args(["--save", "", "--appendonly", "no"]);
        // By default the master waits for further replicas before it starts to sync.
        command.args(["--repl-diskless-sync-delay", "0"]);
        if self.make != RedisMake::Redis62 {
            // For `DEBUG SLEEP`. Servers before 7.0 always allow it and do not know the option.
            command.args(["--enable-debug-command", "yes"]);
        }
        command.args(&self.args);
        command
    }

    fn probe(&self, stream: TcpStream, pid: Pid, _: &Path) -> io::Result<bool> {
        let mut client = Client::new(stream);
        Login::log_in(self.login.as_ref(), &mut client)?;
        // An error while the server loads its data.
        client.call(&["PING"])?;
        let info = client.call(&["INFO", "server"])?;
        let own = format!("process_id:{}", pid.as_raw_pid());
        Ok(info.lines().any(|line| line == own))
    }

    fn shutdown_signal(&self) -> Signal {
        // Nothing to save or to clean up.
        Signal::KILL
    }

    fn clean_up(&self, _: &Path) {}
}
