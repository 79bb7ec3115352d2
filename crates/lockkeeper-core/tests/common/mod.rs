//! What the engine's tests share.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "every test file is a crate, and uses a part of it"
)]

pub mod remote;
pub mod unordered;

use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fence, Inspector, Keeper,
    Kind, LockInfo, Memory, Release, Renewal, Result,
};
use lockkeeper_testkit::{Faults, Faulty};

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
    /// What the store really has.
    pub async fn left(&self) -> Vec<LockInfo> {
        self.healthy.inspect().unwrap().list("").await.unwrap()
    }

    pub async fn waiters(&self, name: &str) -> usize {
        let shown = self.healthy.inspect().unwrap().show(name).await.unwrap();
        shown.iter().map(|info| info.waiters.len()).sum()
    }

    /// Waits until so many stand in the queue.
    pub async fn until_queued(&self, name: &str, count: usize) {
        // In real time: where time is paused it would not go on while this looks.
        let start = std::time::Instant::now();
        while self.waiters(name).await != count {
            assert!(start.elapsed() < secs(30), "not {count} in the queue of {name:?}");
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

/// A store that can forget everything, like one that restarts without its data.
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

    fn life(&self) -> u64 {
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
        Ok(Box::new(ForgetfulClaim { life: store.life(), store, spec, claim }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        None
    }
}

struct ForgetfulClaim {
    store: Forgetful,
    life: u64,
    spec: ClaimSpec,
    claim: Box<dyn Claim>,
}

impl ForgetfulClaim {
    /// The claim in the store as it is now.
    fn now(&mut self) -> &mut dyn Claim {
        if self.life != self.store.life() {
            self.life = self.store.life();
            self.claim = self.store.memory().claim(self.spec.clone()).unwrap();
        }
        &mut *self.claim
    }
}

impl Claim for ForgetfulClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        self.now().attempt(floor)
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        self.now().changed()
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        self.now().renew(ttl)
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        self.now().downgrade(ttl)
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        self.now().release()
    }
}

pub const SECOND: Duration = Duration::from_secs(1);

/// A memory store that cannot count.
#[derive(Debug, Default)]
pub struct Uncounting(pub Memory);

impl Backend for Uncounting {
    fn name(&self) -> &'static str {
        "uncounting"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { permits: false, ..self.0.capabilities() }
    }

    fn claim(&self, spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        assert_eq!(spec.mode.kind(), Kind::Lock, "asked to count");
        self.0.claim(spec)
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.0.inspector()
    }
}
