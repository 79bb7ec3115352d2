//! The test environment: a directory, a store in it, and processes that end with the test.

use std::fs;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// The timeout of every wait: longer than a step that succeeds takes, even on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_lockkeeper");

/// Polls a condition until it is true.
#[track_caller]
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A directory and a store: files in that directory, or another store.
pub(crate) struct Sandbox {
    dir: TempDir,
    store: String,
}

/// The exit code and the output of a process.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Sandbox {
    /// Uses a file store. The directory is not below `/tmp`, because `doctor` warns of that.
    pub(crate) fn new() -> Self {
        let mut dir = tempfile::Builder::new();
        dir.prefix("lockkeeper-cli-");
        let dir = dir.tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let store = format!("file:{}", dir.path().join("locks").display());
        Self { dir, store }
    }

    /// Uses the store of a URL.
    pub(crate) fn on(url: &str) -> Self {
        Self { store: url.to_owned(), ..Self::new() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the contents of a file, empty if it does not exist.
    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Returns the latest time, in nanoseconds, that a command has written into the file `beats`.
    #[track_caller]
    pub(crate) fn last_beat(&self) -> u128 {
        self.read("beats").lines().filter_map(|line| line.parse().ok()).max().unwrap()
    }

    #[track_caller]
    pub(crate) fn wait_for(&self, name: &str) {
        eventually(name, || self.read(name).ends_with('\n'));
    }

    /// Waits for a pid that a command writes into a file.
    #[track_caller]
    pub(crate) fn pid_in(&self, name: &str) -> Pid {
        self.wait_for(name);
        Pid::from_raw(self.read(name).trim().parse().unwrap()).unwrap()
    }

    /// Sets up the environment of a command. Of the environment of the tests, only `PATH` is kept.
    pub(crate) fn environ(&self, command: &mut Command) {
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        command.env("LOCKKEEPER_STORE", &self.store).env("LC_ALL", "C.UTF-8");
        command.current_dir(self.dir.path());
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(args);
        self.environ(&mut command);
        command
    }

    pub(crate) fn spawn(&self, args: &[&str]) -> Running {
        Running::start(self.command(args))
    }

    /// Runs the command and waits for its end.
    #[track_caller]
    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.spawn(args).end()
    }

    /// Starts a process that holds a lock until the result is dropped.
    #[track_caller]
    pub(crate) fn hold(&self, name: &str, options: &[&str]) -> Running {
        let mut args = vec!["run", name];
        args.extend(options);
        args.extend(["--", "sh", "-c", "echo held; exec sleep 600"]);
        let running = self.spawn(&args);
        running.wait_out("held");
        running
    }
}

/// A running process with its output so far. Dropping it kills the process.
pub(crate) struct Running {
    child: Child,
    out: Arc<Mutex<String>>,
    err: Arc<Mutex<String>>,
    readers: Vec<thread::JoinHandle<()>>,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self::start_with_stdio(command)
    }

    /// Starts a command with its own stdin, stdout and stderr. Output that is not piped is not collected.
    pub(crate) fn start_with_stdio(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let (out, err) = (Arc::default(), Arc::default());
        let mut readers = Vec::new();
        readers.extend(child.stdout.take().map(|stream| collect(stream, &out)));
        readers.extend(child.stderr.take().map(|stream| collect(stream, &err)));
        Self { child, out, err, readers }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Writes to its stdin, and closes it.
    pub(crate) fn write_stdin(&mut self, text: &str) {
        self.child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    }

    pub(crate) fn out(&self) -> String {
        self.out.lock().unwrap().clone()
    }

    pub(crate) fn err(&self) -> String {
        self.err.lock().unwrap().clone()
    }

    #[track_caller]
    pub(crate) fn wait_out(&self, text: &str) {
        self.wait(&self.out, text);
    }

    #[track_caller]
    pub(crate) fn wait_err(&self, text: &str) {
        self.wait(&self.err, text);
    }

    #[track_caller]
    fn wait(&self, stream: &Mutex<String>, text: &str) {
        let start = Instant::now();
        while !stream.lock().unwrap().contains(text) {
            let output = (self.out(), self.err());
            assert!(start.elapsed() < TIMEOUT, "no {text:?} within {TIMEOUT:?}, but {output:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the exit code.
    #[track_caller]
    pub(crate) fn code(&mut self) -> Option<i32> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            let output = (self.out(), self.err());
            assert!(start.elapsed() < 2 * TIMEOUT, "it has not ended; output: {output:?}");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits for the end of the process and of its output.
    #[track_caller]
    pub(crate) fn end(mut self) -> Output {
        drop(self.child.stdin.take());
        let code = self.code();
        // Not joined, which could block: a process that it left behind may keep its output open.
        let what = "the output is closed, also by processes that it started";
        eventually(what, || self.readers.iter().all(thread::JoinHandle::is_finished));
        Output { code, out: self.out(), err: self.err() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The guardian kills the command.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn collect(
    stream: impl Read + Send + 'static,
    into: &Arc<Mutex<String>>,
) -> thread::JoinHandle<()> {
    let into = into.clone();
    thread::spawn(move || {
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        while stream.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            into.lock().unwrap().push_str(&String::from_utf8_lossy(&line));
            line.clear();
        }
    })
}

/// Returns whether a process is alive. A zombie is not.
pub(crate) fn is_alive(pid: Pid) -> bool {
    state(pid).is_some_and(|state| !"ZX".contains(state))
}

/// Returns the state of a process, as in `ps`.
pub(crate) fn state(pid: Pid) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Returns the parent of a process.
pub(crate) fn parent(pid: Pid) -> Pid {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap();
    let parent = stat.rsplit_once(") ").unwrap().1.split(' ').nth(1).unwrap().parse();
    Pid::from_raw(parent.unwrap()).unwrap()
}

/// Returns whether a signal mask of a process (`SigCgt`, `SigIgn`) contains a signal.
pub(crate) fn mask_has(pid: Pid, which: &str, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_pid()));
    let status = status.unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix(which)?.strip_prefix(':'));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & 1 << (signal.as_raw() - 1) != 0
}

/// Returns the children of a process whose command lines contain a text.
pub(crate) fn children(parent: Pid, text: &str) -> Vec<Pid> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let path = entry.path();
        let read = |name: &str| fs::read(path.join(name)).unwrap_or_default();
        let stat = String::from_utf8_lossy(&read("stat")).into_owned();
        let Some((_, fields)) = stat.rsplit_once(") ") else { continue };
        let mut fields = fields.split(' ');
        let alive = fields.next().is_some_and(|state| state != "Z");
        let is_child = fields.next() == Some(&parent.as_raw_pid().to_string());
        let line = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
        if alive && is_child && line.contains(text) {
            let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
            found.extend(pid.and_then(Pid::from_raw));
        }
    }
    found
}

/// Compares a text with a file of this directory, or writes the file if `LOCKKEEPER_BLESS` is set.
#[track_caller]
pub(crate) fn golden(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/golden").join(name);
    if std::env::var_os("LOCKKEEPER_BLESS").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text, expected, "{name} differs: check the difference, then set LOCKKEEPER_BLESS=1");
}
