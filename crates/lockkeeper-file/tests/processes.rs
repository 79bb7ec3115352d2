//! Several processes: contention, `gc`, killed and stopped holders, started programs.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::{Process, keeper, soon, store, url};
use lockkeeper_testkit::history::History;
use rustix::process::{Pid, Signal, kill_process};

#[tokio::test]
async fn eight_processes_exclude_each_other_while_another_removes_idle_files() {
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
    // Until enough files were removed under contention.
    soon("removed files", async {
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
async fn a_killed_holder_wakes_the_next_waiter_and_is_no_longer_shown() {
    let (store, dir) = store();
    let keeper = keeper(&store);
    for _ in 0..3 {
        let mut holder = Process::start(dir.path(), &["a", "30000", "hold"]);
        holder.says("held").await;
        let shown = keeper.inspect().unwrap().show("a").await.unwrap();
        let pid = format!(":{}:", holder.child.id().unwrap());
        assert!(shown[0].holders[0].who().contains(&pid), "{shown:?}");
        // The TTL is so long that only a notification can wake it in time.
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

/// A killed process does not unlock its files, so programs that it started must not have them open.
#[tokio::test]
async fn a_started_program_does_not_inherit_the_lock_by_default() {
    for (query, carried) in [("", false), ("?inherit=on", true)] {
        let (store, dir) = store();
        let mutex = keeper(&store).mutex("a");
        let mut holder = Process::start_at(&format!("{}{query}", url(dir.path())), &["start"]);
        let pid: i32 = holder.says("started").await.parse().unwrap();
        let started = Started(Pid::from_raw(pid).unwrap());
        assert!(mutex.try_lock().await.unwrap().is_none());
        holder.child.kill().await.unwrap();
        if carried {
            assert!(
                mutex.try_lock().await.unwrap().is_none(),
                "the program has inherited the lock"
            );
            rustix::process::test_kill_process(started.0).expect("the program still runs");
            drop(started);
            soon("the lock", mutex.lock()).await.unwrap().release().await.unwrap();
        } else {
            let guard = soon("the lock", mutex.lock()).await.unwrap();
            rustix::process::test_kill_process(started.0).expect("the program still runs");
            guard.release().await.unwrap();
        }
    }
}

/// The program still has the file open, so the holder's close is not the last one.
#[tokio::test]
async fn a_release_wakes_a_waiter_although_a_program_has_inherited_the_file() {
    let (store, dir) = store();
    let mut holder = Process::start_at(&format!("{}?inherit=on", url(dir.path())), &["start"]);
    let pid: i32 = holder.says("started").await.parse().unwrap();
    let started = Started(Pid::from_raw(pid).unwrap());
    // The TTL is so long that only a notification can wake it in time.
    let waiter = tokio::spawn({
        let mutex = keeper(&store).mutex("a");
        async move { mutex.lock().await.unwrap() }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(holder.stdin.take());
    soon("the waiter", waiter).await.unwrap().release().await.unwrap();
    rustix::process::test_kill_process(started.0).expect("the program still runs");
}

/// A process that ends when this is dropped.
struct Started(Pid);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

/// Between `fork` and `exec`, a child has a copy of every open file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_started_during_a_release_do_not_keep_the_lock() {
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
async fn permits_of_a_killed_process_become_free() {
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
async fn a_stopped_holder_whose_lock_was_broken_reports_the_loss_when_it_continues() {
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
async fn waiters_do_not_wake_each_other() {
    let (store, dir) = store();
    let keeper = keeper(&store);
    let guard = keeper.mutex("a").lock().await.unwrap();
    let start = |_| Process::start(dir.path(), &["a", "600000", "hold"]);
    let mut waiters: Vec<_> = (0..3).map(start).collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    // A try opens and closes the file, which wakes all waiters once.
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none());
    let ticks = || waiters.iter().map(Process::cpu_ticks).sum::<u64>();
    let before = ticks();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let used = ticks() - before;
    assert!(
        used < 50,
        "three waiters used {used} hundredths of a second of CPU time within a second"
    );
    // Each releases the lock at once, in any order.
    for waiter in &mut waiters {
        drop(waiter.stdin.take());
    }
    guard.release().await.unwrap();
    for waiter in &mut waiters {
        waiter.says("held").await;
        waiter.says("released").await;
    }
}
