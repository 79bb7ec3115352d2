//! PostgreSQL.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, geteuid};

use super::{Binaries, POLL_INTERVAL, Ports, Recipe, Server, StartError};

/// The timeout of `initdb` and `pg_basebackup`.
const SETUP_TIMEOUT: Duration = Duration::from_secs(60);

/// A `PostgreSQL` server with `trust` authentication. Its common methods are those of [`Server`].
///
/// It is durable over a crash: `fsync` is on.
#[derive(Debug)]
pub struct PostgresServer {
    server: Server,
    args: Vec<String>,
}

impl PostgresServer {
    /// Starts a server and waits until it replies.
    ///
    /// # Errors
    ///
    /// If `PostgreSQL` is not installed or does not start.
    pub fn start() -> Result<Self, StartError> {
        Self::with_args(&[])
    }

    /// Starts a server as [`start`](Self::start) does.
    ///
    /// # Panics
    ///
    /// If `PostgreSQL` is not installed or does not start.
    #[track_caller]
    pub fn start_or_panic() -> Self {
        Self::start().unwrap_or_else(|error| panic!("{error}"))
    }

    /// Starts a server with further arguments, such as `["-c", "fsync=off"]` in tests without crashes.
    ///
    /// # Errors
    ///
    /// If `PostgreSQL` is not installed or does not start.
    pub fn with_args(args: &[&str]) -> Result<Self, StartError> {
        Self::from_binaries(&Binaries::installed(), args)
    }

    /// Starts a server from programs in these directories, with further arguments.
    ///
    /// # Errors
    ///
    /// If `initdb` or `postgres` is missing, or the server does not start.
    pub fn from_binaries(binaries: &Binaries, args: &[&str]) -> Result<Self, StartError> {
        let program = binaries.find("postgres", "postgresql")?;
        let setup = binaries.find("initdb", "postgresql")?;
        let args: Vec<String> = args.iter().map(ToString::to_string).collect();
        let recipe = Postgres { program, setup, args: args.clone(), user: user()?, primary: None };
        Ok(Self { server: Server::launch(recipe)?, args })
    }

    /// Starts a server of a major version, such as 17, from `./check servers`.
    ///
    /// # Errors
    ///
    /// If it was not downloaded or does not start.
    pub fn of_version(major: u32, args: &[&str]) -> Result<Self, StartError> {
        let program = Binaries::downloaded(&format!("postgres-{major}/bin"), "postgres")?;
        let dir = program.parent().map(Path::to_path_buf);
        Self::from_binaries(&Binaries::within(dir), args)
    }

    /// Starts a streaming standby of this server, with the same arguments.
    ///
    /// # Errors
    ///
    /// If the base backup fails or the standby does not start.
    pub fn standby(&self) -> Result<Self, StartError> {
        let binaries = Binaries::installed();
        let program = binaries.find("postgres", "postgresql")?;
        let setup = binaries.find("pg_basebackup", "postgresql")?;
        let (args, user, primary) = (self.args.clone(), user()?, Some(self.port()));
        let server = Server::launch(Postgres { program, setup, args, user, primary })?;
        Ok(Self { server, args: self.args.clone() })
    }
}

impl Deref for PostgresServer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

impl DerefMut for PostgresServer {
    fn deref_mut(&mut self) -> &mut Server {
        &mut self.server
    }
}

struct Postgres {
    program: PathBuf,
    /// The program that creates the data directory: `initdb`, or `pg_basebackup` for a standby.
    setup: PathBuf,
    args: Vec<String>,
    /// The user to run as, if not the user of the test.
    user: Option<User>,
    /// The port of the primary, if it is a standby.
    primary: Option<u16>,
}

#[derive(Clone, Copy)]
pub(super) struct User {
    uid: u32,
    gid: u32,
}

/// Returns a command that runs as `user`, if there is one.
pub(super) fn run_as(user: Option<User>, program: &Path) -> Command {
    let mut command = Command::new(program);
    if let Some(user) = user {
        command.uid(user.uid).gid(user.gid);
    }
    command
}

/// Makes the user that a server runs as the owner of a directory.
pub(super) fn change_owner(dir: &Path, user: Option<User>) -> Result<(), StartError> {
    let Some(user) = user else { return Ok(()) };
    chown(dir, Some(user.uid), Some(user.gid))
        .map_err(|e| StartError(format!("postgres: cannot change the owner of its directory: {e}")))
}

impl Recipe for Postgres {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn url(&self, ports: Ports) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", ports.main)
    }

    fn prepare(&self, dir: &Path) -> Result<(), StartError> {
        change_owner(dir, self.user)?;
        let mut setup = run_as(self.user, &self.setup);
        setup.arg("-D").arg(data(dir)).current_dir(dir).stdin(Stdio::null());
        // The directory need not survive a power failure.
        setup.arg("--no-sync");
        if let Some(port) = self.primary {
            setup.args(["-h", "127.0.0.1", "-U", "postgres", "-R", "-X", "stream", "-c", "fast"]);
            setup.args(["-p", &port.to_string()]);
        } else {
            setup.args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C"]);
        }
        let (name, log) = (self.setup.display(), dir.join("setup.log"));
        let cannot = |e: io::Error| StartError(format!("{name}: cannot be run: {e}"));
        let errors = fs::File::create(&log).map_err(cannot)?;
        let mut setup = setup.stdout(Stdio::null()).stderr(errors).spawn().map_err(cannot)?;
        let start = Instant::now();
        // With a timeout: a base backup of a server that hangs never ends.
        let status = loop {
            match setup.try_wait().map_err(cannot)? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => break status.to_string(),
                None if start.elapsed() < SETUP_TIMEOUT => sleep(POLL_INTERVAL),
                None => {
                    let _ = setup.kill();
                    let _ = setup.wait();
                    break format!("not done within {SETUP_TIMEOUT:?}");
                }
            }
        };
        let errors = fs::read_to_string(&log).unwrap_or_default();
        let errors: Vec<&str> = errors.lines().map(str::trim).collect();
        Err(StartError(format!("{name}: {status}: {}", errors.join(" | "))))
    }

    fn command(&self, dir: &Path, ports: Ports) -> Command {
        let mut command = run_as(self.user, &self.program);
        command.arg("-D").arg(data(dir)).args(["-p", &ports.main.to_string()]);
        command.args(["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]);
        command.args(&self.args);
        command
    }

    fn probe(&self, mut stream: TcpStream, pid: Pid, dir: &Path) -> io::Result<bool> {
        let admitted = sends_authentication_request(&mut stream)?;
        let state = fs::read_to_string(data(dir).join("postmaster.pid"))?;
        let own = state.lines().next() == Some(&pid.as_raw_pid().to_string());
        // The file exists before the server has bound its port. The status line says "ready" after that.
        let ready = state.lines().nth(7).is_some_and(|line| line.trim_end() == "ready");
        Ok(admitted && own && ready)
    }

    fn shutdown_signal(&self) -> Signal {
        // The "immediate" shutdown: like a crash, except that it ends its children and frees its shared memory.
        Signal::QUIT
    }

    fn clean_up(&self, dir: &Path) {
        // A killed server leaves a System V segment behind, and the machine has only a few thousand. The
        // second number on line 7 of the file is its id. Without `ipcrm` the segment stays.
        let state = fs::read_to_string(data(dir).join("postmaster.pid")).unwrap_or_default();
        if let Some(id) = state.lines().nth(6).and_then(|line| line.split_whitespace().nth(1)) {
            let mut ipcrm = Command::new("ipcrm");
            let _ = ipcrm.args(["-m", id]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
    }
}

/// Sends a startup message and returns whether the server sends an authentication request. A server that is starting up
/// or recovering sends an error instead.
pub(super) fn sends_authentication_request(stream: &mut TcpStream) -> io::Result<bool> {
    let mut startup = Vec::from(196_608_u32.to_be_bytes()); // Version 3.0 of the protocol.
    startup.extend(b"user\0postgres\0database\0postgres\0\0");
    let len = u32::try_from(startup.len() + 4).map_err(io::Error::other)?;
    stream.write_all(&len.to_be_bytes())?;
    stream.write_all(&startup)?;
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    Ok(kind == *b"R")
}

fn data(dir: &Path) -> PathBuf {
    dir.join("data")
}

/// Returns the user to run a server as, if not the user of the test.
pub(super) fn user() -> Result<Option<User>, StartError> {
    if geteuid().is_root() { unprivileged_user().map(Some) } else { Ok(None) }
}

/// Returns the user that root runs `PostgreSQL` as, since it refuses to run as root.
fn unprivileged_user() -> Result<User, StartError> {
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let find = |name: &str| {
        let mut users = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>());
        let user = users.find(|fields| fields[0] == name)?;
        Some(User { uid: user.get(2)?.parse().ok()?, gid: user.get(3)?.parse().ok()? })
    };
    find("postgres").or_else(|| find("nobody")).ok_or_else(|| {
        StartError("postgres: refuses to run as root: create a user named postgres".into())
    })
}
