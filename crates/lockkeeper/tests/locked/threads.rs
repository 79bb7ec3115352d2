//! Blocking functions on plain threads and in runtimes, with keepers of both.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lockkeeper::backend::Backend;
use lockkeeper::{ErrorKind, Keeper, Memory, Result, blocking, locked};

use crate::common::keeper;

static INSIDE: AtomicUsize = AtomicUsize::new(0);

#[locked(key = "counter", keeper = "keeper")]
fn count(keeper: &Keeper) -> Result<()> {
    assert_eq!(INSIDE.fetch_add(1, Ordering::SeqCst), 0, "two holders at a time");
    std::thread::yield_now();
    INSIDE.fetch_sub(1, Ordering::SeqCst);
    Ok(())
}

#[locked(key = "counter", keeper = "keeper")]
async fn count_async(keeper: &Keeper) -> Result<()> {
    assert_eq!(INSIDE.fetch_add(1, Ordering::SeqCst), 0, "two holders at a time");
    tokio::task::yield_now().await;
    INSIDE.fetch_sub(1, Ordering::SeqCst);
    Ok(())
}

#[test]
fn plain_threads_and_a_blocked_runtime_exclude_each_other() {
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
    is_done.recv_timeout(Duration::from_secs(30)).expect("the future panicked or hangs");
}

#[locked(key = "a", keeper = "keeper", wait = "50ms")]
fn wait_briefly(keeper: &Keeper) -> Result<()> {
    Ok(())
}

#[test]
fn a_wait_times_out_while_it_blocks_the_only_thread() {
    in_a_runtime(async {
        let keeper = keeper();
        let _guard = keeper.mutex("a").lock().await.unwrap();
        assert_eq!(wait_briefly(&keeper).unwrap_err().kind(), ErrorKind::TimedOut);
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
