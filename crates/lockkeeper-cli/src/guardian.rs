//! The guardian: a second process that ends the command if this one cannot.
//!
//! It waits for one of three things on a pipe from the wrapper: to be dismissed; the end of the pipe, which
//! means that the wrapper is dead; or the moment that it was told last, at which the lock may go to somebody
//! else, because the wrapper is stopped or stuck. After the last two it kills the command and all that the
//! command started.

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
/// How long a guardian may take to be there.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// The longest sleep: a machine that was suspended is late by as long.
const MAX_SLEEP: Duration = Duration::from_millis(500);

/// A moment on a clock that all processes share and that goes on while the machine sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(Duration);

impl Moment {
    pub(crate) fn now() -> Self {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let clock = ClockId::Boottime;
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let clock = ClockId::Monotonic;
        Self(Duration::try_from(clock_gettime(clock)).unwrap_or_default())
    }

    pub(crate) fn after(self, time: Duration) -> Self {
        Self(self.0.saturating_add(time))
    }

    pub(crate) fn before(self, time: Duration) -> Self {
        Self(self.0.saturating_sub(time))
    }

    /// How long it is until then.
    pub(crate) fn left(self) -> Duration {
        self.0.saturating_sub(Self::now().0)
    }

    pub(crate) fn has_passed(self) -> bool {
        self <= Self::now()
    }
}

/// The wrapper's side.
pub(crate) struct Guardian {
    child: Child,
    pipe: ChildStdin,
}

impl Guardian {
    /// Starts one, in a group of its own, and waits for it to be there.
    pub(crate) async fn start(owner: Owner, patience: Duration) -> io::Result<Self> {
        let mut command = Command::new(own_program()?);
        command.arg0("lockkeeper").arg(ARGUMENT).env_clear().current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        command.process_group(0);
        let mut child = command.spawn()?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("no pipes to the guardian"));
        };
        // One that is stopped must not stop us, too.
        rustix::io::ioctl_fionbio(&stdin, true)?;
        let ready = pipe::Receiver::from_owned_fd(stdout.into())?;
        let guardian = Self { child, pipe: stdin };
        guardian.tell(&format!("owner {owner}"))?;
        let listen = async {
            let mut byte = [0];
            loop {
                ready.readable().await?;
                match ready.try_read(&mut byte) {
                    Ok(1) => return Ok(()),
                    Ok(_) => return Err(io::Error::other("the guardian ended at once")),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
        };
        let slow = || Err(io::Error::other("the guardian does not answer"));
        let answered = tokio::time::timeout(patience, listen).await.unwrap_or_else(|_| slow());
        // To one that comes too late, the end of its pipe would mean that the command has to die.
        answered.inspect_err(|_| guardian.dismiss())?;
        Ok(guardian)
    }

    /// Tells which group is the command's.
    pub(crate) fn guard(&self, group: &Group) {
        let _ = self.tell(&format!("group {}", group.id().as_raw_pid()));
    }

    /// Tells until when the command may live.
    pub(crate) fn until(&self, moment: Moment) {
        // If that fails it is dead, which is seen to elsewhere, or stopped.
        let _ = self.tell(&format!("until {}", moment.0.as_nanos()));
    }

    /// Lets it go: the command has ended.
    pub(crate) fn dismiss(&self) {
        let _ = self.tell("done");
    }

    fn tell(&self, line: &str) -> io::Result<()> {
        rustix::io::write(&self.pipe, format!("{line}\n").as_bytes())?;
        Ok(())
    }

    pub(crate) fn is_dead(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }
}

/// This program, even if its file has been replaced by a newer one meanwhile.
pub(crate) fn own_program() -> io::Result<std::path::PathBuf> {
    let link = std::path::Path::new("/proc/self/exe");
    if fs::symlink_metadata(link).is_ok() { Ok(link.into()) } else { std::env::current_exe() }
}

/// The guardian's side: its whole life.
pub(crate) fn main() -> ExitCode {
    // Whoever wants to end it has to mean it.
    if SigSet::all().thread_block().is_err() {
        return ExitCode::FAILURE;
    }
    let mut until = None;
    let (mut owner, mut group) = (None, None);
    let mut heard = Vec::new();
    let stdin = io::stdin();
    loop {
        while let Some(end) = heard.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = heard.drain(..=end).collect();
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
                Some((_, moment)) => {
                    let nanos = moment.parse().map(Duration::from_nanos);
                    until = nanos.ok().map(Moment);
                }
            }
        }
        let sleep = until.map_or(MAX_SLEEP, |until: Moment| until.left().min(MAX_SLEEP));
        let sleep = Timespec::try_from(sleep).ok();
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        let spoken = matches!(poll(&mut fds, sleep.as_ref()), Ok(1..));
        let wrapper_is_dead = spoken && {
            let mut buffer = [0; 512];
            match rustix::io::read(&stdin, &mut buffer) {
                Ok(0) => true,
                Ok(count) => {
                    heard.extend_from_slice(&buffer[..count]);
                    continue;
                }
                Err(_) => false,
            }
        };
        if wrapper_is_dead || until.is_some_and(Moment::has_passed) {
            if let Some(owner) = owner {
                match group {
                    Some(group) => Group::new(group, owner).kill(),
                    // The wrapper died before it could tell.
                    None => Group::hunt(owner),
                }
            }
            return ExitCode::SUCCESS;
        }
    }
}
