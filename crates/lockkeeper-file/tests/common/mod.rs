//! What the tests of the file store share.
#![allow(dead_code, reason = "each test uses some of it")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::Backend;
use lockkeeper_file::{File, Options};
use lockkeeper_testkit::conformance::Subject;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Longer than anything takes that works, even on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// The program that takes locks in other processes.
pub(crate) fn helper() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let helper = tests.ancestors().nth(2).unwrap().join("examples/file_helper");
    assert!(helper.exists(), "{} is missing: run `cargo build --examples`", helper.display());
    helper
}

/// The URL of a store.
pub(crate) fn url(dir: &Path) -> String {
    format!("file:{}", dir.display())
}

/// A store for the conformance suite, in a directory of its own.
pub(crate) fn subject(options: &Options, query: &str) -> Subject {
    let dir = tempfile::tempdir().unwrap();
    let store = options.open(dir.path()).unwrap();
    let behind = store.clone();
    Subject::new(Arc::new(store), move |held| {
        let path = behind.path(&held.name);
        async move { std::fs::remove_file(path).unwrap() }
    })
    .another({
        let (options, path) = (options.clone(), dir.path().to_owned());
        move || std::future::ready(Arc::new(options.open(&path).unwrap()) as Arc<dyn Backend>)
    })
    .helper(helper(), format!("{}{query}", url(dir.path())))
    .with_own_waiters()
    .keep(dir)
}

/// Awaits what should not take long.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let output = tokio::time::timeout(SOON, future).await;
    output.unwrap_or_else(|_| panic!("{what}: not within {SOON:?}"))
}

/// A store, and the directory that it is in.
pub(crate) fn store() -> (File, tempfile::TempDir) {
    lockkeeper_testkit::wait::no_longer_than(Duration::from_secs(600));
    let dir = tempfile::tempdir().unwrap();
    (File::open(dir.path()).unwrap(), dir)
}

/// Returns the names of the files in a directory, sorted.
pub(crate) fn files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut files: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    files.sort();
    files
}

/// A process that does something with locks. Killed when dropped.
pub(crate) struct Process {
    pub(crate) child: Child,
    pub(crate) stdin: Option<ChildStdin>,
    pub(crate) lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    pub(crate) fn start(dir: &Path, arguments: &[&str]) -> Self {
        Self::start_at(&url(dir), arguments)
    }

    pub(crate) fn start_at(url: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(helper());
        command.arg(url).args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, stdin, lines }
    }

    pub(crate) async fn line(&mut self) -> Option<String> {
        soon("the next line", self.lines.next_line()).await.unwrap()
    }

    pub(crate) async fn says(&mut self, word: &str) -> String {
        let line = self.line().await.unwrap_or_else(|| panic!("it ended and did not say {word:?}"));
        let rest = line.strip_prefix(word);
        rest.unwrap_or_else(|| panic!("it said {line:?} and not {word:?}")).trim().to_owned()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().unwrap().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// How long its threads have run, in hundredths of a second.
    pub(crate) fn cpu_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id().unwrap()));
        let stat = stat.unwrap();
        // Behind the name of the program, which may have blanks in it.
        let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }
}
