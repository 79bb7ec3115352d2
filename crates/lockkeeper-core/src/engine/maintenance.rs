//! The maintenance task of a keeper.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use crate::clock;
use crate::engine::context::KeeperContext;
use crate::engine::observe;
use crate::loss::LossReason;

/// How often to look whether the machine has slept.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A shorter sleep is a thread that was held up between two clocks.
const FLICKER: Duration = Duration::from_millis(10);
/// How long the steward lets newcomers wait: not a millisecond, since a timer that close makes every wait
/// for the store dearer. Until then nobody listens whether the store tells of a
/// loss; the deadline counts all the same.
const ROUND: Duration = Duration::from_millis(10);

/// What the steward looks after.
pub(crate) struct Estate(pub(crate) Weak<KeeperContext>);

impl Drop for Estate {
    fn drop(&mut self) {
        // Dropped before the keeper: the runtime is being shut down.
        if let Some(context) = self.0.upgrade() {
            context.runtime_gone.store(true, Ordering::SeqCst);
            let newcomers = std::mem::take(&mut *context.newcomers());
            for driver in newcomers {
                driver.abandon(LossReason::RuntimeShutdown);
            }
        }
    }
}

/// One task for each keeper, from its first guard or wait on.
///
/// It gives every new guard a tender, in rounds: a lock that is given back before the next round, as
/// most are, never costs a task. Between rounds it sleeps for a moment, and when nobody
/// came it waits to be told. And it tells everybody when the machine has slept, because a timer is
/// then late by as long as it did, and looks for acquires that nobody polls any more.
pub(crate) async fn steward(estate: Estate) {
    let mut asleep = clock::asleep();
    let mut looked = Instant::now();
    let Some(came) = estate.0.upgrade().map(|context| context.came.clone()) else { return };
    loop {
        tokio::select! {
            () = came.notified() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        loop {
            tokio::time::sleep(ROUND).await;
            let Some(context) = estate.0.upgrade() else { return };
            let before = std::mem::replace(&mut asleep, clock::asleep());
            // Compared with the last round, not with the last sleep: slow drift between the clocks is no sleep.
            if asleep.abs_diff(before) > FLICKER {
                observe::slept(asleep.saturating_sub(before));
                context.woke.notify_waiters();
            }
            let pause = looked.elapsed();
            if pause >= LOOK_EVERY {
                looked = Instant::now();
                context.pending.give_up_the_forgotten(pause > LOOK_EVERY * 2);
            }
            if !context.take_in() {
                context.steward_is_up.store(false, Ordering::SeqCst);
                // Whoever came just before that has told nobody.
                if !context.take_in() {
                    break;
                }
            }
        }
    }
}
