//! Starting the command, and its status.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use lockkeeper::Guard;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};

use crate::args;
use crate::failure::{Failure, signal_exit_code};
use crate::processes;

/// The environment variable of the command that contains the name of the lock.
const NAME: &str = "LOCKKEEPER_NAME";
/// The variable that contains the fencing token.
const FENCE: &str = "LOCKKEEPER_FENCE";
/// The variable that contains the owner of the claim. It also identifies the processes that the command starts.
pub(crate) const OWNER: &str = "LOCKKEEPER_OWNER";

/// A running command.
pub(crate) struct Child {
    pid: Pid,
    /// The final status, once the process has been reaped.
    ended: Option<Status>,
}

/// The status of the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Exited(u8),
    Killed(i32),
    Stopped(i32),
}

impl Status {
    pub(crate) fn code(self) -> u8 {
        match self {
            Status::Exited(code) => code,
            Status::Killed(signal) | Status::Stopped(signal) => signal_exit_code(signal),
        }
    }
}

impl Child {
    /// Starts the command as the leader of a new process group.
    pub(crate) fn spawn(run: &args::Run, guard: &Guard) -> Result<Self, Failure> {
        let (program, arguments) = run.command.split_first().expect("clap requires a command");
        let spawn = |program: &OsStr, script: Option<&Path>| {
            let mut command = Command::new(program);
            command.args(script).args(arguments).process_group(0);
            command.env(NAME, guard.name()).env(OWNER, guard.owner().to_string());
            match guard.fence() {
                Some(fence) => command.env(FENCE, fence.get().to_string()),
                None => command.env_remove(FENCE),
            };
            // The URL may contain a password.
            command.env_remove(crate::store::VARIABLE);
            command.spawn()
        };
        let spawned = match spawn(program, None) {
            // A script without `#!` is run by the shell, as execvp(3) does.
            Err(error)
                if error.raw_os_error() == Some(rustix::io::Errno::NOEXEC.raw_os_error()) =>
            {
                spawn(OsStr::new("/bin/sh"), Some(&find(program)))
            }
            spawned => spawned,
        };
        let child = spawned.map_err(|error| {
            let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
            let message = match error.kind() {
                io::ErrorKind::NotFound => "command not found".to_owned(),
                _ => error.to_string(),
            };
            let message = format!("{}: {message}", program.to_string_lossy());
            Failure { code, kind: "command", message }
        })?;
        Ok(Self { pid: Pid::from_child(&child), ended: None })
    }

    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns the status if it has changed since the last call.
    ///
    /// Where processes are listed, a dead command is not reaped. So its pid is not reused, and a signal to its group reaches
    /// no other process. Elsewhere it is reaped: as a zombie it would count as a member of its group, which would never be
    /// empty. There the pid is not reused as long as the group has other members.
    pub(crate) fn poll_status(&mut self) -> Option<Status> {
        if self.ended.is_some() {
            return self.ended;
        }
        let keep = processes::are_listed();
        let status = self.wait(if keep { WaitIdOptions::NOWAIT } else { WaitIdOptions::empty() });
        if !keep && !matches!(status, Some(Status::Stopped(_))) {
            self.ended = status;
        }
        status
    }

    fn wait(&self, keep: WaitIdOptions) -> Option<Status> {
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | keep;
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        let status = match waitid(WaitId::Pid(self.pid), ended) {
            Ok(Some(status)) => status,
            _ => waitid(WaitId::Pid(self.pid), stopped).ok()??,
        };
        if let Some(signal) = status.terminating_signal() {
            return Some(Status::Killed(signal));
        }
        if let Some(signal) = status.stopping_signal() {
            return Some(Status::Stopped(signal));
        }
        let code = status.exit_status()?;
        Some(Status::Exited(u8::try_from(code & 0xff).unwrap_or(u8::MAX)))
    }
}

/// Finds a program in `PATH`, as a shell does.
fn find(program: &OsStr) -> PathBuf {
    let is_path = program.as_bytes().contains(&b'/');
    let dirs = std::env::var_os("PATH").filter(|_| !is_path).unwrap_or_default();
    let is_executable =
        |path: &PathBuf| rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok();
    let mut found = std::env::split_paths(&dirs).map(|dir| dir.join(program));
    found.find(is_executable).unwrap_or_else(|| program.into())
}

/// Returns whether a signal stops a background process that reads from or writes to the terminal.
pub(crate) fn stops_for_terminal(signal: i32) -> bool {
    [Signal::TTIN, Signal::TTOU].iter().any(|stop| stop.as_raw() == signal)
}
