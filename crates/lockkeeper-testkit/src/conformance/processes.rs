//! Behaviour when other processes are killed and stopped.

use std::path::PathBuf;
use std::process::Stdio;

use lockkeeper_core::{Fence, Fences};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use super::{Subject, soon};
use crate::history::History;

/// A program whose main function is [`helper::main`](crate::helper::main), and the store that it opens.
#[derive(Debug, Clone)]
pub struct Helper {
    /// The path of the program.
    pub program: PathBuf,
    /// Its first argument: the address of the subject's store.
    pub url: String,
}

/// Creates a test for each behaviour that a store must have when other processes die.
///
/// Takes the path of an async function without arguments that returns a
/// [`Subject`](crate::conformance::Subject) with a [`helper`](crate::conformance::Subject::helper).
#[macro_export]
macro_rules! conformance_across_processes {
    ($factory:path) => {
        $crate::__as_tests! { $factory;
            a_waiter_takes_over_from_a_killed_holder
            a_killed_waiter_does_not_block_the_others
            a_stopped_holder_detects_its_loss_when_it_continues
            processes_exclude_each_other
        }
    };
}

impl Subject {
    /// Sets the program that acquires locks in other processes.
    #[must_use]
    pub fn helper(mut self, program: impl Into<PathBuf>, url: impl Into<String>) -> Self {
        self.helper = Some(Helper { program: program.into(), url: url.into() });
        self
    }

    fn start(&self, name: &str, task: &[&str]) -> Process {
        let helper = self.helper.as_ref().expect("the subject has a helper");
        let mut child = Command::new(&helper.program)
            .arg(&helper.url)
            .arg(self.name(name))
            .arg(self.ttl.as_millis().to_string())
            .args(task)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", helper.program.display()));
        let stdout = child.stdout.take().expect("a piped standard output");
        Process { child, lines: BufReader::new(stdout).lines() }
    }
}

/// A running helper process. Dropping it kills the process.
struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    async fn next_line(&mut self) -> Option<String> {
        soon("the helper's next line", self.lines.next_line()).await.expect("it is text")
    }

    async fn expect(&mut self, word: &str) -> String {
        let line = self.next_line().await;
        let rest = line.as_deref().and_then(|line| line.strip_prefix(word));
        rest.unwrap_or_else(|| panic!("the helper printed {line:?} instead of {word:?}"))
            .trim()
            .to_owned()
    }

    fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
        kill_process(pid.expect("a running helper"), signal).expect("a signal to a child");
    }

    async fn kill9(&mut self) {
        self.child.kill().await.expect("a signal to a child");
    }
}

/// After `kill -9` of the holder the next waiter is granted the lock, with a higher fence.
pub async fn a_waiter_takes_over_from_a_killed_holder(subject: Subject) {
    let keeper = subject.keeper();
    let mut holder = subject.start("a", &["hold"]);
    let fence = Fence::new(holder.expect("held").await.parse().expect("a number"));
    let mutex = keeper.mutex(subject.name("a"));
    assert!(mutex.try_lock().await.unwrap().is_none());
    let waiter = tokio::spawn(async move { mutex.lock().await.unwrap() });
    subject.wait_for_waiters("a", 1).await;
    holder.kill9().await;
    let next = soon("the waiter", waiter).await.unwrap();
    assert!(subject.capabilities().fences == Fences::None || next.fence() > fence);
    next.release().await.unwrap();
    subject.assert_nothing_left(&[&keeper]).await;
}

/// A waiter that is killed with `kill -9` does not block other waiters.
pub async fn a_killed_waiter_does_not_block_the_others(subject: Subject) {
    let keeper = subject.keeper();
    let mutex = keeper.mutex(subject.name("a"));
    let guard = mutex.lock().await.unwrap();
    let mut dead = subject.start("a", &["hold"]);
    subject.wait_for_waiters("a", 1).await;
    let waiter = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await.unwrap() }
    });
    subject.wait_for_waiters("a", 2).await;
    dead.kill9().await;
    guard.release().await.unwrap();
    let next = soon("the waiter behind", waiter).await.unwrap();
    next.release().await.unwrap();
    subject.assert_nothing_left(&[&keeper]).await;
}

/// A holder that is stopped for longer than its lease loses it, and detects the loss as soon as it continues. If
/// the store has no expiry, it keeps the lock.
pub async fn a_stopped_holder_detects_its_loss_when_it_continues(subject: Subject) {
    let keeper = subject.keeper();
    let mut holder = subject.start("a", &["hold"]);
    holder.expect("held").await;
    let mutex = keeper.mutex(subject.name("a"));
    let expires = subject.expires_without_renewal().await;
    holder.signal(Signal::STOP);
    if expires {
        let next = soon("lock", mutex.lock()).await.unwrap();
        holder.signal(Signal::CONT);
        holder.expect("lost").await;
        assert!(next.is_held(), "the former holder ended the new hold");
        next.release().await.unwrap();
    } else {
        assert!(mutex.try_lock_for(subject.ttl * 2).await.unwrap().is_none());
        holder.signal(Signal::CONT);
        drop(holder.child.stdin.take());
        holder.expect("released").await;
        soon("lock", mutex.lock()).await.unwrap().release().await.unwrap();
    }
    subject.assert_nothing_left(&[&keeper]).await;
}

/// Several processes contend for one name, and one of them is killed: holders never overlap.
pub async fn processes_exclude_each_other(subject: Subject) {
    let history = History::new();
    let mut processes: Vec<_> = (0..4).map(|_| subject.start("a", &["hammer", "25"])).collect();
    let mut doomed = processes.pop().expect("four were started");
    let mut finished = 0;
    let read = |history: &History, line: &str| {
        let hold = line.strip_prefix("hold ").map(|hold| hold.parse().expect("a hold"));
        hold.map(|hold| history.add(hold)).is_some()
    };
    for _ in 0..5 {
        let line = doomed.next_line().await.expect("a line");
        assert!(read(&history, &line), "the helper printed {line:?}");
    }
    doomed.kill9().await;
    while let Some(line) = doomed.next_line().await {
        // Lines that it printed before it was killed.
        read(&history, &line);
    }
    for mut process in processes {
        while let Some(line) = process.next_line().await {
            if read(&history, &line) {
                finished += 1;
            } else {
                assert_eq!(line, "done");
            }
        }
    }
    assert_eq!(finished, 75);
    assert!(history.assert_clean().holds >= 80);
    subject.assert_nothing_left(&[]).await;
}
