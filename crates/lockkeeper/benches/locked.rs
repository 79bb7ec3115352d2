//! Compares `#[locked]` with `with_lock`, on the memory store.
//!
//! `cargo bench -p lockkeeper --features macros`
#![allow(missing_docs, clippy::unwrap_used, reason = "criterion's macros, and a bench")]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use lockkeeper::{Keeper, Memory, Result, locked, scope};
use tokio::runtime::Runtime;

#[locked(key = "order:{order_id}", keeper = "keeper")]
async fn attribute(keeper: &Keeper, order_id: u64) -> Result<u64> {
    Ok(black_box(order_id))
}

#[locked(key = "order:{order_id}", keeper = "keeper", reentrant)]
async fn reentrant(keeper: &Keeper, order_id: u64) -> Result<u64> {
    Ok(black_box(order_id))
}

/// The equivalent of the attribute.
async fn manual(keeper: &Keeper, order_id: u64) -> Result<u64> {
    let work = async |_: &_| Ok(black_box(order_id));
    keeper.with_lock(format!("order:{order_id}"), work).await?
}

#[locked(key = "order:{order_id}", keeper = "keeper")]
fn attribute_blocking(keeper: &Keeper, order_id: u64) -> Result<u64> {
    Ok(black_box(order_id))
}

fn manual_blocking(keeper: &Keeper, order_id: u64) -> Result<u64> {
    keeper.blocking_with_lock(format!("order:{order_id}"), |_| Ok(black_box(order_id)))?
}

fn uncontended(c: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let keeper = runtime.block_on(async { Keeper::new(Memory::new()) });
    let mut group = c.benchmark_group("a function under a lock");
    group.bench_function("with_lock", |b| {
        b.to_async(&runtime).iter(async || manual(&keeper, black_box(42)).await.unwrap());
    });
    group.bench_function("#[locked]", |b| {
        b.to_async(&runtime).iter(async || attribute(&keeper, black_box(42)).await.unwrap());
    });
    group.bench_function("#[locked(reentrant)], in a scope", |b| {
        let call = async || scope(reentrant(&keeper, black_box(42))).await.unwrap();
        b.to_async(&runtime).iter(call);
    });
    let keeper = Keeper::new(Memory::new());
    group.bench_function("blocking with_lock", |b| {
        b.iter(|| manual_blocking(&keeper, black_box(42)).unwrap());
    });
    group.bench_function("blocking #[locked]", |b| {
        b.iter(|| attribute_blocking(&keeper, black_box(42)).unwrap());
    });
    group.finish();
}

criterion_group!(benches, uncontended);
criterion_main!(benches);
