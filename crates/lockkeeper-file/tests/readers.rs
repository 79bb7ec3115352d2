//! Readers of several processes, and a writer that waits for them.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::mem::MaybeUninit;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{LONG, Process, SOON, files, soon, store, url};
use lockkeeper_core::{Guard, Keeper, RwLock};
use lockkeeper_file::File;
use rustix::fs::inotify;
use rustix::process::Signal;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

const READERS: usize = 4;

fn lock(store: &File) -> RwLock {
    Keeper::new(store.clone()).ttl(LONG).rw_lock("a")
}

/// Starts overlapping readers in other processes. Returns a channel with a message for each acquire.
async fn start_readers(url: &str) -> mpsc::UnboundedReceiver<usize> {
    let (tell, mut turns) = mpsc::unbounded_channel();
    for i in 0..READERS {
        let reader = Process::start_at(url, &["read"]);
        let tell = tell.clone();
        tokio::spawn(async move {
            // Moves the whole helper, which is killed when dropped.
            let mut reader = reader;
            while let Ok(Some(_)) = reader.lines.next_line().await {
                if tell.send(i).is_err() {
                    break;
                }
            }
        });
        // The next reader starts while this one holds the lock.
        while soon("a reader", turns.recv()).await != Some(i) {}
    }
    turns
}

/// Counts acquires of readers until a writer holds the lock.
async fn turns_before_a_writer(url: &str, store: &File) -> usize {
    let mut turns = start_readers(url).await;
    while turns.try_recv().is_ok() {}
    let lock = lock(store);
    let mut writer = tokio::spawn(async move { lock.write().await.unwrap() });
    let mut count = 0;
    loop {
        tokio::select! {
            guard = &mut writer => {
                guard.unwrap().release().await.unwrap();
                return count;
            }
            turn = turns.recv() => {
                turn.expect("the readers run");
                count += 1;
            }
        }
        if count == 100 * READERS {
            writer.abort();
            return count;
        }
    }
}

#[tokio::test]
async fn a_writer_waits_only_for_the_readers_that_hold_the_lock() {
    let (store, dir) = store();
    let turns = turns_before_a_writer(&url(dir.path()), &store).await;
    // Each reader may hold the lock, or have passed the turnstile just before.
    assert!(
        turns <= 3 * READERS,
        "{turns} turns of {READERS} readers before a writer acquired the lock"
    );
    assert_eq!(files(dir.path()), ["a.lock"], "the turnstile is removed");
}

#[tokio::test]
async fn a_polling_writer_is_not_starved() {
    let (_, dir) = store();
    let url = format!("{}?polling=on", url(dir.path()));
    let store = File::from_url(&url).unwrap();
    let turns = turns_before_a_writer(&url, &store).await;
    // A few readers acquire the lock between two polls of the writer.
    assert!(
        turns <= 20 * READERS,
        "{turns} turns of {READERS} readers before a writer acquired the lock"
    );
}

/// Waits until a writer has the turnstile of `a`.
async fn until_a_writer_waits(dir: &Path) {
    let start = Instant::now();
    // The file exists before it is locked. A lock here, even a shared one, would block the writer.
    let is_locked = || {
        let inode = std::fs::metadata(dir.join("a.turn")).ok()?.ino();
        let locks = std::fs::read_to_string("/proc/locks").unwrap();
        locks.contains(&format!(":{inode} ")).then_some(())
    };
    while is_locked().is_none() {
        assert!(start.elapsed() < SOON, "no writer waits");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn reader(lock: &RwLock) -> JoinHandle<Guard> {
    let lock = lock.clone();
    tokio::spawn(async move { lock.read().await.unwrap() })
}

/// Gives a task time to start waiting.
async fn let_tasks_wait() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}

#[tokio::test]
async fn readers_queue_behind_a_waiting_writer_and_acquire_when_it_gives_up() {
    let (store, dir) = store();
    let lock = lock(&store);
    let held = lock.read().await.unwrap();
    let writer = tokio::spawn({
        let lock = lock.clone();
        async move { lock.write().await.unwrap() }
    });
    until_a_writer_waits(dir.path()).await;
    let waiting = [reader(&lock), reader(&lock)];
    let_tasks_wait().await;
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()), "a reader overtook the writer");
    assert!(lock.try_read().await.unwrap().is_none(), "a try overtook the writer");
    writer.abort();
    for waiting in waiting {
        soon("a reader beside the first one", waiting).await.unwrap().release().await.unwrap();
    }
    assert!(held.is_held());
    assert_eq!(files(dir.path()), ["a.lock"], "the turnstile is removed");
}

#[tokio::test]
async fn readers_behind_a_writer_acquire_together_after_its_release() {
    let (store, dir) = store();
    let lock = lock(&store);
    let held = lock.read().await.unwrap();
    let mut writer = Process::start(dir.path(), &["a", "600000", "hold"]);
    until_a_writer_waits(dir.path()).await;
    let waiting = [reader(&lock), reader(&lock)];
    let_tasks_wait().await;
    held.release().await.unwrap();
    writer.says("held").await;
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()), "a reader beside a writer");
    drop(writer.stdin.take());
    let mut together = Vec::new();
    for waiting in waiting {
        together.push(soon("a reader", waiting).await.unwrap());
    }
    assert!(together.iter().all(Guard::is_held));
}

#[tokio::test]
async fn a_killed_waiting_writer_blocks_no_reader() {
    let (store, dir) = store();
    let lock = lock(&store);
    let _inside = lock.read().await.unwrap();
    for _ in 0..5 {
        let mut writer = Process::start(dir.path(), &["a", "600000", "hold"]);
        until_a_writer_waits(dir.path()).await;
        let waiting = reader(&lock);
        let_tasks_wait().await;
        writer.child.kill().await.unwrap();
        soon("a reader", waiting).await.unwrap().release().await.unwrap();
        let guard = lock.try_read().await.unwrap().expect("no writer waits");
        guard.release().await.unwrap();
        assert_eq!(files(dir.path()), ["a.lock", "a.turn"], "it could not remove its turnstile");
        assert_eq!(store.gc().await.unwrap(), 0, "a turnstile is not a lock");
        assert_eq!(files(dir.path()), ["a.lock"]);
    }
}

#[tokio::test]
async fn the_next_writer_removes_the_turnstile_of_a_killed_one() {
    let (store, dir) = store();
    let lock = lock(&store);
    std::fs::write(dir.path().join("a.turn"), "").unwrap();
    let held = lock.read().await.unwrap();
    let writer = tokio::spawn({
        let lock = lock.clone();
        async move { lock.write().await.unwrap() }
    });
    // The file exists already, so it does not show that the writer waits.
    soon("a waiting writer", async {
        while let Some(guard) = lock.try_read().await.unwrap() {
            guard.release().await.unwrap();
        }
    })
    .await;
    held.release().await.unwrap();
    soon("the writer", writer).await.unwrap().release().await.unwrap();
    assert_eq!(files(dir.path()), ["a.lock"]);
}

#[tokio::test]
async fn a_stopped_waiting_writer_does_not_block_readers_of_a_free_lock() {
    let (store, dir) = store();
    let lock = lock(&store);
    let held = lock.read().await.unwrap();
    let mut writer = Process::start(dir.path(), &["a", "600000", "hold"]);
    until_a_writer_waits(dir.path()).await;
    writer.signal(Signal::STOP);
    held.release().await.unwrap();
    let guard = lock.try_read().await.unwrap().expect("a try is not refused on a free lock");
    guard.release().await.unwrap();
    for _ in 0..3 {
        soon("a reader", lock.read()).await.unwrap().release().await.unwrap();
    }
    writer.signal(Signal::CONT);
    writer.says("held").await;
}

#[tokio::test]
async fn only_a_writer_that_waits_for_readers_creates_a_turnstile() {
    let (store, dir) = store();
    let lock = lock(&store);
    let held = lock.write().await.unwrap();
    let writer = tokio::spawn({
        let lock = lock.clone();
        async move { lock.write().await.unwrap() }
    });
    let_tasks_wait().await;
    assert!(lock.try_write().await.unwrap().is_none());
    assert_eq!(files(dir.path()), ["a.lock"]);
    held.release().await.unwrap();
    soon("the writer", writer).await.unwrap().release().await.unwrap();
    let held = lock.read().await.unwrap();
    assert!(lock.try_write().await.unwrap().is_none());
    assert_eq!(files(dir.path()), ["a.lock"], "a try does not wait");
    held.release().await.unwrap();
}

/// Counts how often a file is opened.
struct Opens(rustix::fd::OwnedFd);

impl Opens {
    fn of(path: &Path) -> Self {
        let flags = inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC;
        let opens = inotify::init(flags).unwrap();
        // The kernel merges consecutive equal events (inotify(7)), so closes are watched, too.
        let what = inotify::WatchFlags::OPEN | inotify::WatchFlags::CLOSE;
        inotify::add_watch(&opens, path, what).unwrap();
        Self(opens)
    }

    fn count(&self) -> usize {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&self.0, &mut buffer);
        let mut count = 0;
        while let Ok(event) = events.next() {
            count += usize::from(event.events().contains(inotify::ReadFlags::OPEN));
        }
        count
    }
}

#[tokio::test]
async fn readers_behind_a_waiting_writer_do_not_poll() {
    let (store, dir) = store();
    let lock = lock(&store);
    let held = lock.read().await.unwrap();
    let mut writer = Process::start(dir.path(), &["a", "600000", "hold"]);
    until_a_writer_waits(dir.path()).await;
    let waiting = reader(&lock);
    let_tasks_wait().await;
    // Each attempt of a reader opens the turnstile. One attempt may follow the writer's grace time.
    let opens = Opens::of(&dir.path().join("a.turn"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let attempts = opens.count();
    assert!(attempts <= 2, "{attempts} attempts in a second");
    assert!(!waiting.is_finished());
    held.release().await.unwrap();
    writer.says("held").await;
    drop(writer.stdin.take());
    soon("the reader", waiting).await.unwrap().release().await.unwrap();
}

/// The process of a waiting writer is stopped. Concurrent tries of readers on the free lock may refuse each other, but not
/// all of them.
#[test]
fn of_concurrent_read_tries_on_a_free_lock_at_least_one_succeeds() {
    const ROUNDS: usize = 300;
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (store, dir) = store();
    let main = runtime();
    let writer = main.block_on(async {
        let held = lock(&store).read().await.unwrap();
        let writer = Process::start(dir.path(), &["a", "600000", "hold"]);
        until_a_writer_waits(dir.path()).await;
        writer.signal(Signal::STOP);
        held.release().await.unwrap();
        writer
    });
    let start = Barrier::new(READERS);
    let granted: Vec<_> = (0..ROUNDS).map(|_| AtomicUsize::new(0)).collect();
    std::thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| {
                let lock = lock(&File::open(dir.path()).unwrap());
                runtime().block_on(async {
                    for granted in &granted {
                        start.wait();
                        let guard = lock.try_read().await.unwrap();
                        granted.fetch_add(usize::from(guard.is_some()), Ordering::SeqCst);
                        start.wait();
                        if let Some(guard) = guard {
                            guard.release().await.unwrap();
                        }
                        start.wait();
                    }
                });
            });
        }
    });
    let none = granted.iter().filter(|granted| granted.load(Ordering::SeqCst) == 0).count();
    assert_eq!(none, 0, "rounds of {ROUNDS} in which every try was refused");
    writer.signal(Signal::CONT);
    drop((main, writer));
}
