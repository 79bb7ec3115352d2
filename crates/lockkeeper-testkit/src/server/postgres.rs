//! PostgreSQL.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, geteuid};

use super::{Binaries, Recipe, Server, StartError};

/// A `PostgreSQL` server that trusts everyone on this machine. What it can do is at [`Server`].
///
/// It keeps its promises over a crash, as a real one does: `fsync` is on.
#[derive(Debug)]
pub struct PostgresServer(Server);

impl PostgresServer {
    /// Starts one and waits until it answers.
    ///
    /// # Errors
    ///
    /// If `PostgreSQL` is not installed or does not come up.
    pub fn start() -> Result<Self, StartError> {
        Self::with_args(&[])
    }

    /// Starts one, and fails the test if that fails.
    ///
    /// # Panics
    ///
    /// If `PostgreSQL` is not installed or does not come up.
    #[track_caller]
    pub fn start_or_panic() -> Self {
        Self::start().unwrap_or_else(|error| panic!("{error}"))
    }

    /// Starts one with further arguments, such as `["-c", "fsync=off"]` where nothing is killed.
    ///
    /// # Errors
    ///
    /// If `PostgreSQL` is not installed or does not come up.
    pub fn with_args(args: &[&str]) -> Result<Self, StartError> {
        Self::from_binaries(&Binaries::installed(), args)
    }

    /// Starts one from programs in other places, with further arguments.
    ///
    /// # Errors
    ///
    /// If `initdb` or `postgres` is not there, or it does not come up.
    pub fn from_binaries(binaries: &Binaries, args: &[&str]) -> Result<Self, StartError> {
        let program = binaries.find("postgres", "postgresql")?;
        let initdb = binaries.find("initdb", "postgresql")?;
        let args = args.iter().map(ToString::to_string).collect();
        let user = if geteuid().is_root() { Some(unprivileged_user()?) } else { None };
        Server::launch(Postgres { program, initdb, args, user }).map(Self)
    }
}

impl Deref for PostgresServer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.0
    }
}

impl DerefMut for PostgresServer {
    fn deref_mut(&mut self) -> &mut Server {
        &mut self.0
    }
}

struct Postgres {
    program: PathBuf,
    initdb: PathBuf,
    args: Vec<String>,
    /// Whom to run as, if not as the user of the test.
    user: Option<User>,
}

#[derive(Clone, Copy)]
struct User {
    uid: u32,
    gid: u32,
}

impl Postgres {
    fn run(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        if let Some(user) = self.user {
            command.uid(user.uid).gid(user.gid);
        }
        command
    }
}

impl Recipe for Postgres {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn url(&self, port: u16) -> String {
        format!("postgres://postgres@127.0.0.1:{port}/postgres")
    }

    fn prepare(&self, dir: &Path) -> Result<(), StartError> {
        if let Some(user) = self.user {
            chown(dir, Some(user.uid), Some(user.gid)).map_err(|e| {
                StartError(format!("postgres: cannot give away its directory: {e}"))
            })?;
        }
        let mut initdb = self.run(&self.initdb);
        initdb.arg("-D").arg(data(dir)).args(["-U", "postgres", "-A", "trust", "-E", "UTF8"]);
        // Nobody needs this directory after a power cut.
        initdb.args(["--locale=C", "--no-sync"]).current_dir(dir).stdin(Stdio::null());
        let output = initdb.output();
        let output = output.map_err(|e| StartError(format!("initdb: cannot be run: {e}")))?;
        if output.status.success() {
            return Ok(());
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        let errors: Vec<&str> = errors.lines().map(str::trim).collect();
        Err(StartError(format!("initdb: {}: {}", output.status, errors.join(" | "))))
    }

    fn command(&self, dir: &Path, port: u16) -> Command {
        let mut command = self.run(&self.program);
        command.arg("-D").arg(data(dir)).args(["-p", &port.to_string()]);
        command.args(["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]);
        command.args(&self.args);
        command
    }

    fn ask(&self, mut stream: TcpStream, pid: Pid, dir: &Path) -> io::Result<bool> {
        let mut startup = Vec::from(196_608_u32.to_be_bytes()); // Version 3.0 of the protocol.
        startup.extend(b"user\0postgres\0database\0postgres\0\0");
        let len = u32::try_from(startup.len() + 4).map_err(io::Error::other)?;
        stream.write_all(&len.to_be_bytes())?;
        stream.write_all(&startup)?;
        // An authentication message; while it starts up or recovers, it sends an error instead.
        let mut kind = [0];
        stream.read_exact(&mut kind)?;
        let state = fs::read_to_string(data(dir).join("postmaster.pid"))?;
        let own = state.lines().next() == Some(&pid.as_raw_pid().to_string());
        // The status line is what tells that it has bound its port: the file is there before that.
        let ready = state.lines().nth(7).is_some_and(|line| line.trim_end() == "ready");
        Ok(kind == *b"R" && own && ready)
    }

    fn shutdown_signal(&self) -> Signal {
        // "Immediate": like a crash, except that it ends its children and frees its shared memory.
        Signal::QUIT
    }

    fn clean_up(&self, dir: &Path) {
        // A killed server leaves a System V segment behind, of which the machine has few thousand. Its
        // id is the second number on line 7. Without `ipcrm` it stays, which does no harm for long.
        let state = fs::read_to_string(data(dir).join("postmaster.pid")).unwrap_or_default();
        if let Some(id) = state.lines().nth(6).and_then(|line| line.split_whitespace().nth(1)) {
            let mut ipcrm = Command::new("ipcrm");
            let _ = ipcrm.args(["-m", id]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
    }
}

fn data(dir: &Path) -> PathBuf {
    dir.join("data")
}

/// Whom root runs `PostgreSQL` as, since it refuses to run as root.
fn unprivileged_user() -> Result<User, StartError> {
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let find = |name: &str| {
        let mut users = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>());
        let user = users.find(|fields| fields[0] == name)?;
        Some(User { uid: user.get(2)?.parse().ok()?, gid: user.get(3)?.parse().ok()? })
    };
    find("postgres").or_else(|| find("nobody")).ok_or_else(|| {
        StartError("postgres: will not run as root, and there is no user postgres or nobody".into())
    })
}
