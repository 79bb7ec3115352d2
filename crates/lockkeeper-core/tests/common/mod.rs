//! What the engine's tests share.
#![allow(dead_code, unreachable_pub, reason = "every test file is a crate, and uses a part of it")]

use std::time::Duration;

use lockkeeper_core::{Keeper, LockInfo, Memory};
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
        while self.waiters(name).await != count {
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
