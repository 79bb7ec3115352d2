//! The command's process group, and what the command started outside of it.
//!
//! A command may leave its group, as `timeout` and `setsid` do. What it starts carries the claim's owner
//! in its environment, wherever it goes, so it is found by that, where there is a `/proc`.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use lockkeeper::Owner;
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};

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

/// How to look for processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Where {
    Inside,
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

    /// Sends a signal to the group and to what has left it. Whoever is stopped goes on, to hear it.
    pub(crate) fn signal_all(&self, signal: Signal) {
        let outside = self.living(Where::Anywhere);
        self.signal(signal);
        self.signal(Signal::CONT);
        for pid in outside.into_iter().filter(|(_, inside)| !inside).map(|(pid, _)| pid) {
            let _ = kill_process(pid, signal);
            let _ = kill_process(pid, Signal::CONT);
        }
    }

    /// Whether nobody is left.
    pub(crate) fn is_empty(&self, place: Where) -> bool {
        self.living(place).is_empty()
    }

    /// Kills the whole group, and what has left it.
    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL);
        self.kill_each();
    }

    /// Kills whoever can be found, one by one.
    fn kill_each(&self) {
        for _ in 0..ROUNDS {
            let living = self.living(Where::Anywhere);
            if living.is_empty() {
                return;
            }
            for (pid, _) in living {
                let _ = kill_process(pid, Signal::KILL);
            }
            sleep(Duration::from_millis(1));
        }
    }

    /// Kills a command whose group is not known, because its wrapper died while it started it. It has its
    /// mark only from its exec on, so it is looked for until it can have come that far.
    pub(crate) fn hunt(owner: Owner) {
        let mark = mark(owner);
        let start = Instant::now();
        while start.elapsed() < HUNT {
            for pid in processes().filter(|pid| has_mark(*pid, &mark)) {
                let _ = kill_process(pid, Signal::KILL);
            }
            sleep(Duration::from_millis(10));
        }
    }

    /// Those who live, and whether they are inside of the group. Never this process itself.
    fn living(&self, place: Where) -> Vec<(Pid, bool)> {
        let mut found = Vec::new();
        for pid in processes() {
            let Some(group) = group_of_living(pid) else { continue };
            let inside = group == self.id.as_raw_pid();
            if inside || place == Where::Anywhere && has_mark(pid, &self.mark) {
                found.push((pid, inside));
            }
        }
        found
    }
}

/// What the environment of a claim's command contains.
fn mark(owner: Owner) -> Vec<u8> {
    format!("{}={owner}", crate::child::OWNER).into_bytes()
}

fn has_mark(pid: Pid, mark: &[u8]) -> bool {
    let environment = fs::read(format!("/proc/{}/environ", pid.as_raw_pid()));
    environment.is_ok_and(|all| all.split(|byte| *byte == 0).any(|one| one == mark))
}

/// All processes but this one.
fn processes() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(Pid::from_raw).filter(|pid| *pid != getpid())
}

/// The group of a process; `None` if it is dead.
fn group_of_living(pid: Pid) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
    // The name of a program may contain anything, also a bracket.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let group = fields.nth(1)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(group)
}
