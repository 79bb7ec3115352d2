//! The cost of the engine on the memory store, compared with tokio's mutex.

use std::time::Instant;

use lockkeeper_core::{Keeper, Memory};

use crate::bench::{Bench, REPETITIONS};
use crate::implementation::{
    Fut, Held, Implementation, Kind, Lock, LockFactory, Mode, NoLocks, Outcome, one_line,
};
use crate::report::{Better, Section};

/// Measures lock and release, uncontended, on the memory store. Called directly: a boxed future would cost as much as tokio's mutex.
pub(crate) async fn uncontended(bench: &mut Bench, section: Section) -> Outcome<()> {
    let mut section = section.column("ns", "ns", Better::Low);
    bench.begin(&mut section).await?;
    let ours = Implementation::new("lockkeeper", Kind::Ours, NoLocks);
    let tokios = Implementation::new("tokio::sync::Mutex", Kind::Raw, NoLocks);
    let mutex = Keeper::new(Memory::new()).mutex("orders/42");
    let local = tokio::sync::Mutex::new(());
    let rounds = bench.either(50_000_u32, 5_000);
    for repetition in 0..=REPETITIONS {
        let start = Instant::now();
        for _ in 0..rounds {
            mutex.lock().await.map_err(one_line)?.release().await.map_err(one_line)?;
        }
        let engine = start.elapsed() / rounds;
        let start = Instant::now();
        for _ in 0..rounds * 10 {
            drop(local.lock().await);
        }
        let bare = start.elapsed() / (rounds * 10);
        // The first repetition warms up.
        if let Some(repetition) = repetition.checked_sub(1) {
            section.row(&ours).record("ns", repetition, Some(engine.as_nanos() as f64));
            section.row(&tokios).record("ns", repetition, Some(bare.as_nanos() as f64));
        }
    }
    bench.end(section);
    Ok(())
}

/// Returns the memory store and tokio's mutex, for the scenarios that box their futures.
pub(crate) fn implementations() -> Vec<Implementation> {
    vec![
        Implementation::new("lockkeeper", Kind::Ours, Keeper::new(Memory::new())),
        Implementation::new("tokio::sync::Mutex", Kind::Raw, Tokio::default()),
    ]
}

#[derive(Default)]
struct Tokio {
    locks:
        std::sync::Mutex<std::collections::HashMap<String, std::sync::Arc<tokio::sync::Mutex<()>>>>,
}

impl LockFactory for Tokio {
    fn lock(&self, key: &str, _: usize) -> Fut<'_, Outcome<Box<dyn Lock>>> {
        let mut locks = self.locks.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let lock = locks.entry(key.to_owned()).or_default().clone();
        Box::pin(async { Ok(Box::new(lock) as Box<dyn Lock>) })
    }
}

impl Lock for std::sync::Arc<tokio::sync::Mutex<()>> {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async { Ok(Box::new(self.clone().lock_owned().await) as Box<dyn Held>) })
    }
}

impl Held for tokio::sync::OwnedMutexGuard<()> {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        drop(self);
        Box::pin(async { Ok(()) })
    }
}
