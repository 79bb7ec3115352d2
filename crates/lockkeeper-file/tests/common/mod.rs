//! Helpers for the tests of the file store.
#![allow(dead_code, reason = "each test uses a part")]

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use lockkeeper_core::{Attempt, Backend, Background, Claim, ClaimSpec, Fence, Keeper, Name};
use lockkeeper_file::{File, Options};
use lockkeeper_testkit::conformance::Subject;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// A timeout for events that happen at once, even on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// Returns the path of the helper program, which acquires locks in other processes.
pub(crate) fn helper() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let helper = tests.ancestors().nth(2).unwrap().join("examples/file_helper");
    assert!(helper.exists(), "{} is missing: run `cargo build --examples`", helper.display());
    helper
}

/// Returns the URL of a store.
pub(crate) fn url(dir: &Path) -> String {
    format!("file:{}", dir.display())
}

/// Returns a store in a new directory, for the conformance suite.
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

/// Awaits an event that should happen soon.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let output = tokio::time::timeout(SOON, future).await;
    output.unwrap_or_else(|_| panic!("{what}: not within {SOON:?}"))
}

/// Returns a store in a new directory.
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

/// A helper process. Killed when dropped.
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
        let line = self.line().await.unwrap_or_else(|| panic!("the helper ended without {word:?}"));
        let rest = line.strip_prefix(word);
        rest.unwrap_or_else(|| panic!("the helper printed {line:?} instead of {word:?}"))
            .trim()
            .to_owned()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().unwrap().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Returns the CPU time of the process in clock ticks, which are hundredths of a second.
    pub(crate) fn cpu_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id().unwrap()));
        let stat = stat.unwrap();
        // The fields follow the program name, which may contain blanks.
        let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }
}

/// Longer than any test, so that no renewal and no refresh happens.
pub(crate) const LONG: Duration = Duration::from_secs(600);

pub(crate) fn keeper(store: &File) -> Keeper {
    Keeper::new(store.clone()).ttl(LONG)
}

/// Returns a claim without the engine.
pub(crate) fn claim(store: &File, name: &str) -> Box<dyn Claim> {
    let background = Background::new(tokio::runtime::Handle::current());
    store.claim(ClaimSpec::new(Name::new(name).unwrap(), LONG, background)).unwrap()
}

pub(crate) async fn fence_of(claim: &mut dyn Claim, floor: Option<Fence>) -> u64 {
    match claim.attempt(floor).await.unwrap() {
        Attempt::Granted(grant) => grant.fence.unwrap().get(),
        Attempt::Contended { .. } | Attempt::Undecided => panic!("the free lock was not granted"),
    }
}

/// Returns a fence that is ahead of the clock but plausible.
pub(crate) fn half_an_hour_ahead() -> Option<Fence> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    Fence::new(u64::try_from(now.as_micros()).unwrap() + 1_800_000_000)
}
