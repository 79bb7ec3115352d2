//! Stores with unusual answers.

use std::time::Duration;

use lockkeeper_core::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Fence, Grant, Holder,
    Inspector, Release, Renewal, Retry,
};
use lockkeeper_testkit::Op;

use crate::common::secs;
use crate::{Setup, TTL, is_granted, listen};

/// A store that always gives the same answers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scripted {
    pub(crate) fair: bool,
    pub(crate) attempt: Attempt,
    pub(crate) changed: Change,
}

impl Backend for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { fair: self.fair, push: true, ..Capabilities::default() }
    }

    fn claim(&self, _spec: ClaimSpec) -> lockkeeper_core::Result<Box<dyn Claim>> {
        Ok(Box::new(*self))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        None
    }
}

impl Claim for Scripted {
    fn attempt(
        &mut self,
        _floor: Option<Fence>,
    ) -> BoxFuture<'_, lockkeeper_core::Result<Attempt>> {
        Box::pin(std::future::ready(Ok(self.attempt)))
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(std::future::ready(self.changed))
    }

    fn renew(&mut self, _ttl: Duration) -> BoxFuture<'_, lockkeeper_core::Result<Renewal>> {
        Box::pin(std::future::ready(Ok(Renewal::Held)))
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, lockkeeper_core::Result<Renewal>> {
        self.renew(ttl)
    }

    fn set_fence(&mut self, _fence: Fence) {}

    fn release(&mut self) -> BoxFuture<'_, lockkeeper_core::Result<Release>> {
        Box::pin(std::future::ready(Ok(Release::Released)))
    }
}

const REFUSED: Attempt = Attempt::Contended { retry: Retry::OnNotify, holder: Holder::Unknown };

/// The engine limits the rate.
#[tokio::test(start_paused = true)]
async fn a_store_that_notifies_without_end_does_not_block_the_thread() {
    for (fair, follow_ups) in [(true, 0), (false, 16)] {
        let setup = Setup::new(Scripted { fair, attempt: REFUSED, changed: Change::LookAgain });
        let mut front = setup.waiter();
        assert!(!is_granted(&mut *front).await);
        assert_eq!(listen(&mut *front), Some(Change::LookAgain));
        assert_eq!(setup.faults.asked(Op::Attempt), 1 + follow_ups);
    }
}

/// The engine counts the lease of a hand-off from the last answer "contended". If the local queue gave that answer, the
/// grant may be older.
#[tokio::test(start_paused = true)]
async fn a_hand_off_that_may_be_older_than_the_last_answer_is_confirmed_by_an_attempt() {
    let grant =
        |seconds| Grant { fence: None, fence_is_past: false, valid_for: Some(secs(seconds)) };
    let store = Scripted { fair: false, attempt: REFUSED, changed: Change::Granted(grant(1)) };
    let setup = Setup::new(store);
    let mut front = setup.waiter();
    assert!(!is_granted(&mut *front).await);
    let mut look_ahead = setup.waiter();
    assert!(!is_granted(&mut *look_ahead).await);
    assert_eq!(setup.faults.asked(Op::Attempt), 1, "the local queue answered");
    listen(&mut *look_ahead);
    assert_eq!(setup.faults.asked(Op::Attempt), 2);
}

/// The engine knows the answer `OnNotify`, and the store will not notify in time.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_moves_up_and_gets_no_notification_reports_to_the_engine() {
    let soon = Retry::After(TTL / 4);
    let late = Retry::After(TTL / 3);
    let grant = Grant { fence: None, fence_is_past: false, valid_for: None };
    for (retry, reports) in
        [(Retry::Poll, true), (soon, true), (late, false), (Retry::OnNotify, false)]
    {
        let attempt = Attempt::Contended { retry, holder: Holder::Unknown };
        let changed = Change::Granted(grant);
        let setup = Setup::new(Scripted { fair: true, attempt, changed });
        let mut waiters = setup.refused(3).await;
        waiters[0].release().await.unwrap();
        let expected = if reports { Change::LookAgain } else { changed };
        assert_eq!(listen(&mut *waiters[2]), Some(expected), "{retry:?}");
    }
}
