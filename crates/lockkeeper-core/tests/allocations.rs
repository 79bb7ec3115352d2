//! The exact number of allocations of an uncontended lock, which does not depend on the speed of the machine.
//!
//! A separate binary with one test, because the allocator counts for the whole process. A change that alters the
//! number on purpose updates it here.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

use std::alloc::System;

use lockkeeper_core::{Keeper, Memory};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const LOCKS: usize = 1000;
/// Allocations per lock and release. The feature `metrics` adds the labels of four metrics, recorded or not.
const EACH: usize = if cfg!(feature = "metrics") { 12 } else { 8 };

/// In paused time, so that no timer fires, and on one thread.
#[tokio::test(start_paused = true)]
async fn the_number_of_allocations_of_an_uncontended_lock_is_unchanged() {
    let keeper = Keeper::new(Memory::new());
    let mutex = keeper.mutex("orders/42");
    let locks = async || {
        for _ in 0..LOCKS {
            mutex.lock().await.unwrap().release().await.unwrap();
        }
    };
    // Lets tables grow to their final size.
    locks().await;
    // The test harness has a thread that may still allocate: it can only add, so the minimum counts.
    let mut rounds = Vec::with_capacity(5);
    for _ in 0..5 {
        let region = Region::new(ALLOCATOR);
        locks().await;
        rounds.push(region.change());
    }
    let least = rounds.iter().min_by_key(|round| round.allocations + round.deallocations).unwrap();
    assert_eq!(least.allocations, EACH * LOCKS, "in {LOCKS} locks");
    assert_eq!(least.reallocations, 0);
    assert_eq!(least.allocations, least.deallocations, "memory is kept");
}
