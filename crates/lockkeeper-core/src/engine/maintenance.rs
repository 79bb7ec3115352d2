//! The maintenance task of a keeper, and the claims that it looks after.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::background::Background;
use crate::clock;
use crate::engine::maintained::Maintained;
use crate::engine::observe;
use crate::engine::pending::{Check, PendingAcquires};

/// How often to check whether the machine was suspended.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// A shorter suspension is a thread that was preempted between the readings of two clocks.
const MIN_SUSPENSION: Duration = Duration::from_millis(10);
/// How long a new hold waits for its background task. Not a millisecond: a timer that close makes every wait for the
/// store more expensive. Until then no task listens for a loss that the store reports; the deadline counts.
const ROUND: Duration = Duration::from_millis(10);

/// What a keeper's maintenance task works on.
#[derive(Default)]
pub(crate) struct Maintenance {
    /// Whether the task was spawned.
    spawned: AtomicBool,
    /// Whether the task looks for new holds without being notified.
    in_rounds: AtomicBool,
    /// Holds whose guards were created since the last round.
    new_holds: Mutex<Vec<Arc<dyn Maintained>>>,
    hold_added: Arc<Notify>,
    pending: PendingAcquires,
    /// Notified after the machine was suspended: timers are late then.
    resumed: Notify,
    runtime_gone: AtomicBool,
}

impl Maintenance {
    fn new_holds(&self) -> MutexGuard<'_, Vec<Arc<dyn Maintained>>> {
        self.new_holds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a hold whose guard has just been created a background task in the next round, unless it has ended by then.
    /// False if the runtime has been shut down.
    pub(crate) fn register_hold(
        self: &Arc<Self>,
        claim: Arc<dyn Maintained>,
        background: Option<&Background>,
    ) -> bool {
        self.new_holds().push(claim);
        if !self.in_rounds.swap(true, Ordering::SeqCst) {
            self.ensure_task(background);
            self.hold_added.notify_one();
        }
        // The task was dropped with its runtime, and may have missed this hold.
        let gone = self.runtime_gone.load(Ordering::SeqCst);
        if gone {
            // Not kept: no round comes any more, and a hold keeps its keeper.
            let missed = std::mem::take(&mut *self.new_holds());
            drop(missed);
        }
        !gone
    }

    /// Forgets a hold that has ended, if it was the last one to be registered: a lock that is held for a moment never
    /// gets a task.
    pub(crate) fn forget_hold<C>(&self, claim: &C) {
        let mut new_holds = self.new_holds();
        if new_holds.last().is_some_and(|last| std::ptr::addr_eq(Arc::as_ptr(last), claim)) {
            new_holds.pop();
        }
    }

    /// Starts the background tasks of new holds; false if there are none.
    fn start_new_holds(&self) -> bool {
        let new_holds = std::mem::take(&mut *self.new_holds());
        let any = !new_holds.is_empty();
        for claim in new_holds {
            claim.run_in_background();
        }
        any
    }

    /// Remembers an acquire that waits.
    pub(crate) fn register_pending(
        self: &Arc<Self>,
        claim: Weak<dyn Maintained>,
        background: Option<&Background>,
    ) {
        self.pending.add(claim);
        self.ensure_task(background);
    }

    pub(crate) fn pending(&self) -> &PendingAcquires {
        &self.pending
    }

    fn ensure_task(self: &Arc<Self>, background: Option<&Background>) {
        if !self.spawned.load(Ordering::Relaxed)
            && !self.spawned.swap(true, Ordering::Relaxed)
            && let Some(background) = background
        {
            background.spawn_untracked(maintain(TaskState(Arc::downgrade(self))));
        }
    }

    /// Whether the task was spawned.
    pub(crate) fn has_task(&self) -> bool {
        self.spawned.load(Ordering::Relaxed)
    }

    /// Ready after the machine was suspended.
    pub(crate) async fn resumed(&self) {
        self.resumed.notified().await;
    }

    pub(crate) fn runtime_is_gone(&self) -> bool {
        self.runtime_gone.load(Ordering::SeqCst)
    }

    pub(crate) fn set_runtime_gone(&self) {
        self.runtime_gone.store(true, Ordering::SeqCst);
    }
}

/// The state of the maintenance task. Dropped while the keeper exists, it means that the runtime is being shut down.
struct TaskState(Weak<Maintenance>);

impl Drop for TaskState {
    fn drop(&mut self) {
        if let Some(maintenance) = self.0.upgrade() {
            maintenance.set_runtime_gone();
            let new_holds = std::mem::take(&mut *maintenance.new_holds());
            for claim in new_holds {
                claim.runtime_shut_down();
            }
        }
    }
}

/// Returns how long the machine was suspended, from an arbitrary point on. A thread that is preempted between the readings
/// of the two clocks gets a value that is too low, and would report a suspension now and another in the next round.
/// The higher of two readings is wrong only if both were preempted.
fn time_suspended() -> Duration {
    clock::asleep().max(clock::asleep())
}

/// Runs for each keeper, from its first guard or wait on.
///
/// It gives every new hold a background task, in rounds: a lock that is released before the next round, as most are,
/// never costs a task. It sleeps between rounds, and waits to be notified after a round without new holds. It
/// notifies all claims after the machine was suspended, because timers are late by then, and gives up acquires that
/// are no longer polled.
async fn maintain(state: TaskState) {
    let mut suspended = time_suspended();
    let mut checked = Instant::now();
    let Some(added) = state.0.upgrade().map(|it| it.hold_added.clone()) else { return };
    loop {
        tokio::select! {
            () = added.notified() => {}
            () = tokio::time::sleep(CHECK_EVERY) => {}
        }
        loop {
            tokio::time::sleep(ROUND).await;
            let Some(maintenance) = state.0.upgrade() else { return };
            let before = std::mem::replace(&mut suspended, time_suspended());
            // Compared with the last round, not with the last suspension: slow drift between the clocks is none.
            if suspended.abs_diff(before) > MIN_SUSPENSION {
                observe::suspended(suspended.saturating_sub(before));
                maintenance.resumed.notify_waiters();
            }
            let pause = checked.elapsed();
            if pause >= CHECK_EVERY {
                checked = Instant::now();
                let check = if pause > CHECK_EVERY * 2 { Check::Late } else { Check::OnTime };
                maintenance.pending.give_up_unpolled(check);
            }
            if !maintenance.start_new_holds() {
                maintenance.in_rounds.store(false, Ordering::SeqCst);
                // A hold that was registered just before that has not notified this task.
                if !maintenance.start_new_holds() {
                    break;
                }
            }
        }
    }
}
