//! The scenarios in which the implementations are measured.

pub(crate) mod idle;
pub(crate) mod keys;
pub(crate) mod memory;
pub(crate) mod queue;
pub(crate) mod quorum;
pub(crate) mod readers;
pub(crate) mod semantics;
pub(crate) mod takeover;
pub(crate) mod uncontended;
pub(crate) mod wake;

use std::time::Duration;

use crate::implementation::{Fut, Held, Lock, Mode, Outcome};
use crate::slice::{self, Contention, SliceOptions};

/// A lock that does not exclude anything.
struct Broken;

impl Lock for Broken {
    fn acquire(&self, _: Mode) -> Fut<'_, Outcome<Box<dyn Held>>> {
        Box::pin(async {
            tokio::task::yield_now().await;
            Ok(Box::new(Broken) as Box<dyn Held>)
        })
    }
}

impl Held for Broken {
    fn release(self: Box<Self>) -> Fut<'static, Outcome<()>> {
        Box::pin(async { Ok(()) })
    }
}

/// Checks that the overlap detector sees a lock that is broken on purpose. A detector that misses it would find every lock correct.
pub(crate) async fn check_overlap_detection() -> Outcome<()> {
    // Several slices, because a busy machine may not run the tasks at all for the length of one.
    for readers in [0, 95] {
        let mut overlaps = 0;
        for _ in 0..20 {
            overlaps += overlaps_of_a_broken_lock(readers).await;
            if overlaps > 0 {
                break;
            }
        }
        if overlaps == 0 {
            return Err("the overlap detector misses a broken lock".into());
        }
    }
    Ok(())
}

async fn overlaps_of_a_broken_lock(readers: u8) -> u64 {
    let time = Duration::from_millis(20);
    let locks = (0..8).map(|_| Box::new(Broken) as Box<dyn Lock>).collect();
    let contention = Contention::SharedLock;
    let options = SliceOptions { contention, readers, warm: time, time, meter: None };
    slice::run(locks, options).await.overlaps
}
