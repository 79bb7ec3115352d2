//! The processes of this system, where the system lists them.
//!
//! Linux lists them in `/proc`. macOS and FreeBSD do not. The `/proc` of another pid namespace is not used: its pids
//! belong to other processes.

use std::fs;
use std::sync::OnceLock;

use rustix::process::{Pid, getpid};

pub(crate) use handle::Handle;

/// Returns whether the system lists processes, so that [`all`] finds them.
pub(crate) fn are_listed() -> bool {
    static LISTED: OnceLock<bool> = OnceLock::new();
    *LISTED.get_or_init(|| cfg!(any(target_os = "linux", target_os = "android")) && is_own_proc())
}

/// Returns whether `/proc` belongs to the pid namespace of this process. `NSpid` then has a single entry (proc(5)).
fn is_own_proc() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    match status.lines().find_map(|line| line.strip_prefix("NSpid:")) {
        Some(numbers) => numbers.split_ascii_whitespace().count() == 1,
        // Linux before 4.1 has no `NSpid`.
        None => fs::read_link("/proc/self")
            .is_ok_and(|link| link.to_str() == Some(&getpid().as_raw_pid().to_string())),
    }
}

/// Returns all processes except this one; none where they are not listed.
pub(crate) fn all() -> impl Iterator<Item = Pid> {
    let entries = are_listed().then(|| fs::read_dir("/proc").ok()).flatten();
    let entries = entries.into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(Pid::from_raw).filter(|pid| *pid != getpid())
}

/// Returns whether the environment of a process contains an entry.
pub(crate) fn has_in_environment(pid: Pid, entry: &[u8]) -> bool {
    let environment = fs::read(format!("/proc/{}/environ", pid.as_raw_pid()));
    environment.is_ok_and(|all| all.split(|byte| *byte == 0).any(|one| one == entry))
}

/// Returns the process group of a process; `None` if the process is dead.
pub(crate) fn group_of_living(pid: Pid) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
    // The program name, which is in parentheses, may itself contain one.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let group = fields.nth(1)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(group)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod handle {
    use std::os::fd::OwnedFd;

    use rustix::io::Errno;
    use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

    /// A handle to a process. With a pidfd, a signal never reaches another process that reuses the pid.
    pub(crate) struct Handle {
        pid: Pid,
        /// `None` where the kernel (before 5.3) or a sandbox has no pidfds. Signals are then sent to the pid.
        pidfd: Option<OwnedFd>,
    }

    impl Handle {
        /// Opens a process; `None` if no process has this pid.
        pub(crate) fn open(pid: Pid) -> Option<Self> {
            match pidfd_open(pid, PidfdFlags::empty()) {
                Ok(pidfd) => Some(Self { pid, pidfd: Some(pidfd) }),
                Err(Errno::SRCH) => None,
                Err(_) => Some(Self { pid, pidfd: None }),
            }
        }

        pub(crate) fn signal(&self, signal: Signal) {
            let _ = match &self.pidfd {
                Some(pidfd) => pidfd_send_signal(pidfd, signal),
                None => kill_process(self.pid, signal),
            };
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod handle {
    use rustix::process::{Pid, Signal, kill_process, test_kill_process};

    /// A process, by its pid. Not used in practice: where processes are not listed, none is found to be signalled.
    pub(crate) struct Handle(Pid);

    impl Handle {
        pub(crate) fn open(pid: Pid) -> Option<Self> {
            test_kill_process(pid).ok().map(|()| Self(pid))
        }

        pub(crate) fn signal(&self, signal: Signal) {
            let _ = kill_process(self.0, signal);
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Child, Command, Stdio};

    use rustix::process::Signal;

    use super::*;

    fn sleeper() -> Child {
        Command::new("sleep")
            .arg("20")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a process")
    }

    /// Starts a process with a given pid. Retries, because other processes may take the pid first.
    fn start_with_pid(pid: Pid) -> Child {
        let last = "/proc/sys/kernel/ns_last_pid";
        for _ in 0..1000 {
            fs::write(last, (pid.as_raw_pid() - 1).to_string())
                .unwrap_or_else(|error| panic!("{last}: {error}: run it as root"));
            let mut child = sleeper();
            if Pid::from_child(&child) == pid {
                return child;
            }
            child.kill().expect("a signal");
            child.wait().expect("a child");
        }
        panic!("no process got the pid {pid:?} in 1000 attempts");
    }

    /// Runs a test of this program in a pid namespace where this user is root.
    fn as_root_of_a_namespace(test: &str) {
        let mut unshare = Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]);
        unshare.arg(std::env::current_exe().expect("a path")).args([test, "--exact"]);
        let ran = unshare.output().expect("unshare runs");
        assert!(ran.status.success(), "run it as root, or allow user namespaces: {ran:?}");
    }

    #[test]
    fn a_signal_does_not_reach_a_process_that_reuses_the_pid_of_a_dead_one() {
        if !rustix::process::geteuid().is_root() {
            let test = "a_signal_does_not_reach_a_process_that_reuses_the_pid_of_a_dead_one";
            return as_root_of_a_namespace(&format!("processes::tests::{test}"));
        }
        let mut first = sleeper();
        let pid = Pid::from_child(&first);
        let handle = Handle::open(pid).unwrap();
        first.kill().unwrap();
        first.wait().unwrap();
        let mut second = start_with_pid(pid);
        handle.signal(Signal::KILL);
        // The first signal that reaches the process kills it.
        Handle::open(pid).unwrap().signal(Signal::TERM);
        assert_eq!(second.wait().unwrap().signal(), Some(Signal::TERM.as_raw()));
    }

    #[test]
    fn living_processes_are_listed_and_dead_ones_have_no_group() {
        assert!(are_listed());
        let mut child = sleeper();
        let pid = Pid::from_child(&child);
        assert!(all().any(|listed| listed == pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(group_of_living(pid), None);
    }
}
