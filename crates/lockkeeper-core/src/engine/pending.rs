//! Acquires that wait, and whether somebody still wants them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::time::Instant;

use crate::engine::observe;
use crate::engine::polling::{Attention, Driver};
use crate::error::{Error, ErrorKind};

/// The acquires of a keeper that go on.
#[derive(Default)]
pub(crate) struct Pending(Mutex<Vec<Acquire>>);

struct Acquire {
    driver: Weak<Driver>,
    /// Since when nobody has polled it, as far as is known.
    left: Option<Instant>,
    /// Whether it was woken because of that.
    woken: bool,
}

impl Pending {
    fn all(&self) -> MutexGuard<'_, Vec<Acquire>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, driver: &Arc<Driver>) {
        let mut all = self.all();
        if all.len() == all.capacity() {
            all.retain(|acquire| acquire.driver.strong_count() > 0);
        }
        all.push(Acquire { driver: Arc::downgrade(driver), left: None, woken: false });
    }

    /// Those that still live.
    pub(crate) fn living(&self) -> Vec<Arc<Driver>> {
        self.all().iter().filter_map(|acquire| acquire.driver.upgrade()).collect()
    }

    /// Takes those that still live.
    pub(crate) fn take(&self) -> Vec<Arc<Driver>> {
        let all = std::mem::take(&mut *self.all());
        all.iter().filter_map(|acquire| acquire.driver.upgrade()).collect()
    }

    /// Gives up those that nobody has polled for a ttl. To be called now and then; `late` if that is later
    /// than it should be. Then the process was stopped, or its threads are busy: whoever polls the acquires
    /// had no more time than we, and gets some now.
    ///
    /// Such a future lives and does nothing, like one of several of which only some are still polled.
    /// On a store with leases its place in the queue, and what it was handed, end by themselves. On one
    /// without, it would stand in everybody's way for as long as it lives.
    pub(crate) fn give_up_the_forgotten(&self, late: bool) {
        let now = Instant::now();
        let (mut to_wake, mut forgotten) = (Vec::new(), Vec::new());
        self.all().retain_mut(|acquire| {
            let Some(driver) = acquire.driver.upgrade() else { return false };
            match driver.attention() {
                Attention::Over => return false,
                Attention::Polled => (acquire.left, acquire.woken) = (None, false),
                Attention::None if acquire.woken && !late => {
                    forgotten.push(driver);
                    return false;
                }
                Attention::None => {
                    let left = *acquire.left.get_or_insert(now);
                    // If it is waited for after all, it is polled when it is woken.
                    acquire.woken = now.duration_since(left) >= driver.hold.ttl();
                    to_wake.extend(acquire.woken.then_some(driver));
                }
            }
            true
        });
        for driver in to_wake {
            driver.hold.wake_acquirer();
        }
        for driver in forgotten {
            let hold = &driver.hold;
            let message = format!("given up: nobody polled it for {:.1?}", hold.ttl());
            let error = hold.error("lock", Error::new(ErrorKind::Unavailable, message));
            if hold.give_up(error) {
                driver.nudge();
                observe::given_up(hold);
            }
        }
    }
}
