//! The cost of the engine: locks on the memory store, compared with tokio's mutex.
//!
//! `cargo bench -p lockkeeper-core`
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "criterion's macros, and benchmark code"
)]

use criterion::{Criterion, criterion_group, criterion_main};
use lockkeeper_core::{Keeper, Memory};
use tokio::runtime::Runtime;

fn uncontended(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let mut group = c.benchmark_group("uncontended lock + release");

    let tokio_mutex = tokio::sync::Mutex::new(());
    group.bench_function("tokio::sync::Mutex", |b| {
        b.to_async(&runtime).iter(async || drop(tokio_mutex.lock().await));
    });

    let keeper = runtime.block_on(async { Keeper::new(Memory::new()) });
    let mutex = keeper.mutex("orders/42");
    group.bench_function("Mutex", |b| {
        b.to_async(&runtime).iter(async || mutex.lock().await.unwrap().release().await.unwrap());
    });
    group.bench_function("Mutex, dropped", |b| {
        b.to_async(&runtime).iter(async || drop(mutex.lock().await.unwrap()));
    });
    let lock = keeper.rw_lock("report");
    group.bench_function("RwLock, read", |b| {
        b.to_async(&runtime).iter(async || lock.read().await.unwrap().release().await.unwrap());
    });
    let semaphore = keeper.semaphore("gpu", 4);
    group.bench_function("Semaphore", |b| {
        let acquire = async || semaphore.acquire().await.unwrap().release().await.unwrap();
        b.to_async(&runtime).iter(acquire);
    });
    let mutex = Keeper::new(Memory::new()).mutex("orders/42");
    group.bench_function("Mutex, blocking", |b| {
        b.iter(|| mutex.blocking_lock().unwrap().blocking_release().unwrap());
    });
    group.finish();
}

fn contended(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let mut group = c.benchmark_group("hand-off to the next waiter");
    for waiters in [2_usize, 64, 2000] {
        let mutex = runtime.block_on(async { Keeper::new(Memory::new()) }).mutex("orders/42");
        group.bench_function(format!("{waiters} waiters"), |b| {
            b.to_async(&runtime).iter_custom(async |iterations| {
                let rounds = iterations.div_ceil(waiters as u64);
                let start = std::time::Instant::now();
                let tasks: Vec<_> = (0..waiters)
                    .map(|_| {
                        let mutex = mutex.clone();
                        tokio::spawn(async move {
                            for _ in 0..rounds {
                                mutex.lock().await.unwrap().release().await.unwrap();
                            }
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await.unwrap();
                }
                let done = rounds * waiters as u64;
                start.elapsed().mul_f64(iterations as f64 / done as f64)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, uncontended, contended);
criterion_main!(benches);
