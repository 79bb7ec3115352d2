//! The command's process group, and what the command started outside of it.
//!
//! A command may leave its group, as `timeout` and `setsid` do. What it starts carries the claim's owner in its
//! environment, so it is found by that mark wherever the system lists its processes. Elsewhere only the group is
//! signalled and waited for.

use std::thread::sleep;
use std::time::{Duration, Instant};

use lockkeeper::Owner;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};

use crate::processes::{self, Handle};

/// How often to look for processes that were started while others were killed.
const ROUNDS: usize = 200;
/// How long to look for a command that may be on its way between fork and exec.
const HUNT: Duration = Duration::from_secs(5);

/// A process group and its mark.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    id: Pid,
    mark: Vec<u8>,
}

/// Which processes to look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Where {
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

    /// Sends a signal to the group and to what has left it. Processes that are stopped are continued, to receive it.
    pub(crate) fn signal_all(&self, signal: Signal) {
        let outside = self.living(Where::Outside);
        self.signal(signal);
        self.signal(Signal::CONT);
        for pid in outside {
            self.signal_one(pid, Where::Outside, &[signal, Signal::CONT]);
        }
    }

    /// Whether no process is left. Where processes are not listed, those that have left the group are not seen, and a
    /// dead member counts until its parent has reaped it.
    pub(crate) fn is_empty(&self, place: Where) -> bool {
        if processes::are_listed() {
            self.living(place).is_empty()
        } else {
            test_kill_process_group(self.id) == Err(Errno::SRCH)
        }
    }

    /// Kills the whole group, and what has left it.
    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL);
        self.kill_each();
    }

    /// Kills all that are found, one by one, until two looks in a row find none: a process in the middle of an exec shows
    /// no environment, and so no mark, for a moment.
    fn kill_each(&self) {
        let mut found_none = false;
        for _ in 0..ROUNDS {
            let living = self.living(Where::Anywhere);
            if living.is_empty() && (found_none || !processes::are_listed()) {
                return;
            }
            found_none = living.is_empty();
            for pid in living {
                self.signal_one(pid, Where::Anywhere, &[Signal::KILL]);
            }
            sleep(Duration::from_millis(1));
        }
    }

    /// Kills a command whose group is not known, because its wrapper died while it started it. It has its
    /// mark only from its exec on, so it is looked for until it can have come that far.
    pub(crate) fn hunt(owner: Owner) {
        let mark = mark(owner);
        let marked = |pid: &Pid| processes::has_in_environment(*pid, &mark);
        let start = Instant::now();
        while processes::are_listed() && start.elapsed() < HUNT {
            for pid in processes::all().filter(&marked) {
                if let Some(process) = Handle::open(pid).filter(|_| marked(&pid)) {
                    process.signal(Signal::KILL);
                }
            }
            sleep(Duration::from_millis(10));
        }
    }

    /// Those that live. Never this process itself.
    fn living(&self, place: Where) -> Vec<Pid> {
        processes::all().filter(|pid| self.has(*pid, place)).collect()
    }

    /// Whether a process lives and is one of this command's.
    fn has(&self, pid: Pid, place: Where) -> bool {
        let Some(group) = processes::group_of_living(pid) else { return false };
        let inside = group == self.id.as_raw_pid();
        match place {
            Where::Inside => inside,
            Where::Outside => !inside && processes::has_in_environment(pid, &self.mark),
            Where::Anywhere => inside || processes::has_in_environment(pid, &self.mark),
        }
    }

    /// Sends signals to one process. It is checked once more after it was opened: its number may have been given to
    /// another process since it was found.
    fn signal_one(&self, pid: Pid, place: Where, signals: &[Signal]) {
        let Some(process) = Handle::open(pid).filter(|_| self.has(pid, place)) else { return };
        for signal in signals {
            process.signal(*signal);
        }
    }
}

/// What the environment of a claim's command contains.
fn mark(owner: Owner) -> Vec<u8> {
    format!("{}={owner}", crate::child::OWNER).into_bytes()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_that_is_not_the_commands_is_not_signalled() {
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
            // `spawn` returns in the middle of the exec: the environment is there a moment later.
            while std::fs::read(format!("/proc/{}/environ", pid.as_raw_pid())).unwrap().is_empty() {
                std::thread::yield_now();
            }
            group.signal_one(pid, Where::Anywhere, &[Signal::KILL]);
            // It dies of the first signal that reaches it.
            Handle::open(pid).unwrap().signal(Signal::TERM);
            assert_eq!(process.wait().unwrap().signal(), Some(signal.as_raw()), "{marked}");
        }
        group.kill();
        assert_eq!(first.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
    }
}
