//! Inspection, watches and tickets.

use std::time::Duration;

use lockkeeper_core::{ErrorKind, EventKind, Kind, Mode, Participant};
use lockkeeper_testkit::wait::{eventually, soon};

use crate::common::{got, lock, nothing_left, open, read, secs, server, waiter, write};

#[tokio::test]
async fn inspection_shows_label_fence_age_and_lease_of_a_holder() {
    let (server, keeper) = server().await;
    let label = "billing: the 🔒 of  host 7";
    let guard = keeper.mutex("a").label(label).ttl(secs(100)).lock().await.unwrap();
    let inspect = open(&server.url()).await.inspect().unwrap();
    let look = async || {
        let mut infos = inspect.show("a").await.unwrap();
        assert_eq!(infos.len(), 1);
        infos.remove(0)
    };
    let info = look().await;
    assert_eq!((info.name.as_str(), info.kind), ("a", Kind::Lock));
    assert!(info.waiters.is_empty());
    let [holder] = info.holders.as_slice() else { panic!("{info:?}") };
    assert_eq!(holder.who(), label);
    assert_eq!(holder.owner, Some(guard.owner()));
    // A lock that was taken without a script has its fence in the store from its first renewal on.
    assert_eq!((holder.fence, holder.mode), (None, Mode::Exclusive));
    let left = holder.remaining.unwrap();
    assert!(left > secs(60) && left <= secs(100), "{left:?}");
    assert!(holder.age.unwrap() < secs(60));
    // The age grows, and a renewal does not reset it.
    guard.extend(secs(100)).await.unwrap();
    assert_eq!(look().await.holders[0].fence, guard.fence());
    eventually("it gets older", async || {
        look().await.holders[0].age.unwrap() >= Duration::from_millis(20)
    })
    .await;
    guard.release().await.unwrap();
    assert!(inspect.show("a").await.unwrap().is_empty());
    assert!(inspect.list("").await.unwrap().is_empty());
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn any_label_without_control_characters_is_shown_unchanged() {
    let (server, keeper) = server().await;
    let error = keeper.mutex("a").label("two\nlines").lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    for label in ["", " ", "x 1 1 30000 0 0 1 - 1 x"] {
        let guard = keeper.mutex("a").label(label).lock().await.unwrap();
        let info = keeper.inspect().unwrap().show("a").await.unwrap();
        assert_eq!(info[0].holders[0].who(), label);
        guard.release().await.unwrap();
    }
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn inspection_shows_waiters_in_queue_order() {
    let (server, keeper) = server().await;
    let other = open(&server.url()).await;
    let guard = lock(&keeper, "a").await;
    let mut waiters = Vec::new();
    for place in 1..=12 {
        let keeper = if place % 2 == 0 { &keeper } else { &other };
        let keeper = keeper.clone().label(format!("number {place}"));
        let acquire = if place % 3 == 0 { read(&keeper, "a") } else { write(&keeper, "a") };
        waiters.push(waiter(&keeper, "a", place, acquire).await);
    }
    let infos = keeper.inspect().unwrap().list("a").await.unwrap();
    let labels: Vec<&str> = infos[0].waiters.iter().map(Participant::who).collect();
    let expected: Vec<String> = (1..=12).map(|place| format!("number {place}")).collect();
    assert_eq!(labels, expected);
    for (waiter, place) in infos[0].waiters.iter().zip(1..) {
        let mode = if place % 3 == 0 { Mode::Shared } else { Mode::Exclusive };
        assert_eq!((waiter.mode, waiter.fence), (mode, None));
        assert!(waiter.age.is_some() && waiter.remaining.unwrap() <= secs(30));
    }
    guard.release().await.unwrap();
    for waiter in waiters {
        got(waiter).await.release().await.unwrap();
    }
    nothing_left(&other, &server).await;
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn inspection_shows_all_readers_and_permits() {
    let (server, keeper) = server().await;
    let first = keeper.rw_lock("a").label("one").read().await.unwrap();
    let second = keeper.rw_lock("a").label("two").read().await.unwrap();
    let semaphore = keeper.semaphore("a", 5);
    let permits = [semaphore.acquire_many(3).await.unwrap(), semaphore.acquire().await.unwrap()];
    let infos = keeper.inspect().unwrap().show("a").await.unwrap();
    let [lock, permit_info] = infos.as_slice() else { panic!("{infos:?}") };
    assert_eq!((lock.kind, permit_info.kind), (Kind::Lock, Kind::Semaphore));
    let mut readers: Vec<_> =
        lock.holders.iter().map(|reader| (reader.who().to_owned(), reader.mode)).collect();
    readers.sort_by(|a, b| a.0.cmp(&b.0));
    let expected = [("one".to_owned(), Mode::Shared), ("two".to_owned(), Mode::Shared)];
    assert_eq!(readers, expected);
    let mut modes: Vec<Mode> = permit_info.holders.iter().map(|holder| holder.mode).collect();
    modes.sort_by_key(|mode| matches!(mode, Mode::Permits { take: 3, .. }));
    assert_eq!(modes, [Mode::Permits { take: 1, of: 5 }, Mode::Permits { take: 3, of: 5 }]);
    assert!(lock.holders.iter().chain(&permit_info.holders).all(|holder| holder.fence.is_some()));
    assert_eq!(semaphore.available().await.unwrap(), 1);
    for guard in permits.into_iter().chain([first, second]) {
        guard.release().await.unwrap();
    }
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_list_treats_no_character_of_a_prefix_as_a_wildcard() {
    let (server, keeper) = server().await;
    let names = [
        "a", "a*", "a*b", "ab", "a?", "a[b]", "a[b]c", "a\\", "a\\*", "a^", "[ab]", "a}", "a%",
        "%7D", "a-z", "{a",
    ];
    let mut guards = Vec::new();
    for name in names {
        guards.push(lock(&keeper, name).await);
    }
    server.command(&["SET", "lockkeeper:not ours", "1"]);
    server.command(&["SET", "lockkeeper:{a", "1"]);
    let inspect = keeper.inspect().unwrap();
    let prefixes =
        ["", "a", "a*", "a?", "a[", "a[b]", "a\\", "[ab]", "*", "?", "a}", "%", "{", "^", "zz"];
    for prefix in prefixes {
        let infos = inspect.list(prefix).await.unwrap();
        let listed: Vec<&str> = infos.iter().map(|info| info.name.as_str()).collect();
        let mut expected: Vec<&str> =
            names.into_iter().filter(|name| name.starts_with(prefix)).collect();
        expected.sort_unstable();
        assert_eq!(listed, expected, "{prefix:?}");
    }
    drop(guards);
    server.command(&["DEL", "lockkeeper:not ours", "lockkeeper:{a"]);
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_list_returns_more_locks_than_one_page_of_scan() {
    let (server, keeper) = server().await;
    let keeper = keeper.ttl(secs(600));
    let mut guards = Vec::new();
    for number in 0..1500 {
        guards.push(lock(&keeper, &format!("n/{number}")).await);
    }
    assert_eq!(keeper.inspect().unwrap().list("n/").await.unwrap().len(), 1500);
    drop(guards);
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_watch_reports_acquired_queued_and_freed() {
    let (server, keeper) = server().await;
    let other = open(&server.url()).await;
    let mut watch = other.inspect().unwrap().watch("w/").await.unwrap();
    let guard = lock(&keeper, "w/a").await;
    let event = soon("an event", watch.next()).await.unwrap();
    assert_eq!((event.name.as_str(), event.what), ("w/a", EventKind::Acquired));
    assert_eq!(event.who.owner, Some(guard.owner()));
    let waiting = waiter(&keeper, "w/a", 1, write(&other, "w/a")).await;
    assert_eq!(soon("an event", watch.next()).await.unwrap().what, EventKind::Queued);
    guard.release().await.unwrap();
    assert_eq!(soon("an event", watch.next()).await.unwrap().what, EventKind::Freed);
    let event = soon("an event", watch.next()).await.unwrap();
    let guard = got(waiting).await;
    assert_eq!((event.what, event.who.owner), (EventKind::Acquired, Some(guard.owner())));
    guard.release().await.unwrap();
    assert_eq!(soon("an event", watch.next()).await.unwrap().what, EventKind::Freed);
    nothing_left(&other, &server).await;
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_ticket_of_any_mode_transfers_a_hold_to_another_keeper() {
    let (server, keeper) = server().await;
    let other = open(&format!("{}?protocol=resp2", server.url())).await;
    let exclusive = keeper.mutex("a").label("transferred").lock().await.unwrap();
    let shared = keeper.rw_lock("b").read().await.unwrap();
    let permits = keeper.semaphore("c", 4).acquire_many(3).await.unwrap();
    for guard in [exclusive, shared, permits] {
        let (name, fence, owner) = (guard.name().to_owned(), guard.fence(), guard.owner());
        let adopted = other.adopt(guard.detach().unwrap()).await.unwrap();
        assert_eq!((adopted.fence(), adopted.owner()), (fence, owner));
        adopted.extend(secs(60)).await.unwrap();
        let infos = keeper.inspect().unwrap().show(name.as_str()).await.unwrap();
        assert_eq!(infos[0].holders[0].owner, Some(owner));
        if name == "a" {
            assert_eq!(infos[0].holders[0].who(), "transferred");
        }
        adopted.release().await.unwrap();
        assert!(keeper.inspect().unwrap().show(name.as_str()).await.unwrap().is_empty());
    }
    // A hold that was broken meanwhile is not adopted.
    let ticket = lock(&keeper, "a").await.detach().unwrap();
    assert_eq!(keeper.inspect().unwrap().break_lock("a").await.unwrap(), 1);
    assert_eq!(other.adopt(ticket).await.unwrap_err().kind(), ErrorKind::Lost);
    nothing_left(&other, &server).await;
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn the_age_of_a_waiter_does_not_restart_when_it_refreshes_its_place() {
    let (server, keeper) = server().await;
    let guard = lock(&keeper, "a").await;
    // It refreshes its place every 100 ms.
    let mutex = keeper.mutex("a").ttl(Duration::from_millis(300));
    let waiting = waiter(&keeper, "a", 1, async move { mutex.lock().await }).await;
    let inspect = keeper.inspect().unwrap();
    eventually("it has waited for longer than its ttl", async || {
        let infos = inspect.show("a").await.unwrap();
        let age = infos[0].waiters.first().and_then(|waiter| waiter.age);
        age.is_some_and(|age| age > Duration::from_millis(600))
    })
    .await;
    guard.release().await.unwrap();
    got(waiting).await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}
