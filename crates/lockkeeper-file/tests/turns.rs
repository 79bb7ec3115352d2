//! Tasks of one process, and of others, that want the same lock all the time.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::{soon, store};
use lockkeeper_core::Keeper;
use lockkeeper_file::File;

/// Longer than any test: nothing is found out by a renewal, or by looking now and then.
const LONG: Duration = Duration::from_secs(600);

fn keeper(store: &File) -> Keeper {
    Keeper::new(store.clone()).ttl(LONG)
}

/// So many tasks that take turns for as long as they are let.
struct Turns {
    stop: Arc<AtomicBool>,
    count: Arc<AtomicUsize>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Turns {
    /// Starts them, and waits until they are at it.
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

/// Two stores are to each other like two processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_that_take_turns_for_ever_do_not_keep_other_processes_out() {
    let (store, dir) = store();
    let turns = Turns::start(&keeper(&store), 4).await;
    let other = keeper(&File::open(dir.path()).unwrap()).mutex("a");
    for _ in 0..3 {
        soon("the other one's turn", other.lock()).await.unwrap().release().await.unwrap();
    }
    turns.end().await;
}

/// A future that was polled once, and neither again nor dropped, as in a `select!` that has moved on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_is_left_unpolled_keeps_the_lock_from_nobody() {
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
        // So that it waits; if it does not yet, it is one who comes.
        tokio::time::sleep(Duration::from_millis(20)).await;
        guard.release().await.unwrap();
        soon("one who waits", waiting).await.unwrap().release().await.unwrap();
        soon("one who comes", next.lock()).await.unwrap().release().await.unwrap();
        drop(unpolled);
    }
}
