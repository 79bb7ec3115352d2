//! Who ends a server whose test could not.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal};

/// Its standard input ends with the process that started it, or when it is dismissed. In the first case it
/// asks the server to end, then makes it, and removes what it had.
const SCRIPT: &str = "trap '' HUP INT TERM; read -r word && exit
kill -\"$2\" \"$1\"; kill -CONT \"$1\"
for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 \"$1\" || break; sleep 1; done
kill -KILL \"$1\"; rm -rf \"$3\"";

/// Ends a process when this one has ended without doing so. Dropped, it does nothing any more.
pub(super) struct Watch(Option<Child>);

impl Watch {
    /// Watches over a process of this one's. If there is no shell, nobody does.
    pub(super) fn over(pid: Pid, signal: Signal, dir: &Path) -> Self {
        let mut shell = Command::new("sh");
        shell.args(["-c", SCRIPT, "lockkeeper-watch"]);
        shell.arg(pid.as_raw_pid().to_string()).arg(signal.as_raw().to_string()).arg(dir);
        shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
        Self(shell.spawn().ok())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(shell) = &mut self.0 {
            let _ = shell.kill();
            let _ = shell.wait();
        }
    }
}
