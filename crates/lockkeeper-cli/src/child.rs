//! The command: how it is started, and how it ended.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use lockkeeper::Guard;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};

use crate::args;
use crate::failure::{Failure, by_signal};
use crate::processes;

/// The name of the lock, in the command's environment.
const NAME: &str = "LOCKKEEPER_NAME";
/// Its fence.
const FENCE: &str = "LOCKKEEPER_FENCE";
/// The owner of the claim. It also marks what the command starts.
pub(crate) const OWNER: &str = "LOCKKEEPER_OWNER";

/// A running command.
pub(crate) struct Child {
    pid: Pid,
    /// How it ended, once it has been reaped.
    ended: Option<Status>,
}

/// What became of it.
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
            Status::Killed(signal) | Status::Stopped(signal) => by_signal(signal),
        }
    }
}

impl Child {
    /// Starts the command, as the first of a new group.
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
            // It may hold a password.
            command.env_remove(crate::store::VARIABLE);
            command.spawn()
        };
        let spawned = match spawn(program, None) {
            // A script without `#!`: shells run it themselves.
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

    /// What has become of it since the last look.
    ///
    /// Where processes are listed it is not reaped when it has ended: so the number of its group stays taken, and a
    /// signal to the group reaches no other. Elsewhere it is reaped, because an unreaped process counts as a member of its
    /// group, which would never be empty; there the number stays taken for as long as the group has other members.
    pub(crate) fn look(&mut self) -> Option<Status> {
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

/// Where a program is, as a shell looks for it.
fn find(program: &OsStr) -> PathBuf {
    let is_path = program.as_bytes().contains(&b'/');
    let dirs = std::env::var_os("PATH").filter(|_| !is_path).unwrap_or_default();
    let is_executable =
        |path: &PathBuf| rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok();
    let mut found = std::env::split_paths(&dirs).map(|dir| dir.join(program));
    found.find(is_executable).unwrap_or_else(|| program.into())
}

/// Whether a signal stops a process for job control.
pub(crate) fn wants_terminal(signal: i32) -> bool {
    [Signal::TTIN, Signal::TTOU].iter().any(|stop| stop.as_raw() == signal)
}
