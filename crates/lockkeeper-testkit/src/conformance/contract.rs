//! The contract itself, tested on bare claims.

use std::task::Poll;
use std::time::{Duration, Instant};

use lockkeeper_core::{Attempt, Claim, Fence, Fences, Grant, Release, Renewal};

use super::{Subject, eventually, soon};

const TTL: Duration = Duration::from_secs(600);

async fn granted(claim: &mut dyn Claim, floor: Option<Fence>) -> Grant {
    match soon("attempt", claim.attempt(floor)).await.expect("the store answers") {
        Attempt::Granted(grant) => grant,
        Attempt::Contended { .. } => panic!("contended, though no claim holds the lock"),
        Attempt::Undecided => panic!("undecided, though no other claim competes"),
    }
}

async fn contended(claim: &mut dyn Claim) -> bool {
    let answer = soon("attempt", claim.attempt(None)).await.expect("the store answers");
    matches!(answer, Attempt::Contended { .. })
}

async fn released(claim: &mut dyn Claim) -> Release {
    soon("release", claim.release()).await.expect("the store answers")
}

async fn renewed(claim: &mut dyn Claim) -> Renewal {
    soon("renew", claim.renew(TTL)).await.expect("the store answers")
}

fn is_lost(renewal: Renewal) -> bool {
    matches!(renewal, Renewal::Lost(_))
}

/// A holder that repeats its attempt after a lost response gets the same grant.
pub async fn a_repeated_attempt_of_the_holder_is_granted_again(subject: Subject) {
    let mut claim = subject.claim("a", |_| ());
    let first = granted(&mut *claim, None).await;
    let again = granted(&mut *claim, None).await;
    assert_eq!(first.fence, again.fence);
    assert!(first.valid_for.is_some() || !subject.capabilities().leases);
    assert_eq!(first.valid_for.is_some(), again.valid_for.is_some());
    assert!(first.valid_for <= Some(TTL), "the lease is longer than requested");
    assert!(contended(&mut *subject.claim("a", |_| ())).await);
    assert_eq!(released(&mut *claim).await, Release::Released);
    drop(claim);
    subject.assert_nothing_left(&[]).await;
}

/// A failed attempt that did not queue leaves nothing in the store.
pub async fn an_unqueued_attempt_leaves_no_trace(subject: Subject) {
    let mut holder = subject.claim("a", |_| ());
    granted(&mut *holder, None).await;
    let before =
        subject.remaining_locks().await.map(|left| (left[0].holders.len(), left[0].waiters.len()));
    let mut other = subject.claim("a", |spec| spec.queue = false);
    assert!(contended(&mut *other).await);
    let after =
        subject.remaining_locks().await.map(|left| (left[0].holders.len(), left[0].waiters.len()));
    assert_eq!(before, after);
    assert_eq!(released(&mut *holder).await, Release::Released);
    // The claim does not block others, even before it is dropped.
    let mut third = subject.claim("a", |_| ());
    granted(&mut *third, None).await;
    released(&mut *third).await;
    subject.assert_nothing_left(&[]).await;
}

/// A release is idempotent, works from any state and never affects another owner's hold.
pub async fn a_release_frees_only_its_own_hold_and_works_in_any_state(subject: Subject) {
    let mut fresh = subject.claim("a", |_| ());
    assert_eq!(released(&mut *fresh).await, Release::WasNotHeld);
    let mut holder = subject.claim("a", |_| ());
    granted(&mut *holder, None).await;
    assert_eq!(released(&mut *fresh).await, Release::WasNotHeld);
    let mut waiter = subject.claim("a", |spec| spec.queue = true);
    assert!(contended(&mut *waiter).await);
    assert_eq!(released(&mut *waiter).await, Release::WasNotHeld);
    assert!(!is_lost(renewed(&mut *holder).await), "another claim's release ended the hold");
    assert_eq!(released(&mut *holder).await, Release::Released);
    assert_eq!(released(&mut *holder).await, Release::WasNotHeld);
    drop((fresh, holder, waiter));
    subject.assert_nothing_left(&[]).await;
}

/// A renewal reports a loss, and never restores the hold.
pub async fn a_renewal_never_creates_a_hold(subject: Subject) {
    let mut claim = subject.claim("a", |_| ());
    assert!(is_lost(renewed(&mut *claim).await), "before the first attempt");
    let grant = granted(&mut *claim, None).await;
    match renewed(&mut *claim).await {
        Renewal::Renewed { valid_for } => {
            assert!(grant.valid_for.is_some(), "a session has no lease to renew");
            assert!(valid_for <= TTL, "the lease is longer than requested");
        }
        Renewal::Held => assert_eq!(grant.valid_for, None, "`Held` for a grant with a lease"),
        Renewal::Lost(reason) => panic!("lost, though held: {reason}"),
    }
    released(&mut *claim).await;
    assert!(is_lost(renewed(&mut *claim).await), "after the release");
    let mut other = subject.claim("a", |_| ());
    granted(&mut *other, None).await;
    released(&mut *other).await;
    drop((claim, other));
    subject.assert_nothing_left(&[]).await;
}

/// The engine may drop any future: the claim stays usable, as after a lost response.
pub async fn a_cancelled_call_leaves_the_claim_usable(subject: Subject) {
    for polls in 0..3 {
        let mut claim = subject.claim("a", |spec| spec.queue = true);
        dropped(claim.attempt(None), polls).await;
        granted(&mut *claim, None).await;
        dropped(claim.changed(), polls).await;
        dropped(claim.renew(TTL), polls).await;
        assert!(!is_lost(renewed(&mut *claim).await));
        dropped(claim.release(), polls).await;
        released(&mut *claim).await;
        assert!(is_lost(renewed(&mut *claim).await));
    }
    subject.assert_nothing_left(&[]).await;
}

/// Polls a future a few times, without waiting for wake-ups, and drops it.
async fn dropped<T>(mut future: lockkeeper_core::BoxFuture<'_, T>, polls: usize) {
    for _ in 0..polls {
        let ready = std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready()));
        if ready.await {
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// Exclusive grants have rising fences; stores that declare it honour a floor, unless it is implausible; a store
/// without fences returns none.
pub async fn fences_rise_and_honour_their_floor_where_declared(subject: Subject) {
    let fences = subject.capabilities().fences;
    let mut last = None;
    for _ in 0..5 {
        let mut claim = subject.claim("a", |_| ());
        let fence = granted(&mut *claim, None).await.fence;
        if fences == Fences::None {
            assert_eq!(fence, None, "a fence that was not declared");
        } else {
            assert!(fence > last, "{fence:?} after {last:?}");
            last = fence;
        }
        released(&mut *claim).await;
    }
    if let (Fences::Raisable, Some(last)) = (fences, last) {
        let mut claim = subject.claim("a", |_| ());
        let floor = Fence::new(last.get() + 1_000_000).expect("far below the highest");
        let fence = granted(&mut *claim, Some(floor)).await.fence;
        assert!(fence >= Some(floor), "{fence:?} is below the floor, {floor}");
        let higher = Fence::new(floor.get() + 1_000_000).expect("far below the highest");
        let raised = granted(&mut *claim, Some(higher)).await.fence;
        assert!(raised >= Some(higher), "a holder's fence was not raised");
        released(&mut *claim).await;
        let mut next = subject.claim("a", |_| ());
        assert!(granted(&mut *next, None).await.fence > raised, "the raised fence was forgotten");
        released(&mut *next).await;

        // An implausible floor is refused, also from a holder, and has no later effect.
        let mut holder = subject.claim("b", |_| ());
        for _ in 0..2 {
            let answer = soon("attempt", holder.attempt(Some(Fence::MAX))).await;
            assert!(answer.is_err(), "the maximum floor was honoured: {answer:?}");
            released(&mut *holder).await;
            let fence = granted(&mut *holder, None).await.fence;
            assert!(fence.is_some_and(|fence| fence.get() < 1 << 62), "{fence:?}");
        }
        released(&mut *holder).await;
    }
    subject.assert_nothing_left(&[]).await;
}

/// Repeats the attempt until the lock is granted.
async fn granted_soon(claim: &mut dyn Claim) {
    eventually("a grant", async || !contended(claim).await).await;
}

/// After a repeated attempt, a holder has the whole TTL left.
pub async fn a_repeated_attempt_has_a_full_lease(subject: Subject) {
    let ttl = subject.ttl;
    let mut claim = subject.claim("a", |spec| spec.ttl = ttl);
    let start = Instant::now();
    granted(&mut *claim, None).await;
    tokio::time::sleep(ttl / 2).await;
    let again = Instant::now();
    granted(&mut *claim, None).await;
    let mut other = subject.claim("a", |_| ());
    while start.elapsed() < ttl * 6 / 5 {
        let contended = contended(&mut *other).await;
        // On a busy machine, only attempts sent well within the lease are conclusive.
        assert!(contended || again.elapsed() > ttl * 9 / 10, "ended after {:?}", again.elapsed());
        if !contended {
            break;
        }
        tokio::time::sleep(ttl / 20).await;
    }
    released(&mut *claim).await;
    released(&mut *other).await;
    subject.assert_nothing_left(&[]).await;
}

/// A waiter that repeats its attempt keeps its position in the queue.
pub async fn a_refreshed_waiter_keeps_its_position(subject: Subject) {
    let mut holder = subject.claim("a", |_| ());
    granted(&mut *holder, None).await;
    let mut first = subject.claim("a", |spec| spec.queue = true);
    let mut second = subject.claim("a", |spec| spec.queue = true);
    assert!(contended(&mut *first).await);
    assert!(contended(&mut *second).await);
    assert!(contended(&mut *first).await);
    released(&mut *holder).await;
    if subject.capabilities().fair {
        assert!(contended(&mut *second).await, "the second waiter overtook the first");
    }
    granted_soon(&mut *first).await;
    released(&mut *first).await;
    granted_soon(&mut *second).await;
    released(&mut *second).await;
    drop((holder, first, second));
    subject.assert_nothing_left(&[]).await;
}

/// A waiter that leaves before it learns of its grant passes the lock on to the next.
pub async fn a_waiter_that_leaves_passes_its_grant_on(subject: Subject) {
    let mut holder = subject.claim("a", |_| ());
    granted(&mut *holder, None).await;
    let mut waiter = subject.claim("a", |spec| spec.queue = true);
    assert!(contended(&mut *waiter).await);
    released(&mut *holder).await;
    released(&mut *waiter).await;
    let mut next = subject.claim("a", |_| ());
    granted(&mut *next, None).await;
    released(&mut *next).await;
    drop((holder, waiter, next));
    subject.assert_nothing_left(&[]).await;
}

/// The TTL of a renewal applies, independent of the claim's own TTL.
pub async fn a_renewal_lasts_for_its_ttl(subject: Subject) {
    let (short, leases) = (subject.ttl, subject.capabilities().leases);
    let expires = subject.expires_without_renewal().await;
    let renew = async |claim: &mut dyn Claim, ttl| {
        let renewal = soon("renew", claim.renew(ttl)).await.expect("the store answers");
        match renewal {
            Renewal::Renewed { valid_for } => assert!(expires && valid_for <= ttl),
            Renewal::Held => assert!(!expires),
            Renewal::Lost(reason) => panic!("lost, though held: {reason}"),
        }
    };
    // A longer TTL: the hold outlives the first lease.
    let mut claim = subject.claim("a", |spec| spec.ttl = short);
    granted(&mut *claim, None).await;
    renew(&mut *claim, TTL).await;
    tokio::time::sleep(short * 3 / 2).await;
    let mut other = subject.claim("a", |_| ());
    assert!(contended(&mut *other).await, "the renewed lease ended with the first TTL");
    // A shorter TTL: the hold ends soon, but not immediately.
    let start = Instant::now();
    renew(&mut *claim, short).await;
    if leases {
        granted_soon(&mut *other).await;
        assert!(start.elapsed() >= short * 9 / 10, "ended after {:?}", start.elapsed());
        released(&mut *other).await;
    }
    released(&mut *claim).await;
    drop((claim, other));
    subject.assert_nothing_left(&[]).await;
}

/// An expired hold is neither renewed nor released. If the store has no expiry, the hold
/// persists.
pub async fn an_expired_lease_is_neither_renewed_nor_released(subject: Subject) {
    let (ttl, ended) = (subject.ttl, subject.expires_without_renewal().await);
    let mut renewing = subject.claim("a", |spec| spec.ttl = ttl);
    let mut releasing = subject.claim("b", |spec| spec.ttl = ttl);
    granted(&mut *renewing, None).await;
    granted(&mut *releasing, None).await;
    tokio::time::sleep(ttl * 3 / 2).await;
    assert_eq!(is_lost(renewed(&mut *renewing).await), ended);
    assert_eq!(released(&mut *releasing).await == Release::WasNotHeld, ended);
    released(&mut *renewing).await;
    drop((renewing, releasing));
    subject.assert_nothing_left(&[]).await;
}
