//! A watchdog that terminates a server if its test process dies first.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal};

/// The script's standard input ends when the test process ends. The script then
/// terminates the server, kills it after ten seconds, and removes its directory.
const SCRIPT: &str = "trap '' HUP INT TERM; read -r word && exit
kill -\"$2\" \"$1\"; kill -CONT \"$1\"
for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 \"$1\" || break; sleep 1; done
kill -KILL \"$1\"; rm -rf \"$3\"";

/// Terminates a process after the death of this one. Dropping it cancels that.
pub(super) struct Watchdog(Option<Child>);

impl Watchdog {
    /// Starts a watchdog for a child process. Does nothing if there is no shell.
    pub(super) fn start(pid: Pid, signal: Signal, dir: &Path) -> Self {
        let mut shell = Command::new("sh");
        shell.args(["-c", SCRIPT, "lockkeeper-watchdog"]);
        shell.arg(pid.as_raw_pid().to_string()).arg(signal.as_raw().to_string()).arg(dir);
        shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
        Self(shell.spawn().ok())
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        if let Some(shell) = &mut self.0 {
            let _ = shell.kill();
            let _ = shell.wait();
        }
    }
}
