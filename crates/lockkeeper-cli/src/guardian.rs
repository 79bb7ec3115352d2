//! The guardian: a second process that kills the command if lockkeeper itself cannot.
//!
//! It reads a pipe from lockkeeper until it is dismissed. It kills the command and all processes that the command
//! started if the pipe closes, because lockkeeper is dead, or if the last deadline it received passes, because
//! lockkeeper is stopped or stalled and the lease is about to end.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::Duration;

use lockkeeper::Owner;
use nix::sys::signal::SigSet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;
use rustix::time::{ClockId, clock_gettime};
use tokio::net::unix::pipe;

use crate::group::Group;

/// The hidden argument that makes this program a guardian.
pub(crate) const ARGUMENT: &str = "__guardian";
/// How long a guardian may take to start.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(20);
/// The longest sleep. The timeout of `poll` does not count suspended time, so after a suspend it is late by up to this.
const MAX_SLEEP: Duration = Duration::from_millis(500);

#[cfg(any(target_os = "linux", target_os = "android"))]
const CLOCK: ClockId = ClockId::Boottime;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const CLOCK: ClockId = ClockId::Monotonic;

/// A time since boot, which all processes of the machine can compare. On Linux and macOS it includes suspended time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BootTime(Duration);

impl BootTime {
    pub(crate) fn now() -> Self {
        Self(Duration::try_from(clock_gettime(CLOCK)).unwrap_or_default())
    }

    pub(crate) fn after(self, time: Duration) -> Self {
        Self(self.0.saturating_add(time))
    }

    pub(crate) fn before(self, time: Duration) -> Self {
        Self(self.0.saturating_sub(time))
    }

    /// Returns the time that remains.
    pub(crate) fn remaining(self) -> Duration {
        self.0.saturating_sub(Self::now().0)
    }

    pub(crate) fn has_passed(self) -> bool {
        self <= Self::now()
    }
}

/// A running guardian.
pub(crate) struct Guardian {
    child: Child,
    pipe: ChildStdin,
}

impl Guardian {
    /// Starts a guardian in its own process group and waits until it is ready.
    pub(crate) async fn start(owner: Owner, timeout: Duration) -> io::Result<Self> {
        let mut command = Command::new(own_program()?);
        command.arg0("lockkeeper").arg(ARGUMENT).env_clear().current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        command.process_group(0);
        let mut child = command.spawn()?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("the guardian process has no pipes"));
        };
        // A write must not block if the guardian is stopped.
        rustix::io::ioctl_fionbio(&stdin, true)?;
        let ready = pipe::Receiver::from_owned_fd(stdout.into())?;
        let guardian = Self { child, pipe: stdin };
        guardian.send(&format!("owner {owner}"))?;
        let is_ready = async {
            let mut byte = [0];
            loop {
                ready.readable().await?;
                match ready.try_read(&mut byte) {
                    Ok(1) => return Ok(()),
                    Ok(_) => return Err(io::Error::other("the guardian process exited")),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
        };
        let timed_out = || Err(io::Error::other("the guardian process did not start in time"));
        let started = tokio::time::timeout(timeout, is_ready).await.unwrap_or_else(|_| timed_out());
        // A guardian that starts later would find the pipe closed, and kill the command.
        started.inspect_err(|_| guardian.dismiss())?;
        Ok(guardian)
    }

    /// Sends the process group of the command.
    pub(crate) fn set_group(&self, group: &Group) {
        let _ = self.send(&format!("group {}", group.id().as_raw_pid()));
    }

    /// Sends the time at which the guardian kills the command.
    pub(crate) fn set_deadline(&self, deadline: BootTime) {
        // This fails if the guardian is dead, and is replaced soon, or if it is stopped.
        let _ = self.send(&format!("until {}", deadline.0.as_nanos()));
    }

    /// Ends the guardian without killing the command.
    pub(crate) fn dismiss(&self) {
        let _ = self.send("done");
    }

    fn send(&self, line: &str) -> io::Result<()> {
        rustix::io::write(&self.pipe, format!("{line}\n").as_bytes())?;
        Ok(())
    }

    pub(crate) fn is_dead(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }
}

/// Returns the path of this program. `/proc/self/exe` is valid even if its file has been replaced by an upgrade.
pub(crate) fn own_program() -> io::Result<std::path::PathBuf> {
    let link = std::path::Path::new("/proc/self/exe");
    if fs::symlink_metadata(link).is_ok() { Ok(link.into()) } else { std::env::current_exe() }
}

/// Runs as the guardian process.
pub(crate) fn main() -> ExitCode {
    // Only KILL ends the guardian.
    if SigSet::all().thread_block().is_err() {
        return ExitCode::FAILURE;
    }
    let mut deadline = None;
    let (mut owner, mut group) = (None, None);
    let mut received = Vec::new();
    let stdin = io::stdin();
    loop {
        while let Some(end) = received.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = received.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            match line.trim_end().split_once(' ') {
                None => return ExitCode::SUCCESS,
                Some(("owner", id)) => {
                    owner = id.parse::<Owner>().ok();
                    let mut stdout = io::stdout();
                    if stdout.write_all(b".").and_then(|()| stdout.flush()).is_err() {
                        return ExitCode::FAILURE;
                    }
                }
                Some(("group", id)) => group = id.parse().ok().and_then(Pid::from_raw),
                Some((_, nanos)) => {
                    let nanos = nanos.parse().map(Duration::from_nanos);
                    deadline = nanos.ok().map(BootTime);
                }
            }
        }
        let sleep = deadline.map_or(MAX_SLEEP, |at: BootTime| at.remaining().min(MAX_SLEEP));
        let sleep = Timespec::try_from(sleep).ok();
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        let readable = matches!(poll(&mut fds, sleep.as_ref()), Ok(1..));
        let pipe_closed = readable && {
            let mut buffer = [0; 512];
            match rustix::io::read(&stdin, &mut buffer) {
                Ok(0) => true,
                Ok(count) => {
                    received.extend_from_slice(&buffer[..count]);
                    continue;
                }
                Err(_) => false,
            }
        };
        if pipe_closed || deadline.is_some_and(BootTime::has_passed) {
            if let Some(owner) = owner {
                match group {
                    Some(group) => Group::new(group, owner).kill(),
                    // lockkeeper died before it could send the group.
                    None => Group::kill_by_mark(owner),
                }
            }
            return ExitCode::SUCCESS;
        }
    }
}
