//! Redis.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal};

use super::{Binaries, Recipe, Server, StartError};

/// A Redis server that keeps nothing on disk. What it can do is at [`Server`].
#[derive(Debug)]
pub struct RedisServer(Server);

impl RedisServer {
    /// Starts one and waits until it answers.
    ///
    /// # Errors
    ///
    /// If `redis-server` is not installed or does not come up.
    pub fn start() -> Result<Self, StartError> {
        Self::with_args(&[])
    }

    /// Starts one, and fails the test if that fails.
    ///
    /// # Panics
    ///
    /// If `redis-server` is not installed or does not come up.
    #[track_caller]
    pub fn start_or_panic() -> Self {
        Self::start().unwrap_or_else(|error| panic!("{error}"))
    }

    /// Starts one with further arguments, such as `["--maxmemory", "10mb"]`.
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
        let program = binaries.find("redis-server", "redis-server")?;
        let args = args.iter().map(ToString::to_string).collect();
        Server::launch(Redis { program, args }).map(Self)
    }
}

impl Deref for RedisServer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.0
    }
}

impl DerefMut for RedisServer {
    fn deref_mut(&mut self) -> &mut Server {
        &mut self.0
    }
}

struct Redis {
    program: PathBuf,
    args: Vec<String>,
}

impl Recipe for Redis {
    fn name(&self) -> &'static str {
        "redis-server"
    }

    fn url(&self, port: u16) -> String {
        format!("redis://127.0.0.1:{port}/")
    }

    fn prepare(&self, _: &Path) -> Result<(), StartError> {
        Ok(())
    }

    fn command(&self, dir: &Path, port: u16) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--dir"]).arg(dir);
        command.args(["--save", "", "--appendonly", "no", "--daemonize", "no"]).args(&self.args);
        command
    }

    fn ask(&self, mut stream: TcpStream, pid: Pid, _: &Path) -> io::Result<bool> {
        stream.write_all(b"PING\r\n")?;
        let mut answers = BufReader::new(stream);
        let mut pong = String::new();
        answers.read_line(&mut pong)?;
        if pong.trim_end() != "+PONG" {
            // With a password it tells strangers nothing, but it is up.
            return Ok(pong.starts_with("-NOAUTH"));
        }
        answers.get_mut().write_all(b"INFO server\r\n")?;
        let mut header = String::new();
        answers.read_line(&mut header)?;
        let len = header.trim_end().strip_prefix('$').and_then(|len| len.parse().ok());
        let mut info = vec![0; len.unwrap_or(0)];
        answers.read_exact(&mut info)?;
        let own = format!("process_id:{}", pid.as_raw_pid());
        Ok(String::from_utf8_lossy(&info).lines().any(|line| line == own))
    }

    fn shutdown_signal(&self) -> Signal {
        // It has nothing to save or to tidy up.
        Signal::KILL
    }

    fn clean_up(&self, _: &Path) {}
}
