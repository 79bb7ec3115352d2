//! `PgBouncer`, a connection pooler between clients and a server.

use std::fs;
use std::io;
use std::net::TcpStream;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal};

use super::postgres::{User, change_owner, run_as, sends_authentication_request, user};
use super::{Binaries, Ports, PostgresServer, Recipe, Server, StartError};

/// A `PgBouncer` in front of a server. Its common methods are those of [`Server`].
#[derive(Debug)]
pub struct PgBouncer(Server);

impl PgBouncer {
    /// Starts it in front of a server, in transaction mode: each transaction gets any free session.
    ///
    /// # Errors
    ///
    /// If `PgBouncer` is not installed or does not start.
    pub fn before(server: &PostgresServer) -> Result<Self, StartError> {
        Self::with_mode(server, "transaction")
    }

    /// Starts it in front of a server, in session mode: each client gets a session for as long as it is connected.
    ///
    /// # Errors
    ///
    /// If `PgBouncer` is not installed or does not start.
    pub fn pooling_sessions(server: &PostgresServer) -> Result<Self, StartError> {
        Self::with_mode(server, "session")
    }

    fn with_mode(server: &PostgresServer, mode: &'static str) -> Result<Self, StartError> {
        let mut program = Binaries::installed().find("pgbouncer", "pgbouncer");
        if program.is_err() {
            // On Debian it is in /usr/sbin, which is not in the `PATH` of ordinary users.
            program = Binaries::within([PathBuf::from("/usr/sbin")]).find("pgbouncer", "pgbouncer");
        }
        let (server, user) = (server.port(), user()?);
        Server::launch(Bouncer { program: program?, server, user, mode }).map(Self)
    }
}

impl Deref for PgBouncer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.0
    }
}

struct Bouncer {
    program: PathBuf,
    /// The port of the server behind it.
    server: u16,
    user: Option<User>,
    mode: &'static str,
}

impl Recipe for Bouncer {
    fn name(&self) -> &'static str {
        "pgbouncer"
    }

    fn url(&self, ports: Ports) -> String {
        let port = ports.main;
        format!("postgres://postgres@127.0.0.1:{port}/postgres")
    }

    fn prepare(&self, dir: &Path) -> Result<(), StartError> {
        change_owner(dir, self.user)
    }

    fn command(&self, dir: &Path, ports: Ports) -> Command {
        let port = ports.main;
        let config = dir.join("pgbouncer.ini");
        let text = format!(
            "[databases]\npostgres = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\n\
             listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n\
             pool_mode = {}\npidfile = {}\n",
            self.server,
            self.mode,
            dir.join("pid").display()
        );
        // If the file cannot be written, the program reports it.
        let _ = fs::write(&config, text);
        let mut command = run_as(self.user, &self.program);
        command.arg(config);
        command
    }

    fn probe(&self, mut stream: TcpStream, pid: Pid, dir: &Path) -> io::Result<bool> {
        let own = fs::read_to_string(dir.join("pid"))?;
        Ok(sends_authentication_request(&mut stream)? && own.trim() == pid.as_raw_pid().to_string())
    }

    fn shutdown_signal(&self) -> Signal {
        Signal::QUIT
    }

    fn clean_up(&self, _: &Path) {}
}
