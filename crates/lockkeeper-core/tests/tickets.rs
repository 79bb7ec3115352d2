//! Tickets: transfer, serialization, and tickets that were altered.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{WithoutPermits, secs};
use lockkeeper_core::{
    Backend, ErrorKind, Fence, Keeper, Memory, Mode, Owner, Quorum, ReleaseOutcome, Slots, State,
    Ticket,
};
use lockkeeper_testkit::{Faulty, Op};
use tokio::time::sleep;

async fn ticket(keeper: &Keeper) -> Ticket {
    keeper.mutex("a").lock().await.unwrap().detach().unwrap()
}

/// Alters a copy of a ticket. Returns the kind of the error of its adoption.
async fn altered(keeper: &Keeper, ticket: &Ticket, alter: impl FnOnce(&mut Ticket)) -> ErrorKind {
    let mut altered = ticket.clone();
    alter(&mut altered);
    let error = keeper.adopt(altered).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("adopt \"a\"") && text.contains("ticket"), "{text}");
    error.kind()
}

#[tokio::test(start_paused = true)]
async fn every_altered_field_is_detected_and_the_hold_is_unchanged() {
    let keeper = Keeper::new(Memory::new());
    let ticket = ticket(&keeper).await;
    let permits = |take, of| move |ticket: &mut Ticket| ticket.mode = Mode::Permits { take, of };
    for kind in [
        altered(&keeper, &ticket, |ticket| ticket.ttl = Duration::ZERO).await,
        altered(&keeper, &ticket, |ticket| ticket.ttl = Duration::from_millis(9)).await,
        altered(&keeper, &ticket, |ticket| ticket.ttl = Duration::MAX).await,
        altered(&keeper, &ticket, |ticket| ticket.fence = None).await,
        altered(&keeper, &ticket, permits(0, 3)).await,
        altered(&keeper, &ticket, permits(0, 0)).await,
        altered(&keeper, &ticket, permits(4, 3)).await,
        altered(&keeper, &ticket, permits(u32::MAX, 1)).await,
    ] {
        assert_eq!(kind, ErrorKind::InvalidOption);
    }
    for kind in [
        altered(&keeper, &ticket, |ticket| ticket.owner = Owner::random()).await,
        altered(&keeper, &ticket, |ticket| ticket.mode = Mode::Shared).await,
        altered(&keeper, &ticket, permits(1, 3)).await,
        altered(&keeper, &ticket, |ticket| ticket.fence = Fence::new(1 << 52)).await,
        altered(&keeper, &ticket, |ticket| ticket.fence = Some(Fence::MAX)).await,
    ] {
        assert_eq!(kind, ErrorKind::Lost);
    }
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none(), "the lock is still held");
    keeper.adopt(ticket).await.unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_ticket_is_released_without_a_renewal() {
    let (store, faults) = Faulty::new(Memory::new());
    let keeper = Keeper::new(store);
    let read = keeper.rw_lock("b").read().await.unwrap().detach().unwrap();
    let permits = keeper.semaphore("c", 3).acquire_many(2).await.unwrap().detach().unwrap();
    for ticket in [ticket(&keeper).await, read, permits] {
        let released = keeper.release_ticket(ticket.clone()).await.unwrap();
        assert_eq!(released, ReleaseOutcome::Released, "{ticket:?}");
        let again = keeper.release_ticket(ticket.clone()).await.unwrap();
        assert_eq!(again, ReleaseOutcome::AlreadyLost, "{ticket:?}");
    }
    assert_eq!((faults.asked(Op::Renew), faults.asked(Op::Release)), (0, 6));
    assert_eq!(keeper.inspect().unwrap().list("").await.unwrap().len(), 0);

    let ticket = ticket(&keeper).await;
    for alter in [
        (|ticket| ticket.ttl = Duration::MAX) as fn(&mut Ticket),
        |ticket| ticket.fence = None,
        |ticket| ticket.mode = Mode::Permits { take: 4, of: 3 },
    ] {
        let mut altered = ticket.clone();
        alter(&mut altered);
        let error = keeper.release_ticket(altered).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
        assert!(error.to_string().starts_with("memory: release \"a\": the ticket"), "{error}");
    }
    let mut of_another = ticket.clone();
    of_another.owner = Owner::random();
    let mut of_permits = ticket.clone();
    of_permits.mode = Mode::Permits { take: 1, of: 3 };
    for altered in [of_another, of_permits] {
        let released = keeper.release_ticket(altered).await.unwrap();
        assert_eq!(released, ReleaseOutcome::AlreadyLost);
    }
    assert!(keeper.mutex("a").try_lock().await.unwrap().is_none(), "the lock is still held");
    keeper.release_ticket(ticket).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_permits_of_a_ticket_are_checked_like_those_of_a_semaphore() {
    let keeper = Keeper::new(Memory::new());
    let ticket = keeper.semaphore("a", 3).acquire_many(2).await.unwrap().detach().unwrap();
    for (take, of) in [(0, 3), (4, 3), (1, 0)] {
        let alter = |ticket: &mut Ticket| ticket.mode = Mode::Permits { take, of };
        assert_eq!(altered(&keeper, &ticket, alter).await, ErrorKind::InvalidOption);
    }
    let alter = |ticket: &mut Ticket| ticket.mode = Mode::Permits { take: 1, of: 3 };
    assert_eq!(altered(&keeper, &ticket, alter).await, ErrorKind::Lost);
    let guard = keeper.adopt(ticket).await.unwrap();
    assert!(keeper.semaphore("a", 3).try_acquire_many(2).await.unwrap().is_none());
    guard.release().await.unwrap();
}

#[cfg(feature = "serde")]
#[tokio::test(start_paused = true)]
async fn a_ticket_with_an_impossible_field_is_not_parsed() {
    let keeper = Keeper::new(Memory::new());
    let ticket = serde_json::to_value(ticket(&keeper).await).unwrap();
    let long = "x".repeat(2000);
    let bad = [
        ("name", serde_json::json!("")),
        ("name", serde_json::json!("a\0b")),
        ("name", serde_json::json!(long)),
        ("owner", serde_json::json!("")),
        ("owner", serde_json::json!("zz000000000000000000000000000000")),
        ("label", serde_json::json!("a\nb")),
        ("label", serde_json::json!("\u{1b}[2J")),
        ("label", serde_json::json!(long)),
        ("mode", serde_json::json!("root")),
        ("mode", serde_json::json!({"permits": {"take": -1, "of": 1}})),
        ("mode", serde_json::json!({"permits": {"take": 4_294_967_296_u64, "of": 1}})),
        ("ttl", serde_json::json!({"secs": -1, "nanos": 0})),
        ("ttl", serde_json::json!({"secs": u64::MAX, "nanos": 4_000_000_000_u32})),
        ("fence", serde_json::json!(0)),
        ("fence", serde_json::json!(1_u64 << 63)),
        ("fence", serde_json::json!("7")),
    ];
    for (field, value) in bad {
        let mut altered = ticket.clone();
        altered[field] = value.clone();
        assert!(serde_json::from_value::<Ticket>(altered).is_err(), "{field}: {value}");
    }
    assert!(serde_json::from_value::<Ticket>(ticket).is_ok());
}

/// The fence of a ticket is not a floor: neither of its own name nor of another.
#[tokio::test(start_paused = true)]
async fn an_altered_fence_affects_no_other_lock_and_no_other_keeper() {
    // Stores that cannot compare the fence of a ticket with their own.
    let nodes = (0..3).map(|_| Arc::new(Memory::new()) as Arc<dyn Backend>);
    let quorum: Arc<dyn Backend> = Arc::new(Quorum::new(nodes).unwrap());
    let (adopter, witness) =
        (Keeper::from_backend(quorum.clone()), Keeper::from_backend(quorum.clone()));
    let mut ticket = ticket(&adopter).await;
    ticket.fence = Fence::new((1 << 53) - 2);
    adopter.adopt(ticket).await.unwrap().release().await.unwrap();
    for name in ["a", "b", "c"] {
        for keeper in [&adopter, &witness, &adopter] {
            let guard = keeper.mutex(name).lock().await.unwrap();
            assert!(guard.fence() < Fence::new(1000), "{:?} of {name:?}", guard.fence());
            guard.release().await.unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_hold_of_several_slots_is_adopted_although_each_has_its_own_fence() {
    let keeper = Keeper::new(Slots::new(Arc::new(WithoutPermits(Memory::new()))));
    let ticket = keeper.semaphore("a", 3).acquire_many(2).await.unwrap().detach().unwrap();
    keeper.mutex("a").lock().await.unwrap().release().await.unwrap();
    let guard = keeper.adopt(ticket).await.unwrap();
    sleep(secs(60)).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_ticket_transfers_a_hold_to_another_keeper() {
    let memory = Memory::new();
    let (one, two) = (Keeper::new(memory.clone()), Keeper::new(memory));
    let guard = one.mutex("a").label("first").lock().await.unwrap();
    let (fence, owner) = (guard.fence(), guard.owner());
    let ticket = guard.detach().unwrap();
    sleep(secs(20)).await;
    assert!(one.mutex("a").try_lock().await.unwrap().is_none(), "still held");
    let guard = two.adopt(ticket.clone()).await.unwrap();
    assert_eq!((guard.fence(), guard.owner(), guard.name()), (fence, owner, "a"));
    assert_eq!(guard.label().as_str(), "first");
    sleep(secs(100)).await;
    assert_eq!(guard.state(), State::Held, "renewed again");
    guard.release().await.unwrap();
    assert_eq!(two.adopt(ticket).await.unwrap_err().kind(), ErrorKind::Lost);

    let ticket = one.mutex("a").lock().await.unwrap().detach().unwrap();
    sleep(secs(31)).await;
    assert_eq!(two.adopt(ticket).await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(one.mutex("a").try_lock().await.unwrap().is_some());
}

#[cfg(feature = "serde")]
#[tokio::test(start_paused = true)]
async fn a_ticket_survives_serialization() {
    let keeper = Keeper::new(Memory::new());
    for ticket in [
        keeper.mutex("a\"{}🔒").lock().await.unwrap().detach().unwrap(),
        keeper.semaphore("s", 4).acquire_many(2).await.unwrap().detach().unwrap(),
    ] {
        let text = serde_json::to_string(&ticket).unwrap();
        let read = serde_json::from_str(&text).unwrap();
        assert_eq!(ticket, read);
        assert!(keeper.adopt(read).await.unwrap().is_held());
        for bad in
            [text.replace(ticket.name.as_str(), ""), text.replace("\"owner\":\"", "\"owner\":\"x")]
        {
            if bad != text {
                assert!(serde_json::from_str::<Ticket>(&bad).is_err(), "{bad}");
            }
        }
    }
}
