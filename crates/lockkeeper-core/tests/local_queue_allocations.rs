//! The number of allocations that a local queue adds to an uncontended lock. In a separate binary with one test, because the
//! allocator counts for the whole process.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::alloc::System;
use std::sync::Arc;

use common::unordered::Unordered;
use lockkeeper_core::{Keeper, LocalQueue};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const LOCKS: usize = 1000;

/// Returns the allocations of `LOCKS` locks. The test harness has a thread that may allocate, too, so the lowest of
/// several rounds counts.
async fn allocations(keeper: &Keeper) -> usize {
    let mutex = keeper.mutex("orders/42");
    let mut lowest = usize::MAX;
    for _ in 0..6 {
        let region = Region::new(ALLOCATOR);
        for _ in 0..LOCKS {
            mutex.lock().await.unwrap().release().await.unwrap();
        }
        lowest = lowest.min(region.change().allocations);
    }
    lowest
}

/// One for the claim, and one each for the futures of the attempt and of the release. None for the queue.
#[tokio::test(start_paused = true)]
async fn a_local_queue_adds_three_allocations_to_an_uncontended_lock() {
    let bare = Keeper::new(Unordered::silent());
    let queued = Keeper::new(LocalQueue::new(Arc::new(Unordered::silent())));
    assert_eq!(allocations(&queued).await, allocations(&bare).await + 3 * LOCKS);
}
