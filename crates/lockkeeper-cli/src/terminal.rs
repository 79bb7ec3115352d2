//! The terminal, and who is in its foreground.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use nix::sys::signal::{SigSet, SigmaskHow, Signal as Mask};
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

use crate::failure::{Failure, by_signal};

/// The hidden argument that makes this program die of Ctrl-C.
pub(crate) const INTERRUPTED: &str = "__interrupted";

/// The terminal that this process belongs to, if it has to do with one.
pub(crate) struct Terminal(Option<File>);

impl Terminal {
    pub(crate) fn find() -> Self {
        let in_use =
            io::stdin().is_terminal() || io::stdout().is_terminal() || io::stderr().is_terminal();
        let open = || OpenOptions::new().read(true).write(true).open("/dev/tty").ok();
        Self(if in_use { open() } else { None })
    }

    pub(crate) fn is_there(&self) -> bool {
        self.0.is_some()
    }

    fn foreground(&self) -> Option<Pid> {
        self.0.as_ref().and_then(|tty| tcgetpgrp(tty).ok())
    }

    /// Whether this process is in the foreground.
    pub(crate) fn is_ours(&self) -> bool {
        self.foreground().is_some_and(|group| own_group() == Some(group))
    }

    /// Lets a group have the foreground, if this process has it.
    pub(crate) fn give(&self, group: Pid) {
        if self.is_ours() {
            self.set(group);
        }
    }

    /// Takes the foreground back from a group that was given it.
    pub(crate) fn take_back(&self, group: Pid) {
        if let Some(own) = own_group().filter(|_| self.belongs_to(group)) {
            self.set(own);
        }
    }

    fn set(&self, group: Pid) {
        let Some(tty) = &self.0 else { return };
        // Whoever does this from the background is stopped, unless the signal for that is blocked.
        let mut stop = SigSet::empty();
        stop.add(Mask::SIGTTOU);
        let before = stop.thread_swap_mask(SigmaskHow::SIG_BLOCK);
        let _ = tcsetpgrp(tty, group);
        if let Ok(before) = before {
            let _ = before.thread_set_mask();
        }
    }

    /// Whether a group has the foreground.
    pub(crate) fn belongs_to(&self, group: Pid) -> bool {
        self.foreground() == Some(group)
    }

    /// Does to this process and its group what Ctrl-C would have done if they had been in the foreground: a
    /// shell that runs a script goes on with it unless it sees its child die of just that. Handlers of
    /// signals cannot be taken back without unsafe code, but they do not survive a change of program. Returns
    /// only if that fails.
    pub(crate) fn interrupt_ourselves() {
        signal_own_group(Signal::INT);
        Self::become_interrupted();
    }

    /// Dies of the Ctrl-C that ended a wait, for the same reason: whoever else is in the group has had it.
    /// Returns if it did not come from the terminal, and the exit code is to say it.
    pub(crate) fn pass_on_interrupt(failure: &Failure) {
        if failure.kind == "signal"
            && failure.code == by_signal(Signal::INT.as_raw())
            && Self::find().is_ours()
        {
            Self::become_interrupted();
        }
    }

    fn become_interrupted() {
        let Ok(program) = crate::guardian::own_program() else { return };
        let _ = Command::new(program).arg0("lockkeeper").arg(INTERRUPTED).env_clear().exec();
    }

    /// The new program.
    pub(crate) fn die_of_interrupt() -> ExitCode {
        let _ = kill_process(getpid(), Signal::INT);
        ExitCode::from(by_signal(Signal::INT.as_raw()))
    }

    /// Stops this process and those in its group, as Ctrl-Z would. Returns when it goes on.
    pub(crate) fn stop_ourselves() {
        signal_own_group(Signal::TSTP);
    }
}

/// The process group of this process. `None` if it has no number here: in a new pid namespace, the group of the process
/// that made it is outside. (rustix panics then, in builds with debug assertions.)
pub(crate) fn own_group() -> Option<Pid> {
    Pid::from_raw(nix::unistd::getpgrp().as_raw())
}

fn signal_own_group(signal: Signal) {
    if let Some(group) = own_group() {
        let _ = kill_process_group(group, signal);
    }
}
