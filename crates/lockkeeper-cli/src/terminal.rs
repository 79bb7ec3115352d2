//! The terminal and its foreground process group.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use nix::sys::signal::{SigSet, SigmaskHow, Signal as NixSignal};
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use crate::failure::{Failure, signal_exit_code};

/// The hidden argument that makes this program kill itself with INT.
pub(crate) const INTERRUPTED: &str = "__interrupted";

/// The controlling terminal, if stdin, stdout or stderr is one.
pub(crate) struct Terminal(Option<File>);

impl Terminal {
    pub(crate) fn find() -> Self {
        let in_use =
            io::stdin().is_terminal() || io::stdout().is_terminal() || io::stderr().is_terminal();
        let open = || OpenOptions::new().read(true).write(true).open("/dev/tty").ok();
        Self(if in_use { open() } else { None })
    }

    pub(crate) fn exists(&self) -> bool {
        self.0.is_some()
    }

    fn foreground(&self) -> Option<Pid> {
        self.0.as_ref().and_then(|tty| tcgetpgrp(tty).ok())
    }

    /// Returns whether this process is in the foreground.
    pub(crate) fn is_in_foreground(&self) -> bool {
        self.foreground().is_some_and(|group| own_group() == Some(group))
    }

    /// Moves a group to the foreground, if this process is in the foreground.
    pub(crate) fn move_to_foreground(&self, group: Pid) {
        if self.is_in_foreground() {
            self.set(group);
        }
    }

    /// Moves this process back to the foreground, if the group is in the foreground.
    pub(crate) fn restore_foreground(&self, group: Pid) {
        if let Some(own) = own_group().filter(|_| self.is_foreground(group)) {
            self.set(own);
        }
    }

    fn set(&self, group: Pid) {
        let Some(tty) = &self.0 else { return };
        // A process in the background that calls tcsetpgrp(3) is stopped by TTOU unless it blocks that signal.
        let mut stop = SigSet::empty();
        stop.add(NixSignal::SIGTTOU);
        let before = stop.thread_swap_mask(SigmaskHow::SIG_BLOCK);
        let _ = tcsetpgrp(tty, group);
        if let Ok(before) = before {
            let _ = before.thread_set_mask();
        }
    }

    /// Returns whether a group is in the foreground.
    pub(crate) fn is_foreground(&self, group: Pid) -> bool {
        self.foreground() == Some(group)
    }

    /// Kills this process and its group with INT, as Ctrl-C does: a shell stops its script only if its child died of INT.
    /// Signal handlers cannot be removed without unsafe code, but `exec` resets them. Returns only if the `exec` fails.
    pub(crate) fn interrupt_own_group() {
        signal_own_group(Signal::INT);
        Self::exec_interrupted();
    }

    /// Kills this process with INT if the failure is a Ctrl-C, for the same reason. The terminal has sent the signal to the
    /// rest of the group. Returns if the signal did not come from the terminal: the exit code then reports it.
    pub(crate) fn reraise_interrupt(failure: &Failure) {
        if failure.kind == "signal"
            && failure.code == signal_exit_code(Signal::INT.as_raw())
            && Self::find().is_in_foreground()
        {
            Self::exec_interrupted();
        }
    }

    fn exec_interrupted() {
        let Ok(program) = crate::guardian::own_program() else { return };
        let _ = Command::new(program).arg0("lockkeeper").arg(INTERRUPTED).env_clear().exec();
    }

    /// Kills this process with INT. Runs after the `exec`, with default signal handlers.
    pub(crate) fn kill_itself_with_int() -> ExitCode {
        let _ = kill_process(getpid(), Signal::INT);
        ExitCode::from(signal_exit_code(Signal::INT.as_raw()))
    }

    /// Stops this process and its group, as Ctrl-Z does. Returns when they are continued.
    pub(crate) fn stop_own_group() {
        signal_own_group(Signal::TSTP);
    }
}

/// Returns the process group of this process. `None` if the group is outside of this pid namespace, as for the first
/// process of a namespace. (`rustix::process::getpgrp` panics then, in builds with debug assertions.)
pub(crate) fn own_group() -> Option<Pid> {
    Pid::from_raw(nix::unistd::getpgrp().as_raw())
}

fn signal_own_group(signal: Signal) {
    if let Some(group) = own_group() {
        let _ = kill_process_group(group, signal);
    }
}
