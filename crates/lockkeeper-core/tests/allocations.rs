//! How often the hot paths allocate, exactly: that does not depend on how fast the machine is.
//!
//! In a binary of its own, with one test, since the allocator counts for the whole process. A change that alters the number on purpose
//! updates it here.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::alloc::System;

use lockkeeper_core::{Keeper, Memory};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const LOCKS: usize = 1000;
/// With the feature `metrics`, the labels of four metrics come on top, whether or not they are recorded.
const EACH: usize = if cfg!(feature = "metrics") { 12 } else { 8 };

/// In paused time, so that no timer comes in between; on one thread.
#[tokio::test(start_paused = true)]
async fn the_number_of_allocations_of_an_uncontended_lock_is_unchanged() {
    let keeper = Keeper::new(Memory::new());
    let mutex = keeper.mutex("orders/42");
    let locks = async || {
        for _ in 0..LOCKS {
            mutex.lock().await.unwrap().release().await.unwrap();
        }
    };
    // Tables grow to their size, and stay so.
    locks().await;
    // The harness has a thread of its own, which may still be busy with starting this test: it can only add.
    let mut rounds = Vec::with_capacity(5);
    for _ in 0..5 {
        let region = Region::new(ALLOCATOR);
        locks().await;
        rounds.push(region.change());
    }
    let least = rounds.iter().min_by_key(|round| round.allocations + round.deallocations).unwrap();
    assert_eq!(least.allocations, EACH * LOCKS, "in {LOCKS} locks");
    assert_eq!(least.reallocations, 0);
    assert_eq!(least.allocations, least.deallocations, "something is kept");
}
