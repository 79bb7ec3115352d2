//! The maintenance task of a keeper: starts background tasks for new holds, detects that the machine was suspended, and
//! abandons acquires that are no longer polled.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::background::Background;
use crate::clock;
use crate::engine::observe;
use crate::owner::Owner;

/// The interval of checks for a suspension and for acquires that are not polled.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// A shorter difference is not a suspension: the thread was preempted between the readings of two clocks.
const MIN_SUSPENSION: Duration = Duration::from_millis(10);
/// The interval of rounds, and so the longest time that a new hold waits for its background task. Until then no task
/// listens to the store, and only the deadline protects the hold. With a shorter interval, such as 1 ms, the pending timer
/// would make each wait for the store more expensive.
const ROUND_INTERVAL: Duration = Duration::from_millis(10);

/// A claim, as the maintenance task and [`Keeper::close`](crate::Keeper::close) use it. A trait, because this module cannot
/// import claims: they import the keeper's context, which imports this module.
pub(crate) trait Maintained: Send + Sync {
    /// Spawns the background task of a new hold, unless it has one or has ended.
    fn run_in_background(self: Arc<Self>);

    /// Ends a claim that no task can drive any more: the hold is lost, or the acquire fails.
    fn runtime_shut_down(&self);

    /// Returns what the acquire has done since the last call.
    fn take_poll_activity(&self) -> PollActivity;

    /// Returns how long an acquire may exist without being polled.
    fn ttl(&self) -> Duration;

    /// Wakes the acquire's task, even if there is no outcome yet.
    fn wake_acquirer(&self);

    /// Ends an acquire that was not polled for its TTL.
    fn abandon_unpolled(self: Arc<Self>);

    /// Makes a background task drive the acquire, which then fails because its keeper is closed. `close` waits for its
    /// cleanup.
    fn keeper_closed(self: Arc<Self>);

    /// Returns the owner, if the acquire is still waiting.
    fn waiting_owner(&self) -> Option<Owner>;
}

/// What an acquire did since the last check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PollActivity {
    /// It was not polled.
    None,
    /// It was polled.
    Polled,
    /// It has ended, or was dropped.
    Ended,
}

/// An acquire that waits.
struct Pending {
    claim: Weak<dyn Maintained>,
    /// The first check that found that it was not polled.
    unpolled_since: Option<Instant>,
    /// Whether it was woken because of that.
    woken: bool,
}

/// Whether a check ran when it was due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Check {
    OnTime,
    /// The process was stopped, or its threads were busy.
    Late,
}

/// The state that a keeper and its maintenance task share.
#[derive(Default)]
pub(crate) struct Maintenance {
    /// Whether the task was spawned.
    spawned: AtomicBool,
    /// Whether the task runs a round every [`ROUND_INTERVAL`]. If not, a new hold must notify it.
    in_rounds: AtomicBool,
    /// Holds whose guards were created since the last round.
    new_holds: Mutex<Vec<Arc<dyn Maintained>>>,
    hold_added: Arc<Notify>,
    /// Acquires that wait, in the order in which they began.
    pending: Mutex<Vec<Pending>>,
    /// Notified after the machine was suspended, because timers are late then.
    resumed: Notify,
    runtime_gone: AtomicBool,
}

impl Maintenance {
    fn new_holds(&self) -> MutexGuard<'_, Vec<Arc<dyn Maintained>>> {
        self.new_holds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pending(&self) -> MutexGuard<'_, Vec<Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a new hold. It gets a background task in the next round, unless it has ended by then. Returns false if the
    /// runtime has been shut down.
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
        // The maintenance task may have been dropped with its runtime before it found this hold.
        let gone = self.runtime_is_gone();
        if gone {
            // No further round empties the list, and its holds would keep the keeper alive.
            let missed = std::mem::take(&mut *self.new_holds());
            drop(missed);
        }
        !gone
    }

    /// Removes a hold that has ended, if it was registered last. This keeps the list short while one task locks and releases
    /// in a loop. Any other hold that has ended stays in the list until the next round.
    pub(crate) fn forget_hold<C>(&self, claim: &C) {
        let mut new_holds = self.new_holds();
        if new_holds.last().is_some_and(|last| std::ptr::addr_eq(Arc::as_ptr(last), claim)) {
            new_holds.pop();
        }
    }

    /// Starts the background tasks of new holds. Returns false if there are none.
    fn start_new_holds(&self) -> bool {
        let new_holds = std::mem::take(&mut *self.new_holds());
        let any = !new_holds.is_empty();
        for claim in new_holds {
            claim.run_in_background();
        }
        any
    }

    /// Registers an acquire that waits.
    pub(crate) fn register_pending(
        self: &Arc<Self>,
        claim: Weak<dyn Maintained>,
        background: Option<&Background>,
    ) {
        let mut pending = self.pending();
        if pending.len() == pending.capacity() {
            pending.retain(|pending| pending.claim.strong_count() > 0);
        }
        pending.push(Pending { claim, unpolled_since: None, woken: false });
        drop(pending);
        self.ensure_task(background);
    }

    /// Returns the owners of the acquires that wait, in the order in which they began.
    pub(crate) fn waiting_owners(&self) -> Vec<Owner> {
        let claims: Vec<_> = self.pending().iter().filter_map(|it| it.claim.upgrade()).collect();
        claims.into_iter().filter_map(|claim| claim.waiting_owner()).collect()
    }

    /// Ends the acquires that wait.
    pub(crate) fn close(&self) {
        let pending = std::mem::take(&mut *self.pending());
        for claim in pending.iter().filter_map(|pending| pending.claim.upgrade()) {
            claim.keeper_closed();
        }
    }

    /// Wakes acquires that were not polled for a TTL. Ends them at the next check if they are still not polled. A late check
    /// ends none: the tasks of the acquires had no more time to run than the maintenance task.
    ///
    /// An acquire can exist without being polled, for example as a pinned future while another branch of a `select!` loop
    /// runs. On a store with leases its queue entry, or the lock that was handed off to it, expires. On a store without
    /// leases it would block the other waiters for as long as it exists.
    fn abandon_unpolled(&self, check: Check) {
        let now = Instant::now();
        let (mut to_wake, mut unpolled) = (Vec::new(), Vec::new());
        self.pending().retain_mut(|pending| {
            let Some(claim) = pending.claim.upgrade() else { return false };
            match claim.take_poll_activity() {
                PollActivity::Ended => return false,
                PollActivity::Polled => (pending.unpolled_since, pending.woken) = (None, false),
                PollActivity::None if pending.woken && check == Check::OnTime => {
                    unpolled.push(claim);
                    return false;
                }
                PollActivity::None => {
                    let since = *pending.unpolled_since.get_or_insert(now);
                    // If a task awaits the acquire, the wake-up makes it poll.
                    pending.woken = now.duration_since(since) >= claim.ttl();
                    to_wake.extend(pending.woken.then_some(claim));
                }
            }
            true
        });
        // With the list unlocked: wakers run foreign code.
        for claim in to_wake {
            claim.wake_acquirer();
        }
        for claim in unpolled {
            claim.abandon_unpolled();
        }
    }

    fn ensure_task(self: &Arc<Self>, background: Option<&Background>) {
        if !self.has_task()
            && !self.spawned.swap(true, Ordering::Relaxed)
            && let Some(background) = background
        {
            background.spawn_untracked(maintain(TaskState(Arc::downgrade(self))));
        }
    }

    /// Returns whether the task was spawned.
    pub(crate) fn has_task(&self) -> bool {
        self.spawned.load(Ordering::Relaxed)
    }

    /// Waits until the machine resumes from a suspension.
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

/// The state of the maintenance task. If it is dropped while the keeper exists, the runtime has been shut down.
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

/// Returns how long the machine has been suspended, counted from an arbitrary point.
///
/// A reading is too low if the thread is preempted between its two clocks. A low value would be reported as a suspension
/// twice, in this round and in the next. So this returns the higher of two readings, which is wrong only if both were
/// preempted.
fn time_suspended() -> Duration {
    clock::asleep().max(clock::asleep())
}

/// The maintenance task. It is spawned for the keeper's first guard or first wait.
///
/// It starts the background tasks of new holds in rounds, so that a lock that is released before the next round needs no
/// task. After a round without new holds it waits until a hold is registered, or for [`CHECK_INTERVAL`]. After the machine
/// was suspended it wakes all claims, because their timers are late.
async fn maintain(state: TaskState) {
    let mut suspended = time_suspended();
    let mut checked = Instant::now();
    let Some(added) = state.0.upgrade().map(|it| it.hold_added.clone()) else { return };
    loop {
        tokio::select! {
            () = added.notified() => {}
            () = tokio::time::sleep(CHECK_INTERVAL) => {}
        }
        loop {
            tokio::time::sleep(ROUND_INTERVAL).await;
            let Some(maintenance) = state.0.upgrade() else { return };
            let before = std::mem::replace(&mut suspended, time_suspended());
            // Compared with the last round, so that slow drift between the clocks does not add up to a suspension.
            if suspended.abs_diff(before) > MIN_SUSPENSION {
                observe::suspended(suspended.saturating_sub(before));
                maintenance.resumed.notify_waiters();
            }
            let pause = checked.elapsed();
            if pause >= CHECK_INTERVAL {
                checked = Instant::now();
                let is_late = pause > CHECK_INTERVAL * 2;
                maintenance.abandon_unpolled(if is_late { Check::Late } else { Check::OnTime });
            }
            if !maintenance.start_new_holds() {
                maintenance.in_rounds.store(false, Ordering::SeqCst);
                // A hold that was registered just before that did not notify this task.
                if !maintenance.start_new_holds() {
                    break;
                }
            }
        }
    }
}
