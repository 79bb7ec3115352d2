//! Functions that are not async, from every kind of thread, with keepers of every kind.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lockkeeper::backend::Backend;
use lockkeeper::{ErrorKind, Keeper, Memory, Result, blocking, locked};

use crate::common::keeper;

static INSIDE: AtomicUsize = AtomicUsize::new(0);

#[locked(key = "counter", keeper = "keeper")]
fn count(keeper: &Keeper) -> Result<()> {
    assert_eq!(INSIDE.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
    std::thread::yield_now();
    INSIDE.fetch_sub(1, Ordering::SeqCst);
    Ok(())
}

#[locked(key = "counter", keeper = "keeper")]
async fn count_async(keeper: &Keeper) -> Result<()> {
    assert_eq!(INSIDE.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
    tokio::task::yield_now().await;
    INSIDE.fetch_sub(1, Ordering::SeqCst);
    Ok(())
}

/// From a runtime with one thread, which is blocked meanwhile, and from threads without one.
#[test]
fn threads_and_tasks_exclude_each_other_whatever_their_keeper_is() {
    in_a_runtime(exclude_each_other());
}

async fn exclude_each_other() {
    let store: Arc<dyn Backend> = Arc::new(Memory::new());
    let keeper = Keeper::from_backend(store.clone());
    let blocking = blocking::block_on(async { Keeper::from_backend(store) });
    let threads: Vec<_> = (0..4)
        .map(|at| {
            let (keeper, blocking) = (keeper.clone(), blocking.clone());
            std::thread::spawn(move || {
                for _ in 0..50 {
                    if at % 2 == 0 { count(&keeper).unwrap() } else { count(&blocking).unwrap() }
                }
            })
        })
        .collect();
    for _ in 0..50 {
        count_async(&keeper).await.unwrap();
        count_async(&blocking).await.unwrap();
        count(&blocking).unwrap();
        count(&keeper).unwrap();
    }
    for thread in threads {
        tokio::task::spawn_blocking(|| thread.join().unwrap()).await.unwrap();
    }
}

#[locked(key = "a", keeper = "keeper", ttl = "300ms")]
fn work_for(keeper: &Keeper, long: Duration) -> Result<()> {
    std::thread::sleep(long);
    Ok(())
}

/// The runtime of the keeper is blocked: the lock is renewed all the same.
#[test]
fn a_lock_is_renewed_while_its_function_blocks_the_only_thread() {
    in_a_runtime(async { work_for(&keeper(), Duration::from_millis(900)).unwrap() });
}

/// Runs a future on a runtime with a single thread, which it may block, for at most half a minute.
#[track_caller]
fn in_a_runtime(future: impl Future<Output = ()> + Send + 'static) {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(future);
        done.send(()).unwrap();
    });
    is_done.recv_timeout(Duration::from_secs(30)).expect("it panicked, or blocks for ever");
}

#[locked(key = "a", keeper = "keeper", wait = "50ms")]
fn try_for_a_while(keeper: &Keeper) -> Result<()> {
    Ok(())
}

/// The timer of the wait cannot be one of the runtime that is blocked.
#[test]
fn a_wait_ends_even_if_it_blocks_the_only_thread() {
    in_a_runtime(async {
        let keeper = keeper();
        let _guard = keeper.mutex("a").lock().await.unwrap();
        assert_eq!(try_for_a_while(&keeper).unwrap_err().kind(), ErrorKind::TimedOut);
    });
}

#[locked(key = "a", keeper = "keeper")]
fn spawns(keeper: &Keeper) -> Result<tokio::runtime::RuntimeFlavor> {
    Ok(tokio::runtime::Handle::current().runtime_flavor())
}

#[test]
fn a_body_runs_in_the_runtime_of_its_caller() {
    in_a_runtime(async {
        assert_eq!(spawns(&keeper()).unwrap(), tokio::runtime::RuntimeFlavor::CurrentThread);
    });
}
