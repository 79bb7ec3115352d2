//! Renewals and extensions on stores that renew slowly, late or not at all.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::{Pair, millis, pair, poll_once, secs};
use lockkeeper_core::{
    Attempt, Backend, BoxFuture, Capabilities, Change, Claim, ClaimSpec, Error, ErrorKind, Fence,
    Grant, Inspector, Keeper, Memory, Release, Renewal, Result, State,
};
use lockkeeper_testkit::{Fault, Faulty, Op};
use tokio::time::{Instant, sleep, timeout};

type Renew = dyn for<'a> Fn(&'a mut dyn Claim, &ClaimSpec, Duration) -> BoxFuture<'a, Result<Renewal>>
    + Send
    + Sync;

/// A memory store with a custom `renew` and without notifications.
struct Renews {
    memory: Memory,
    leases: bool,
    renew: Arc<Renew>,
}

impl Renews {
    fn new(
        memory: Memory,
        renew: impl for<'a> Fn(
            &'a mut dyn Claim,
            &ClaimSpec,
            Duration,
        ) -> BoxFuture<'a, Result<Renewal>>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self { memory, leases: true, renew: Arc::new(renew) }
    }

    /// Returns a store without leases, whose holds last as long as a session.
    fn sessions() -> Self {
        let renew = Self::new(Memory::new(), |claim, spec, _| {
            let renewal = claim.renew(spec.ttl);
            Box::pin(async move {
                Ok(match renewal.await? {
                    lost @ Renewal::Lost(_) => lost,
                    _ => Renewal::Held,
                })
            })
        });
        Self { leases: false, ..renew }
    }
}

impl fmt::Debug for Renews {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Renews").field(&self.memory).finish()
    }
}

impl Backend for Renews {
    fn name(&self) -> &'static str {
        "renews"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { leases: self.leases, ..self.memory.capabilities() }
    }

    fn claim(&self, mut spec: ClaimSpec) -> Result<Box<dyn Claim>> {
        if !self.leases {
            spec.ttl = secs(1_000_000);
        }
        let claim = self.memory.claim(spec.clone())?;
        let (leases, renew) = (self.leases, self.renew.clone());
        Ok(Box::new(RenewsClaim { claim, spec, leases, renew }))
    }

    fn inspector(&self) -> Option<&dyn Inspector> {
        self.memory.inspector()
    }
}

struct RenewsClaim {
    claim: Box<dyn Claim>,
    spec: ClaimSpec,
    leases: bool,
    renew: Arc<Renew>,
}

impl Claim for RenewsClaim {
    fn attempt(&mut self, floor: Option<Fence>) -> BoxFuture<'_, Result<Attempt>> {
        let leases = self.leases;
        let attempt = self.claim.attempt(floor);
        Box::pin(async move {
            Ok(match attempt.await? {
                Attempt::Granted(grant) if !leases => {
                    Attempt::Granted(Grant { valid_for: None, ..grant })
                }
                other => other,
            })
        })
    }

    fn changed(&mut self) -> BoxFuture<'_, Change> {
        Box::pin(std::future::pending())
    }

    fn renew(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        (self.renew)(&mut *self.claim, &self.spec, ttl)
    }

    fn downgrade(&mut self, ttl: Duration) -> BoxFuture<'_, Result<Renewal>> {
        self.claim.downgrade(ttl)
    }

    fn set_fence(&mut self, fence: Fence) {
        self.claim.set_fence(fence);
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Release>> {
        self.claim.release()
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_renewal_after_a_shorter_extend_is_retried() {
    // The backoff is random, so one round could pass by chance.
    for round in 0..20 {
        let Pair { faulty, faults, .. } = pair();
        let guard = faulty.mutex("a").ttl(secs(3600)).lock().await.unwrap();
        guard.extend(secs(1)).await.unwrap();
        faults.once(Op::Renew, Fault::Refused);
        sleep(secs(10)).await;
        assert_eq!(guard.state(), State::Held, "round {round}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_shorter_extend_whose_response_is_lost_is_corrected_by_the_next_renewal() {
    for round in 0..20 {
        let Pair { faulty, faults, .. } = pair();
        let guard = faulty.mutex("a").ttl(secs(3600)).lock().await.unwrap();
        faults.once(Op::Renew, Fault::LostAnswer);
        guard.extend(secs(1)).await.unwrap_err();
        sleep(secs(10)).await;
        assert_eq!(guard.state(), State::Held, "round {round}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_extend_that_is_neither_polled_nor_dropped_does_not_stop_renewals() {
    let pair = pair();
    let keeper = pair.faulty.clone().ttl(secs(3));
    let guard = keeper.mutex("a").lock().await.unwrap();
    sleep(millis(500)).await;
    pair.faults.always(Op::Renew, Fault::SlowRequest(millis(100)));
    let mut extend = std::pin::pin!(guard.extend(secs(6)));
    assert!(poll_once(extend.as_mut()).await.is_pending());
    sleep(secs(60)).await;
    assert_eq!(guard.state(), State::Held);
    assert_eq!(guard.loss_reason(), None);
    extend.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_loss_is_reported_while_an_extend_is_neither_polled_nor_dropped() {
    let pair = pair();
    let keeper = pair.faulty.clone().ttl(secs(3));
    let guard = keeper.mutex("a").lock().await.unwrap();
    sleep(millis(500)).await;
    pair.faults.always(Op::Renew, Fault::SlowRequest(secs(1_000)));
    let mut extend = std::pin::pin!(guard.extend(secs(6)));
    assert!(poll_once(extend.as_mut()).await.is_pending());
    timeout(secs(3), guard.lost()).await.expect("the loss is reported in time");
    assert_eq!(guard.state(), State::Lost);
    assert_eq!(
        extend.await.unwrap_err().kind(),
        ErrorKind::Unavailable,
        "the timeout of the renewal precedes the loss"
    );
}

#[tokio::test(start_paused = true)]
async fn an_extend_completes_although_a_later_one_is_neither_polled_nor_dropped() {
    let pair = pair();
    let keeper = pair.faulty.clone().ttl(secs(30));
    let guard = Arc::new(keeper.mutex("a").lock().await.unwrap());
    sleep(millis(500)).await;
    pair.faults.always(Op::Renew, Fault::SlowRequest(millis(100)));
    let mut first = std::pin::pin!(guard.extend(secs(60)));
    assert!(poll_once(first.as_mut()).await.is_pending());
    let second = tokio::spawn({
        let guard = guard.clone();
        async move {
            let mut second = std::pin::pin!(guard.extend(secs(90)));
            assert!(poll_once(second.as_mut()).await.is_pending());
            sleep(secs(10)).await;
            second.await
        }
    });
    let start = Instant::now();
    timeout(secs(5), first).await.expect("the extend completes").unwrap();
    assert!(start.elapsed() < secs(1), "completed after {:?}", start.elapsed());
    second.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn renewals_that_take_a_fifth_of_the_ttl_keep_the_lock() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").ttl(secs(1)).lock().await.unwrap();
    faults.always(Op::Renew, Fault::SlowAnswer(millis(200)));
    sleep(secs(10)).await;
    assert!(guard.is_held(), "lost after {} renewals", faults.asked(Op::Renew));
}

#[tokio::test(start_paused = true)]
async fn every_accepted_ttl_is_long_enough_to_renew() {
    for ttl in 1..10 {
        let mutex = Keeper::new(Memory::new()).mutex("a").ttl(millis(ttl));
        assert_eq!(mutex.lock().await.unwrap_err().kind(), ErrorKind::InvalidOption, "{ttl} ms");
    }
    for ttl in 10..30 {
        let keeper = Keeper::new(Memory::new());
        let guard = keeper.mutex("a").ttl(millis(ttl)).lock().await.unwrap();
        sleep(secs(1)).await;
        assert!(guard.is_held(), "{ttl} ms, on a store without latency");
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_survives_failed_renewals_with_and_without_max_hold() {
    for max_hold in [None, Some(secs(3600))] {
        let (store, faults) = Faulty::new(Renews::sessions());
        let mut mutex = Keeper::new(store).mutex("a");
        if let Some(max_hold) = max_hold {
            mutex = mutex.max_hold(max_hold);
        }
        let guard = mutex.lock().await.unwrap();
        faults.always(Op::Renew, Fault::Refused);
        sleep(secs(60)).await;
        assert_eq!(guard.state(), State::AtRisk, "max_hold {max_hold:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn unsupported_renewals_are_not_retried_in_a_loop() {
    let renewals = Arc::new(AtomicUsize::new(0));
    let store = Renews::new(Memory::new(), {
        let renewals = renewals.clone();
        move |_, _, _| {
            let renewals = renewals.fetch_add(1, Ordering::SeqCst);
            // Paused time does not advance in a busy loop.
            assert!(renewals < 1000, "renewed in a loop");
            Box::pin(async { Err(Error::new(ErrorKind::Unsupported, "on purpose")) })
        }
    });
    let guard = Keeper::new(store).mutex("a").ttl(secs(1)).lock().await.unwrap();
    timeout(millis(1001), guard.lost()).await.expect("the loss at the end of the lease");
    let renewals = renewals.load(Ordering::SeqCst);
    assert!(renewals < 100, "{renewals} renewals in a second");
}

#[tokio::test(start_paused = true)]
async fn a_late_shorter_renewal_does_not_lead_to_two_holders() {
    let memory = Memory::new();
    let late = Arc::new(AtomicBool::new(false));
    let store = Renews::new(memory.clone(), {
        let (memory, late) = (memory.clone(), late.clone());
        move |claim, spec, ttl| {
            if !late.swap(false, Ordering::SeqCst) {
                return claim.renew(ttl);
            }
            let mut claim = memory.claim(spec.clone()).unwrap();
            tokio::spawn(async move {
                sleep(secs(3)).await;
                let _ = claim.renew(ttl).await;
            });
            Box::pin(std::future::pending())
        }
    });
    let guard = Keeper::new(store).mutex("a").lock().await.unwrap();
    late.store(true, Ordering::SeqCst);
    guard.extend(secs(1)).await.unwrap_err();
    let other = Keeper::new(memory).mutex("a");
    for _ in 0..100 {
        let both = other.try_lock().await.unwrap();
        assert!(
            both.is_none() || !guard.is_held(),
            "two holders: the first is valid for {:?} more",
            guard.remaining()
        );
        sleep(millis(100)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn adopt_rejects_an_invalid_max_hold() {
    let keeper = Keeper::new(Memory::new());
    let ticket = keeper.mutex("a").lock().await.unwrap().detach().unwrap();
    let error = keeper.clone().max_hold(Duration::ZERO).adopt(ticket).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
}

#[tokio::test(start_paused = true)]
async fn after_a_store_panic_the_loss_names_it_and_the_hold_expires_with_its_lease() {
    let memory = Memory::new();
    let keeper = Keeper::new(Renews::new(memory.clone(), |_, _, _| panic!("on purpose")));
    let guard = keeper.mutex("a").ttl(secs(600)).lock().await.unwrap();
    let error = guard.extend(secs(1200)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(error.to_string().contains("the store panicked"), "{error}");
    assert_eq!(guard.state(), State::Lost);
    timeout(secs(100), keeper.close()).await.expect("the keeper closes");
    sleep(secs(600)).await;
    assert!(Keeper::new(memory).mutex("a").try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn extend_changes_the_lease_and_later_renewals_keep_it() {
    let Pair { faulty, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    guard.extend(secs(300)).await.unwrap();
    assert!(guard.remaining().unwrap() > secs(290));
    sleep(secs(1000)).await;
    assert!(guard.remaining().unwrap() > secs(190));
    guard.extend(secs(3)).await.unwrap();
    assert!(guard.remaining().unwrap() < secs(3));
    sleep(secs(100)).await;
    assert!(guard.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_failed_extend_keeps_the_hold() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    for (fault, ttl) in [(Fault::Refused, 300), (Fault::LostAnswer, 300), (Fault::Hangs, 60)] {
        faults.once(Op::Renew, fault);
        let error = guard.extend(secs(ttl)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(guard.is_held());
    }
    sleep(secs(100)).await;
    assert_eq!(guard.state(), State::Held);
    for bad in [Duration::ZERO, millis(2), Duration::MAX] {
        assert_eq!(guard.extend(bad).await.unwrap_err().kind(), ErrorKind::InvalidOption);
    }
    assert_eq!(guard.state(), State::Held);
}

#[tokio::test(start_paused = true)]
async fn a_shorter_lease_applies_even_if_its_response_is_lost() {
    let Pair { faulty, faults, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    // The store shortens the lease to 3 s and its response is lost, so the client can rely on 3 s only.
    faults.always(Op::Renew, Fault::LostAnswer);
    guard.extend(secs(3)).await.unwrap_err();
    assert!(guard.remaining().unwrap() < secs(3));
}

#[tokio::test(start_paused = true)]
async fn extend_of_a_lost_lock_is_an_error() {
    let Pair { faulty, healthy, .. } = pair();
    let guard = faulty.mutex("a").lock().await.unwrap();
    healthy.inspect().unwrap().break_lock("a").await.unwrap();
    let error = guard.extend(secs(60)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert_eq!(guard.state(), State::Lost);
}

#[tokio::test(start_paused = true)]
async fn an_extend_beyond_max_hold_is_rejected() {
    let Pair { faulty, .. } = pair();
    let guard = faulty.mutex("a").max_hold(secs(60)).lock().await.unwrap();
    assert_eq!(guard.extend(secs(61)).await.unwrap_err().kind(), ErrorKind::InvalidOption);
    guard.extend(secs(50)).await.unwrap();
}
