//! The processes of the command: its process group, and processes that have left the group.
//!
//! A process may leave its group, as `timeout` and `setsid` do. Every process of the command inherits an environment entry
//! with the owner id of the claim (the *mark*). Where the system lists processes, they are found by it. Elsewhere only the
//! group is signalled and waited for.

use std::thread::sleep;
use std::time::{Duration, Instant};

use lockkeeper::Owner;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};

use crate::processes::{self, Handle};

/// The maximum number of searches for processes. New ones may be started while others are killed.
const MAX_ROUNDS: usize = 200;
/// How long to search for a command that may be between fork and exec.
const SEARCH_TIME: Duration = Duration::from_secs(5);

/// The command's process group, and the environment entry that marks its processes.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    id: Pid,
    mark: Vec<u8>,
}

/// Which processes to search for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Members of the group.
    Inside,
    /// Marked processes that have left the group.
    Outside,
    /// Both.
    Anywhere,
}

impl Group {
    pub(crate) fn new(id: Pid, owner: Owner) -> Self {
        Self { id, mark: mark(owner) }
    }

    pub(crate) fn id(&self) -> Pid {
        self.id
    }

    /// Sends a signal to the group.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.id, signal);
    }

    /// Sends a signal to the group and to processes that have left it, and continues stopped ones so that they receive
    /// it.
    pub(crate) fn signal_all(&self, signal: Signal) {
        let outside = self.living(Scope::Outside);
        self.signal(signal);
        self.signal(Signal::CONT);
        for pid in outside {
            self.signal_one(pid, Scope::Outside, &[signal, Signal::CONT]);
        }
    }

    /// Returns whether no process is alive. Where processes are not listed, those that have left the group are not found,
    /// and a dead member counts until its parent has reaped it.
    pub(crate) fn is_empty(&self, scope: Scope) -> bool {
        if processes::are_listed() {
            self.living(scope).is_empty()
        } else {
            test_kill_process_group(self.id) == Err(Errno::SRCH)
        }
    }

    /// Kills the group and the processes that have left it.
    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL);
        self.kill_each();
    }

    /// Kills processes one by one, until two searches in a row find none. One search is not enough: during an exec, a process
    /// briefly has no environment, and so no mark.
    fn kill_each(&self) {
        let mut found_none = false;
        for _ in 0..MAX_ROUNDS {
            let living = self.living(Scope::Anywhere);
            if living.is_empty() && (found_none || !processes::are_listed()) {
                return;
            }
            found_none = living.is_empty();
            for pid in living {
                self.signal_one(pid, Scope::Anywhere, &[Signal::KILL]);
            }
            sleep(Duration::from_millis(1));
        }
    }

    /// Kills a command whose group is not known, because lockkeeper died while it started the command. The command has
    /// its mark only after its exec, so the search continues for [`SEARCH_TIME`].
    pub(crate) fn kill_by_mark(owner: Owner) {
        let mark = mark(owner);
        let marked = |pid: &Pid| processes::has_in_environment(*pid, &mark);
        let start = Instant::now();
        while processes::are_listed() && start.elapsed() < SEARCH_TIME {
            for pid in processes::all().filter(&marked) {
                if let Some(process) = Handle::open(pid).filter(|_| marked(&pid)) {
                    process.signal(Signal::KILL);
                }
            }
            sleep(Duration::from_millis(10));
        }
    }

    /// Returns the processes of the command that are alive.
    fn living(&self, scope: Scope) -> Vec<Pid> {
        processes::all().filter(|pid| self.has(*pid, scope)).collect()
    }

    /// Returns whether a process is alive and belongs to the command.
    fn has(&self, pid: Pid, scope: Scope) -> bool {
        let Some(group) = processes::group_of_living(pid) else { return false };
        let inside = group == self.id.as_raw_pid();
        match scope {
            Scope::Inside => inside,
            Scope::Outside => !inside && processes::has_in_environment(pid, &self.mark),
            Scope::Anywhere => inside || processes::has_in_environment(pid, &self.mark),
        }
    }

    /// Sends signals to one process. Checks the process again after opening it, because its pid may have been reused
    /// since it was found.
    fn signal_one(&self, pid: Pid, scope: Scope, signals: &[Signal]) {
        let Some(process) = Handle::open(pid).filter(|_| self.has(pid, scope)) else { return };
        for signal in signals {
            process.signal(*signal);
        }
    }
}

/// Returns the environment entry that marks the processes of a claim's command.
fn mark(owner: Owner) -> Vec<u8> {
    format!("{}={owner}", crate::child::OWNER).into_bytes()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_that_does_not_belong_to_the_command_is_not_signalled() {
        let owner: Owner = "0123456789abcdef0123456789abcdef".parse().unwrap();
        let sleeper = |marked: bool| {
            let mut command = Command::new("sleep");
            command
                .arg("20")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .process_group(0)
                .env_remove(crate::child::OWNER);
            if marked {
                command.env(crate::child::OWNER, owner.to_string());
            }
            command.spawn().unwrap()
        };
        let mut first = sleeper(true);
        let group = Group::new(Pid::from_child(&first), owner);
        for (marked, signal) in [(false, Signal::TERM), (true, Signal::KILL)] {
            let mut process = sleeper(marked);
            let pid = Pid::from_child(&process);
            // `spawn` may return before the kernel shows the new environment.
            while std::fs::read(format!("/proc/{}/environ", pid.as_raw_pid())).unwrap().is_empty() {
                std::thread::yield_now();
            }
            group.signal_one(pid, Scope::Anywhere, &[Signal::KILL]);
            // The first signal that reaches the process kills it.
            Handle::open(pid).unwrap().signal(Signal::TERM);
            assert_eq!(process.wait().unwrap().signal(), Some(signal.as_raw()), "{marked}");
        }
        group.kill();
        assert_eq!(first.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
    }
}
