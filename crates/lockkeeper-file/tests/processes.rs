//! What other processes do to each other: they hammer, tidy up, are killed and start others.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::{Process, soon, store, url};
use lockkeeper_core::Keeper;
use lockkeeper_file::File;
use lockkeeper_testkit::history::History;
use rustix::process::{Pid, Signal, kill_process};

/// Longer than any test: nothing is found out by looking now and then.
const LONG: Duration = Duration::from_secs(600);

fn keeper(store: &File) -> Keeper {
    Keeper::new(store.clone()).ttl(LONG)
}

#[tokio::test]
async fn eight_processes_hammer_while_another_removes_idle_files_and_never_two_hold() {
    let (_store, dir) = store();
    let mut tidying = Process::start(dir.path(), &["gc"]);
    let removed = Arc::new(AtomicUsize::new(0));
    let counting = tokio::spawn({
        let removed = removed.clone();
        async move {
            while let Ok(Some(line)) = tidying.lines.next_line().await {
                let count = line.strip_prefix("removed ").unwrap().parse().unwrap();
                removed.store(count, Ordering::SeqCst);
            }
        }
    });
    let history = History::new();
    let mut rounds = 0;
    // Until enough files were removed while they hammered.
    soon("some files to be removed", async {
        while rounds < 2 || removed.load(Ordering::SeqCst) < 20 {
            rounds += 1;
            let start = |_| Process::start(dir.path(), &["a", "30000", "hammer", "50"]);
            let mut hammers: Vec<_> = (0..8).map(start).collect();
            for hammer in &mut hammers {
                while let Some(line) = hammer.line().await {
                    match line.strip_prefix("hold ") {
                        Some(hold) => history.add(hold.parse().unwrap()),
                        None => assert_eq!(line, "done"),
                    }
                }
            }
        }
    })
    .await;
    assert_eq!(history.assert_clean().holds, rounds * 400);
    counting.abort();
}

#[tokio::test]
async fn a_holder_killed_with_nine_wakes_the_next_and_is_no_longer_shown() {
    let (store, dir) = store();
    let keeper = keeper(&store);
    for _ in 0..3 {
        let mut holder = Process::start(dir.path(), &["a", "30000", "hold"]);
        holder.says("held").await;
        let shown = keeper.inspect().unwrap().show("a").await.unwrap();
        let pid = format!(":{}:", holder.child.id().unwrap());
        assert!(shown[0].holders[0].who().contains(&pid), "{shown:?}");
        // Its ttl is so long that only a notice can wake it in time.
        let waiter = tokio::spawn({
            let mutex = keeper.mutex("a");
            async move { mutex.lock().await.unwrap() }
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        holder.child.kill().await.unwrap();
        soon("the waiter", waiter).await.unwrap().release().await.unwrap();
        assert!(keeper.inspect().unwrap().show("a").await.unwrap().is_empty());
    }
}

/// A process that is killed unlocks nothing itself: what it has started must not have the file.
#[tokio::test]
async fn a_program_that_is_started_does_not_carry_the_lock() {
    for (query, carried) in [("", false), ("?inherit=on", true)] {
        let (store, dir) = store();
        let mutex = keeper(&store).mutex("a");
        let mut holder = Process::start_at(&format!("{}{query}", url(dir.path())), &["start"]);
        let pid: i32 = holder.says("started").await.parse().unwrap();
        let started = Started(Pid::from_raw(pid).unwrap());
        assert!(mutex.try_lock().await.unwrap().is_none());
        holder.child.kill().await.unwrap();
        if carried {
            assert!(mutex.try_lock().await.unwrap().is_none(), "it was to be carried");
            rustix::process::test_kill_process(started.0).expect("what was started still runs");
            drop(started);
            soon("the lock", mutex.lock()).await.unwrap().release().await.unwrap();
        } else {
            let guard = soon("the lock", mutex.lock()).await.unwrap();
            rustix::process::test_kill_process(started.0).expect("what was started still runs");
            guard.release().await.unwrap();
        }
    }
}

/// The program that inherited the file has it open still, so that the holder's close is not the last one.
#[tokio::test]
async fn a_waiter_is_woken_by_a_release_although_a_program_has_inherited_the_file() {
    let (store, dir) = store();
    let mut holder = Process::start_at(&format!("{}?inherit=on", url(dir.path())), &["start"]);
    let pid: i32 = holder.says("started").await.parse().unwrap();
    let started = Started(Pid::from_raw(pid).unwrap());
    // Its ttl is so long that only a notice can wake it in time.
    let waiter = tokio::spawn({
        let mutex = keeper(&store).mutex("a");
        async move { mutex.lock().await.unwrap() }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(holder.stdin.take());
    soon("the waiter", waiter).await.unwrap().release().await.unwrap();
    rustix::process::test_kill_process(started.0).expect("what was started still runs");
}

/// A process that nobody else ends.
struct Started(Pid);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

/// A program that is being started has a copy of every open file, for a moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_that_are_being_started_meanwhile_do_not_keep_what_is_released() {
    let (store, _dir) = store();
    let keeper = keeper(&store);
    let done = Arc::new(AtomicBool::new(false));
    let starting = std::thread::spawn({
        let done = done.clone();
        move || {
            while !done.load(Ordering::SeqCst) {
                assert!(std::process::Command::new("true").status().unwrap().success());
            }
        }
    });
    for i in 0..300 {
        let guard = keeper.mutex("a").try_lock().await.unwrap();
        guard.unwrap_or_else(|| panic!("refused at {i}")).release().await.unwrap();
        keeper.inspect().unwrap().show("a").await.unwrap();
    }
    done.store(true, Ordering::SeqCst);
    starting.join().unwrap();
}

#[tokio::test]
async fn permits_of_a_process_that_was_killed_come_back() {
    let (store, dir) = store();
    let keeper = keeper(&store);
    let mut holder = Process::start(dir.path(), &["permit"]);
    holder.says("held").await;
    let semaphore = keeper.semaphore("gpu", 1);
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    let waiter = tokio::spawn(async move { semaphore.acquire().await.unwrap() });
    tokio::time::sleep(Duration::from_millis(50)).await;
    holder.child.kill().await.unwrap();
    soon("the permit", waiter).await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_stuck_holder_is_thrown_out_and_finds_out_when_it_goes_on() {
    let (store, dir) = store();
    let keeper = keeper(&store);
    let mut stuck = Process::start(dir.path(), &["a", "30000", "hold"]);
    stuck.says("held").await;
    stuck.signal(Signal::STOP);
    let waiter = tokio::spawn({
        let mutex = keeper.mutex("a");
        async move { mutex.lock().await.unwrap() }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(keeper.inspect().unwrap().break_lock("a").await.unwrap(), 1);
    let next = soon("the waiter", waiter).await.unwrap();
    stuck.signal(Signal::CONT);
    stuck.says("lost").await;
    assert!(next.is_held());
    next.release().await.unwrap();
}

#[tokio::test]
async fn those_who_wait_do_not_keep_each_other_awake() {
    let (store, dir) = store();
    let keeper = keeper(&store);
    let guard = keeper.mutex("a").lock().await.unwrap();
    let start = |_| Process::start(dir.path(), &["a", "600000", "hold"]);
    let mut waiters: Vec<_> = (0..3).map(start).collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    // A try opens and closes the file, which wakes them all once.
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
    let ticks = || waiters.iter().map(Process::cpu_ticks).sum::<u64>();
    let before = ticks();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let used = ticks() - before;
    assert!(used < 50, "three that wait ran for {used} hundredths of a second within a second");
    // Each is to give it back as soon as it has it: they enter in any order.
    for waiter in &mut waiters {
        drop(waiter.stdin.take());
    }
    guard.release().await.unwrap();
    for waiter in &mut waiters {
        waiter.says("held").await;
        waiter.says("released").await;
    }
}
