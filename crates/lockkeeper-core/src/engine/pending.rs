//! Acquires that wait, and whether they are still polled.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::time::Instant;

use crate::engine::maintained::{Maintained, PollActivity};
use crate::owner::Owner;

/// The acquires of a keeper that wait.
#[derive(Default)]
pub(crate) struct PendingAcquires(Mutex<Vec<Pending>>);

struct Pending {
    claim: Weak<dyn Maintained>,
    /// Since when it is known not to be polled.
    unpolled_since: Option<Instant>,
    /// Whether it was woken because of that.
    woken: bool,
}

/// Whether a check comes when it is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    OnTime,
    /// The process was stopped, or its threads were busy.
    Late,
}

impl PendingAcquires {
    fn all(&self) -> MutexGuard<'_, Vec<Pending>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, claim: Weak<dyn Maintained>) {
        let mut all = self.all();
        if all.len() == all.capacity() {
            all.retain(|pending| pending.claim.strong_count() > 0);
        }
        all.push(Pending { claim, unpolled_since: None, woken: false });
    }

    /// The owners of those that wait, in the order in which they began.
    pub(crate) fn waiting_owners(&self) -> Vec<Owner> {
        let claims: Vec<_> = self.all().iter().filter_map(|each| each.claim.upgrade()).collect();
        claims.into_iter().filter_map(|claim| claim.waiting_owner()).collect()
    }

    /// Removes and returns those that still exist.
    pub(crate) fn take(&self) -> Vec<Arc<dyn Maintained>> {
        let all = std::mem::take(&mut *self.all());
        all.iter().filter_map(|pending| pending.claim.upgrade()).collect()
    }

    /// Gives up those that were not polled for a ttl. To be called now and then. After a late check nothing is given
    /// up: the tasks that poll the acquires had no more time to run than this one.
    ///
    /// An acquire that is not polled exists and does nothing, like one of several futures of which only some are still
    /// polled. On a store with leases its place in the queue, and a grant that was handed to it, expire. On one without
    /// it would block the other waiters for as long as it exists.
    pub(crate) fn give_up_unpolled(&self, check: Check) {
        let now = Instant::now();
        let (mut to_wake, mut unpolled) = (Vec::new(), Vec::new());
        self.all().retain_mut(|pending| {
            let Some(claim) = pending.claim.upgrade() else { return false };
            match claim.take_poll_activity() {
                PollActivity::Over => return false,
                PollActivity::Polled => (pending.unpolled_since, pending.woken) = (None, false),
                PollActivity::None if pending.woken && check == Check::OnTime => {
                    unpolled.push(claim);
                    return false;
                }
                PollActivity::None => {
                    let since = *pending.unpolled_since.get_or_insert(now);
                    // An acquire that is awaited after all is polled when it is woken.
                    pending.woken = now.duration_since(since) >= claim.ttl();
                    to_wake.extend(pending.woken.then_some(claim));
                }
            }
            true
        });
        for claim in to_wake {
            claim.wake_acquirer();
        }
        for claim in unpolled {
            claim.give_up();
        }
    }
}
