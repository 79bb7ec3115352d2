//! Constant contention between tasks of one process and of several.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::{keeper, soon, store};
use lockkeeper_core::Keeper;
use lockkeeper_file::File;

/// Tasks that lock in a loop.
struct Turns {
    stop: Arc<AtomicBool>,
    count: Arc<AtomicUsize>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Turns {
    /// Starts the tasks, and waits for their first acquires.
    async fn start(keeper: &Keeper, tasks: usize) -> Self {
        let (stop, count) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let task = |_| {
            let (mutex, stop, count) = (keeper.mutex("a"), stop.clone(), count.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let guard = mutex.lock().await.unwrap();
                    tokio::task::yield_now().await;
                    guard.release().await.unwrap();
                    count.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let tasks = (0..tasks).map(task).collect();
        let turns = Self { stop, count, tasks };
        soon("turns", async {
            while turns.count.load(Ordering::Relaxed) < 100 {
                tokio::task::yield_now().await;
            }
        })
        .await;
        turns
    }

    async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            soon("the end", task).await.unwrap();
        }
    }
}

/// Two stores behave like two processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_that_lock_in_a_loop_do_not_starve_other_processes() {
    let (store, dir) = store();
    let turns = Turns::start(&keeper(&store), 4).await;
    let other = keeper(&File::open(dir.path()).unwrap()).mutex("a");
    for _ in 0..3 {
        soon("the lock of the other process", other.lock()).await.unwrap().release().await.unwrap();
    }
    turns.end().await;
}

/// The future is polled once and kept alive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_waiter_blocks_no_claim() {
    let (store, dir) = store();
    let here = keeper(&store).mutex("a");
    let elsewhere = keeper(&File::open(dir.path()).unwrap()).mutex("a");
    for next in [&here, &elsewhere] {
        let guard = here.lock().await.unwrap();
        let mut unpolled = Box::pin(here.lock());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(unpolled.as_mut().poll(&mut context).is_pending());
        let waiting = tokio::spawn({
            let next = next.clone();
            async move { next.lock().await.unwrap() }
        });
        // Gives it time to wait. Otherwise it counts as a new claim.
        tokio::time::sleep(Duration::from_millis(20)).await;
        guard.release().await.unwrap();
        soon("a waiter", waiting).await.unwrap().release().await.unwrap();
        soon("a new claim", next.lock()).await.unwrap().release().await.unwrap();
        drop(unpolled);
    }
}
