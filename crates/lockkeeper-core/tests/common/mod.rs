//! Helpers shared by the tests.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "every test file is a crate and uses only some of the helpers"
)]

pub mod remote;
pub mod unordered;

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, Background, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fence, Guard,
    Inspector, Keeper, Kind, LockInfo, Memory, Mutex, Name, Release, Renewal, Result,
};
use lockkeeper_testkit::{Faults, Faulty};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// A keeper on a faulty store, and one on the same store without faults.
pub struct Pair {
    pub faulty: Keeper,
    pub faults: Faults,
    pub healthy: Keeper,
}

pub fn pair() -> Pair {
    let memory = Memory::new();
    let (store, faults) = Faulty::new(memory.clone());
    Pair { faulty: Keeper::new(store), faults, healthy: Keeper::new(memory) }
}

impl Pair {
    /// Returns all locks in the store.
    pub async fn left(&self) -> Vec<LockInfo> {
        self.healthy.inspect().unwrap().list("").await.unwrap()
    }

    pub async fn waiters(&self, name: &str) -> usize {
        let shown = self.healthy.inspect().unwrap().show(name).await.unwrap();
        shown.iter().map(|info| info.waiters.len()).sum()
    }

    /// Waits until the queue has `count` waiters.
    pub async fn until_queued(&self, name: &str, count: usize) {
        // In real time: paused time does not advance while this task is runnable.
        let start = std::time::Instant::now();
        while self.waiters(name).await != count {
            assert!(start.elapsed() < secs(30), "the queue of {name:?} never had {count} waiters");
            tokio::task::yield_now().await;
        }
    }
}

pub fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub const SECOND: Duration = Duration::from_secs(1);
/// The validity of the default lease of 30 s, minus drift (1 % and 2 ms).
pub const HELD_FOR: Duration = Duration::from_millis(30_000 - 302);
/// The resolution of timers.
pub const TICK: Duration = Duration::from_millis(2);

pub fn memories(count: usize) -> Vec<Memory> {
    (0..count).map(|_| Memory::new()).collect()
}

/// Returns the specification of a claim that no engine drives.
pub fn spec(name: &str, ttl: Duration) -> ClaimSpec {
    ClaimSpec::new(Name::new(name).unwrap(), ttl, Background::new(Handle::current()))
}

/// Acquires a mutex in a new task.
pub fn spawn_lock(mutex: Mutex) -> JoinHandle<Result<Guard>> {
    tokio::spawn(async move { mutex.lock().await })
}

pub async fn poll_once<F: Future + ?Sized>(mut future: Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

/// Polls a future up to `times` times, each time it is woken.
pub async fn poll_times<F: Future>(mut future: Pin<&mut F>, times: usize) -> Option<F::Output> {
    let mut left = times;
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Waits until a name has a waiter.
pub async fn until_a_waiter_is_queued(memory: &Memory, name: &str) {
    let inspect = Keeper::new(memory.clone()).inspect().unwrap();
    while inspect.show(name).await.unwrap().iter().all(|info| info.waiters.is_empty()) {
        sleep(millis(1)).await;
    }
}

/// Returns a runtime with this many worker threads.
pub fn threads(count: usize) -> Runtime {
    Builder::new_multi_thread().worker_threads(count).enable_all().build().unwrap()
}

/// Returns a keeper that uses a runtime.
pub fn keeper_on(runtime: &Runtime, store: impl Backend) -> Keeper {
    let _entered = runtime.enter();
    Keeper::new(store)
}

/// A store that can lose its data, like a server that restarts without persistence.
#[derive(Debug, Clone, Default)]
pub struct Forgetful(std::sync::Arc<std::sync::RwLock<(u64, Memory)>>);

impl Forgetful {
    pub fn forget(&self) {
        let mut store = self.0.write().unwrap();
        *store = (store.0 + 1, Memory::new());
    }

    pub fn memory(&self) -> Memory {
        self.0.read().unwrap().1.clone()
    }

    fn generation(&self) -> u64 {
        self.0.read().unwrap().0
    }
}

impl Backend for Forgetful {
    fn name(&self) -> &'static str {
        "forgetful"
    }

    fn capabilities(&self) -> Capabilities {
        self.memory().capabilities()
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        let (store, claim) = (self.clone(), self.memory().claim(spec.clone())?);
        Ok(Box::new(ForgetfulClaim { generation: store.generation(), store, spec, claim }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        None
    }
}

struct ForgetfulClaim {
    store: Forgetful,
    generation: u64,
    spec: ClaimSpec,
    claim: Box<dyn Claim>,
}

impl ForgetfulClaim {
    /// Returns the claim in the current generation of the store.
    fn current(&mut self) -> &mut dyn Claim {
        if self.generation != self.store.generation() {
            self.generation = self.store.generation();
            self.claim = self.store.memory().claim(self.spec.clone()).unwrap();
        }
        &mut *self.claim
    }
}

impl Claim for ForgetfulClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        self.current().attempt(floor)
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        self.current().changed()
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        self.current().renew(ttl)
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        self.current().downgrade(ttl)
    }

    fn set_fence(&mut self, fence: Fence) {
        self.current().set_fence(fence);
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        self.current().release()
    }
}

/// A memory store without semaphores.
#[derive(Debug, Default)]
pub struct WithoutPermits(pub Memory);

impl Backend for WithoutPermits {
    fn name(&self) -> &'static str {
        "without permits"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { permits: false, ..self.0.capabilities() }
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        assert_eq!(spec.mode.kind(), Kind::Lock, "a claim on a semaphore");
        self.0.claim(spec)
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.0.inspector()
    }
}
