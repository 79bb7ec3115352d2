//! Real servers for tests: started on free ports in temporary directories, terminated by process id.
//!
//! ```
//! use lockkeeper_testkit::server::RedisServer;
//!
//! let mut redis = RedisServer::start_or_panic();
//! println!("{}", redis.url());
//! redis.kill9();
//! redis.restart().unwrap();
//! ```
//!
//! Groups of servers: [`RedisCluster`], [`RedisSentinel`], [`RedlockNodes`].
//!
//! Dropping a server terminates it, also when the test panics. If the test process ends without dropping it, because it is
//! killed or the server is in a `static`, a watchdog (a small shell script) terminates the server. All functions here
//! block the thread, also in async tests.

mod binaries;
mod clock_shim;
mod pgbouncer;
mod postgres;
mod redis;
mod watchdog;

pub use binaries::Binaries;
pub use clock_shim::ServerClock;
pub use pgbouncer::PgBouncer;
pub use postgres::PostgresServer;
pub use redis::{RedisBuilder, RedisCluster, RedisMake, RedisSentinel, RedisServer, RedlockNodes};

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tempfile::TempDir;

use self::watchdog::Watchdog;

/// The timeout for a server to start, and to shut down.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// The timeout of one request during the start: the port may belong to another server, which does not reply.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// The interval between checks, where there is no event to wait for.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A server process: the common part of [`RedisServer`], [`PostgresServer`] and [`PgBouncer`].
pub struct Server {
    recipe: Box<dyn Recipe>,
    ports: Ports,
    dir: TempDir,
    /// The id of the process that was started last.
    pid: Pid,
    /// That process, unless it was killed.
    child: Option<Running>,
    /// Its ports while it is dead. Clients would mistake another test's server on one of them for it.
    reserved: Vec<OwnedFd>,
}

/// A process that is terminated with this one, however that ends.
struct Running {
    // Dropped before the child is reaped: after that, its process id may belong to another process.
    watchdog: Option<Watchdog>,
    child: Child,
}

/// The ports of a server on 127.0.0.1.
#[derive(Debug, Clone, Copy)]
struct Ports {
    main: u16,
    /// For TLS or the cluster bus.
    second: u16,
}

/// How to run one kind of server.
trait Recipe: Send + Sync {
    /// Returns the server's name in messages.
    fn name(&self) -> &'static str;

    /// Returns the URL for clients.
    fn url(&self, ports: Ports) -> String;

    /// Prepares a new directory.
    fn prepare(&self, dir: &Path) -> Result<(), StartError>;

    /// Returns the command that runs the server in the foreground.
    fn command(&self, dir: &Path, ports: Ports) -> Command;

    /// Returns whether the server replies and is the one with this process id and directory. If two tests race for a
    /// port, it may be another.
    fn probe(&self, stream: TcpStream, pid: Pid, dir: &Path) -> io::Result<bool>;

    /// Returns the signal that terminates the server and leaves nothing behind.
    fn shutdown_signal(&self) -> Signal;

    /// Removes the leftovers of a server whose processes were killed.
    fn clean_up(&self, dir: &Path);
}

impl Server {
    fn launch(recipe: impl Recipe + 'static) -> Result<Self, StartError> {
        let recipe = Box::new(recipe);
        let name = recipe.name();
        let dir = tempfile::Builder::new().prefix("lockkeeper-").tempdir();
        let dir = dir.map_err(|e| StartError(format!("{name}: no temporary directory: {e}")))?;
        recipe.prepare(dir.path())?;
        for _ in 0..10 {
            let ports = Ports { main: free_port()?, second: free_port()? };
            if let Some(child) = spawn(&*recipe, dir.path(), ports)? {
                let pid = Pid::from_child(&child.child);
                let (child, reserved) = (Some(child), Vec::new());
                return Ok(Self { recipe, ports, dir, pid, child, reserved });
            }
        }
        Err(StartError(format!("{name}: ten free ports in a row were taken before it could bind")))
    }

    /// Returns the port it listens on, on 127.0.0.1. It stays the same over restarts.
    pub fn port(&self) -> u16 {
        self.ports.main
    }

    /// Returns the address it listens on: a target for a [`Proxy`](crate::proxy::Proxy).
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port()).into()
    }

    /// Returns the URL for clients, such as `redis://127.0.0.1:PORT/` or
    /// `postgres://postgres@127.0.0.1:PORT/postgres`.
    pub fn url(&self) -> String {
        self.recipe.url(self.ports)
    }

    /// Returns the process id; after [`kill9`](Self::kill9), that of the killed process.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Returns its directory, which drop removes. The server's output is in `server.log`.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns whether it replies to a client within this time. Another server on its port does not count.
    pub fn answers(&self, within: Duration) -> bool {
        self.child.is_some()
            && answers(&*self.recipe, self.dir.path(), self.port(), self.pid, within)
    }

    /// Kills it and its child processes with SIGKILL, and waits until they are gone. Does nothing if it is dead. On Linux,
    /// its ports stay reserved and refuse connections.
    pub fn kill9(&mut self) {
        if let Some(running) = self.child.take() {
            drop(running.watchdog);
            kill_tree(running.child);
            self.recipe.clean_up(self.dir.path());
            let ports = [self.ports.main, self.ports.second];
            self.reserved = ports.into_iter().filter_map(reserve).collect();
        }
    }

    /// Stops it and its child processes with SIGSTOP: connections stay open, but requests get no reply.
    ///
    /// # Panics
    ///
    /// If it is dead.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        // An exit ends the wait, too. `NOWAIT` does not reap the child.
        let events = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let _ = waitid(WaitId::Pid(self.pid), events);
        let children = children(self.pid);
        for pid in &children {
            let _ = signal(*pid, Signal::STOP);
        }
        wait_for(&children, |state| matches!(state, 'T' | 'Z'));
    }

    /// Continues it after [`stop`](Self::stop).
    ///
    /// # Panics
    ///
    /// If it is dead.
    pub fn cont(&self) {
        for pid in children(self.pid) {
            let _ = signal(pid, Signal::CONT);
        }
        self.signal(Signal::CONT);
    }

    /// Starts it again on the same port and in the same directory. Kills it first if it runs.
    ///
    /// # Errors
    ///
    /// If it does not start.
    pub fn restart(&mut self) -> Result<(), StartError> {
        self.kill9();
        self.reserved.clear();
        let start = Instant::now();
        while start.elapsed() < START_TIMEOUT {
            if let Some(child) = spawn(&*self.recipe, self.dir.path(), self.ports)? {
                self.pid = Pid::from_child(&child.child);
                self.child = Some(child);
                return Ok(());
            }
            sleep(POLL_INTERVAL);
        }
        let (name, port) = (self.recipe.name(), self.port());
        Err(StartError(format!("{name}: another process took port {port} while it was down")))
    }

    #[track_caller]
    fn signal(&self, which: Signal) {
        // The id of a reaped process may belong to another process by now.
        assert!(self.child.is_some(), "{} on port {} is dead", self.recipe.name(), self.port());
        if let Err(error) = signal(self.pid, which) {
            panic!("{} on port {}: {error}", self.recipe.name(), self.port());
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(Running { watchdog, child }) = &mut self.child else { return };
        drop(watchdog.take());
        let _ = signal(self.pid, self.recipe.shutdown_signal());
        // A stopped process handles the signal only after SIGCONT.
        for pid in children(self.pid).into_iter().chain([self.pid]) {
            let _ = signal(pid, Signal::CONT);
        }
        let start = Instant::now();
        while start.elapsed() < START_TIMEOUT {
            match child.try_wait() {
                Ok(None) => sleep(POLL_INTERVAL),
                _ => return,
            }
        }
        self.kill9();
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, port, pid) = (self.recipe.name(), self.port(), self.pid());
        f.debug_struct(name).field("port", &port).field("pid", &pid).finish_non_exhaustive()
    }
}

/// Starts the process and waits until it replies. Returns `None` if the port is taken.
fn spawn(recipe: &dyn Recipe, dir: &Path, ports: Ports) -> Result<Option<Running>, StartError> {
    let name = recipe.name();
    let (log, offset) = open_log(dir).map_err(|e| StartError(format!("{name}: no log: {e}")))?;
    let failed = |what: &str| StartError(format!("{name}: {what}; {}", log_tail(dir, offset)));
    let errors = log.try_clone().map_err(|e| StartError(format!("{name}: no log: {e}")))?;
    let mut command = recipe.command(dir, ports);
    // For the English messages that are searched below.
    command.env("LC_ALL", "C").current_dir(dir);
    command.stdin(Stdio::null()).stdout(log).stderr(errors);
    let spawned = command.spawn();
    let child = spawned.map_err(|e| StartError(format!("{name}: cannot be run: {e}")))?;
    let pid = Pid::from_child(&child);
    let watchdog = Some(Watchdog::start(pid, recipe.shutdown_signal(), dir));
    let mut running = Running { watchdog, child };

    let start = Instant::now();
    while start.elapsed() < START_TIMEOUT {
        if answers(recipe, dir, ports.main, pid, REQUEST_TIMEOUT) {
            return Ok(Some(running));
        }
        match running.child.try_wait() {
            Ok(None) => sleep(POLL_INTERVAL),
            _ if log_tail(dir, offset).contains("Address already in use") => return Ok(None),
            Ok(Some(status)) => return Err(failed(&format!("exited during start with {status}"))),
            Err(error) => return Err(failed(&error.to_string())),
        }
    }
    drop(running.watchdog);
    kill_tree(running.child);
    recipe.clean_up(dir);
    Err(failed(&format!("no reply on port {} within {START_TIMEOUT:?}", ports.main)))
}

fn answers(recipe: &dyn Recipe, dir: &Path, port: u16, pid: Pid, within: Duration) -> bool {
    // std rejects a timeout of zero.
    let within = within.max(Duration::from_millis(1));
    let probe = || {
        let stream = TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), within)?;
        stream.set_read_timeout(Some(within))?;
        stream.set_write_timeout(Some(within))?;
        recipe.probe(stream, pid, dir)
    };
    probe().unwrap_or(false)
}

/// Returns a port without a listener.
///
/// The port is below the ephemeral ranges of Linux and macOS. An outgoing connection could take an ephemeral port before
/// the server binds it, or while the server is down for a restart.
fn free_port() -> Result<u16, StartError> {
    (0..1000)
        .map(|_| fastrand::u16(10_000..32_000))
        .find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .ok_or_else(|| StartError("no free port between 10000 and 32000".into()))
}

/// Binds a port without listening on it: connections are refused, and no server can bind it.
#[cfg(target_os = "linux")]
fn reserve(port: u16) -> Option<OwnedFd> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};
    // Another thread may be starting a server, which must not inherit the socket.
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).ok()?;
    // Leftover connections of the dead server must not prevent the bind, but a listening server must.
    sockopt::set_socket_reuseaddr(&socket, true).ok()?;
    bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, port))).ok()?;
    sockopt::set_socket_reuseaddr(&socket, false).ok()?;
    Some(socket)
}

#[cfg(not(target_os = "linux"))]
fn reserve(_: u16) -> Option<OwnedFd> {
    None
}

fn log_path(dir: &Path) -> PathBuf {
    dir.join("server.log")
}

/// Opens the log for appending. Returns it with its current length.
fn open_log(dir: &Path) -> io::Result<(File, usize)> {
    let log = OpenOptions::new().create(true).append(true).open(log_path(dir))?;
    let len = log.metadata()?.len();
    Ok((log, usize::try_from(len).unwrap_or(usize::MAX)))
}

/// Returns the last lines of the log from an offset on, joined to one line.
fn log_tail(dir: &Path, offset: usize) -> String {
    let log = fs::read(log_path(dir)).unwrap_or_default();
    let log = String::from_utf8_lossy(log.get(offset..).unwrap_or_default()).into_owned();
    let lines: Vec<&str> = log.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let tail = &lines[lines.len().saturating_sub(15)..];
    format!("its log ends: {}", tail.join(" | "))
}

/// Kills a process and its children, and waits until they are gone.
fn kill_tree(mut child: Child) {
    let pid = Pid::from_child(&child);
    // Stopped first, so that it starts no further children while they are listed.
    let _ = signal(pid, Signal::STOP);
    let children = children(pid);
    for pid in [pid].iter().chain(&children) {
        let _ = signal(*pid, Signal::KILL);
    }
    let _ = child.wait();
    // PostgreSQL refuses to start in a directory that a child of its predecessor still uses.
    wait_for(&children, |state| state == 'Z');
}

fn signal(pid: Pid, which: Signal) -> io::Result<()> {
    Ok(kill_process(pid, which)?)
}

/// Returns the child processes of a process. Reads `/proc`, so it returns none on other systems than Linux.
fn children(parent: Pid) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let pids = pids.filter_map(Pid::from_raw);
    pids.filter(|pid| stat(*pid).is_some_and(|(_, of)| of == parent.as_raw_pid())).collect()
}

/// Returns the state of a process, as a letter, and its parent.
fn stat(pid: Pid) -> Option<(char, i32)> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
    // The program's name, in parentheses before these fields, may contain parentheses and spaces.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Waits until each process is in a matching state or gone.
fn wait_for(pids: &[Pid], state: impl Fn(char) -> bool) {
    let start = Instant::now();
    while start.elapsed() < START_TIMEOUT
        && pids.iter().any(|pid| stat(*pid).is_some_and(|(now, _)| !state(now)))
    {
        sleep(POLL_INTERVAL);
    }
}

/// The reason why a server did not start: one line, with the package to install if its program is missing.
#[derive(Clone, PartialEq, Eq)]
pub struct StartError(String);

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The same as [`Display`](fmt::Display), since `unwrap` prints `Debug`.
impl fmt::Debug for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for StartError {}
