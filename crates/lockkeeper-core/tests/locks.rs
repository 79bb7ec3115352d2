//! The guarantees of the locks, on the memory store in paused time.
#![allow(clippy::unwrap_used, reason = "a test panics when something is wrong")]

mod common;

use std::time::Duration;

use common::{pair, secs, spawn_lock};
use lockkeeper_core::{
    Error, ErrorKind, EventKind, Guard, Keeper, Kind, Memory, Mode, Owner, Participant,
    ReleaseOutcome,
};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

fn keeper() -> Keeper {
    Keeper::new(Memory::new())
}

#[tokio::test(start_paused = true)]
async fn guards_of_one_mutex_have_different_owners_and_exclude_each_other() {
    let mutex = keeper().mutex("a");
    let guard = mutex.lock().await.unwrap();
    assert!(mutex.try_lock().await.unwrap().is_none());
    assert!(mutex.clone().try_lock().await.unwrap().is_none());
    let stale = guard.owner();
    drop(guard);
    let next = mutex.lock().await.unwrap();
    assert_ne!(next.owner(), stale);
}

#[tokio::test(start_paused = true)]
async fn a_keeper_lists_the_owners_of_its_own_waiters() {
    let pair = pair();
    let (keeper, other) = (&pair.healthy, &pair.faulty);
    let first = keeper.mutex("a").lock().await.unwrap();
    assert_eq!(keeper.waiting(), [], "a guard does not wait");
    let start = |keeper: &Keeper| {
        let mutex = keeper.mutex("a").label("same");
        tokio::spawn(async move { mutex.lock().await })
    };
    let ahead = start(other);
    pair.until_queued("a", 1).await;
    let ours = start(keeper);
    pair.until_queued("a", 2).await;
    let cancelled = start(keeper);
    pair.until_queued("a", 3).await;

    let waiters = keeper.inspect().unwrap().show("a").await.unwrap().remove(0).waiters;
    let owners: Vec<Owner> = waiters.iter().map(|waiter| waiter.owner.unwrap()).collect();
    assert_eq!(keeper.waiting(), owners[1..], "in arrival order");
    assert_eq!(other.waiting(), owners[..1]);

    cancelled.abort();
    pair.until_queued("a", 2).await;
    assert_eq!(keeper.waiting(), [owners[1]], "a cancelled acquire does not wait");
    drop(first);
    drop(ahead.await.unwrap().unwrap());
    let guard = ours.await.unwrap().unwrap();
    assert_eq!(guard.owner(), owners[1]);
    assert_eq!((keeper.waiting(), other.waiting()), (vec![], vec![]), "a guard does not wait");
}

#[tokio::test(start_paused = true)]
async fn a_stale_guard_does_not_release_the_lock_of_the_next_holder() {
    let pair = pair();
    let stale = pair.faulty.mutex("a").lock().await.unwrap();
    pair.healthy.inspect().unwrap().break_lock("a").await.unwrap();
    let next = pair.healthy.mutex("a").lock().await.unwrap();
    assert_eq!(stale.release().await.unwrap(), ReleaseOutcome::AlreadyLost);
    pair.faulty.close().await;
    sleep(secs(100)).await;
    assert!(next.is_held());
}

#[tokio::test(start_paused = true)]
async fn waiters_are_granted_the_lock_in_arrival_order() {
    let pair = pair();
    let mutex = pair.healthy.mutex("a");
    let guard = mutex.lock().await.unwrap();
    let (entered, mut order) = mpsc::unbounded_channel();
    for i in 0..20 {
        let (mutex, entered) = (mutex.clone(), entered.clone());
        tokio::spawn(async move {
            let guard = mutex.lock().await.unwrap();
            entered.send((i, guard.fence().unwrap())).unwrap();
        });
        pair.until_queued("a", i + 1).await;
    }
    assert!(mutex.try_lock().await.unwrap().is_none());
    drop(guard);
    let mut last = None;
    for i in 0..20 {
        let (number, fence) = order.recv().await.unwrap();
        assert_eq!(number, i);
        assert!(Some(fence) > last);
        last = Some(fence);
    }
}

#[tokio::test(start_paused = true)]
async fn a_try_does_not_overtake_a_waiter() {
    let pair = pair();
    let lock = pair.healthy.rw_lock("a");
    let reader = lock.read().await.unwrap();
    let writer = tokio::spawn({
        let lock = lock.clone();
        async move { lock.write().await.unwrap() }
    });
    pair.until_queued("a", 1).await;
    assert!(lock.try_read().await.unwrap().is_none(), "a reader overtook a waiting writer");
    drop(reader);
    assert_eq!(writer.await.unwrap().mode(), Mode::Exclusive);
}

#[tokio::test(start_paused = true)]
async fn adjacent_readers_are_granted_together_and_no_waiter_starves() {
    let pair = pair();
    let lock = pair.healthy.rw_lock("a");
    let first = lock.write().await.unwrap();
    let (entered, mut order) = mpsc::unbounded_channel();
    for (i, mode) in ["read", "read", "write", "read", "read", "write"].into_iter().enumerate() {
        let (lock, entered) = (lock.clone(), entered.clone());
        tokio::spawn(async move {
            let guard = if mode == "read" { lock.read().await } else { lock.write().await };
            entered.send((mode, guard.unwrap())).unwrap();
        });
        pair.until_queued("a", i + 1).await;
    }
    drop(first);
    for wave in [&["read", "read"][..], &["write"], &["read", "read"], &["write"]] {
        let mut guards: Vec<Guard> = Vec::new();
        for expected in wave {
            let (mode, guard) = order.recv().await.unwrap();
            assert_eq!(mode, *expected);
            guards.push(guard);
        }
        assert!(guards.iter().all(|guard| guard.fence() == guards[0].fence()));
        sleep(secs(1)).await;
        assert!(order.try_recv().is_err(), "another waiter was granted the lock beside {wave:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn readers_do_not_starve_under_constant_writers() {
    let pair = pair();
    let lock = pair.healthy.rw_lock("a");
    let mut writers = Vec::new();
    for _ in 0..4 {
        let lock = lock.clone();
        writers.push(tokio::spawn(async move {
            loop {
                let _guard = lock.write().await.unwrap();
                sleep(Duration::from_millis(10)).await;
            }
        }));
    }
    for _ in 0..50 {
        let start = Instant::now();
        let _reader = lock.read().await.unwrap();
        assert!(start.elapsed() < Duration::from_millis(100), "{:?}", start.elapsed());
    }
    for writer in writers {
        writer.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_try_write_leaves_no_queue_entry() {
    let pair = pair();
    let lock = pair.healthy.rw_lock("a");
    let _reader = lock.read().await.unwrap();
    assert!(lock.try_write().await.unwrap().is_none());
    assert_eq!(pair.waiters("a").await, 0);
    assert!(lock.try_read().await.unwrap().is_some());
    assert!(lock.try_write_for(secs(1)).await.unwrap().is_none());
    pair.until_queued("a", 0).await;
    assert!(lock.try_read().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn after_a_downgrade_readers_are_granted_the_lock_and_writers_are_not() {
    let pair = pair();
    let lock = pair.healthy.rw_lock("a");
    let guard = lock.write().await.unwrap();
    let fence = guard.fence();
    let reader = tokio::spawn({
        let lock = lock.clone();
        async move { lock.read().await.unwrap() }
    });
    pair.until_queued("a", 1).await;
    let writer = tokio::spawn({
        let lock = lock.clone();
        async move { lock.write().await.unwrap() }
    });
    pair.until_queued("a", 2).await;
    guard.downgrade().await.unwrap();
    guard.downgrade().await.unwrap();
    assert_eq!(guard.mode(), Mode::Shared);
    assert_eq!(guard.fence(), fence);
    let reader = reader.await.unwrap();
    sleep(secs(100)).await;
    assert!(!writer.is_finished());
    assert!(guard.is_held() && reader.is_held());
    drop((guard, reader));
    assert!(writer.await.unwrap().fence() > fence);
}

#[tokio::test(start_paused = true)]
async fn downgrade_of_permits_or_a_lost_lock_is_an_error() {
    let keeper = keeper();
    let permit = keeper.semaphore("s", 1).acquire().await.unwrap();
    assert_eq!(permit.downgrade().await.unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(permit.is_held());
    let guard = keeper.mutex("a").lock().await.unwrap();
    keeper.inspect().unwrap().break_lock("a").await.unwrap();
    assert_eq!(guard.downgrade().await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test(start_paused = true)]
async fn a_semaphore_grants_at_most_its_permits() {
    let pair = pair();
    let gpus = pair.healthy.semaphore("gpu", 4);
    let three = gpus.acquire_many(3).await.unwrap();
    let one = gpus.acquire().await.unwrap();
    assert_eq!(gpus.available().await.unwrap(), 0);
    assert!(gpus.try_acquire().await.unwrap().is_none());
    let two = tokio::spawn({
        let gpus = gpus.clone();
        async move { gpus.acquire_many(2).await.unwrap() }
    });
    pair.until_queued("gpu", 1).await;
    drop(one);
    sleep(secs(1)).await;
    assert!(gpus.try_acquire().await.unwrap().is_none(), "a try overtook a waiter for two permits");
    drop(three);
    let two = two.await.unwrap();
    assert_eq!(two.mode(), Mode::Permits { take: 2, of: 4 });
    assert_eq!(gpus.available().await.unwrap(), 2);
    two.release().await.unwrap();
    assert_eq!(gpus.available().await.unwrap(), 4);
}

#[tokio::test(start_paused = true)]
async fn an_acquire_of_zero_or_too_many_permits_fails_at_once() {
    let keeper = keeper();
    for (take, of) in [(0, 4), (5, 4), (1, 0), (u32::MAX, 4)] {
        let error = keeper.semaphore("s", of).acquire_many(take).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{take} of {of}: {error}");
    }
    let all = keeper.semaphore("s", u32::MAX);
    let _all = all.acquire_many(u32::MAX).await.unwrap();
    assert!(all.try_acquire().await.unwrap().is_none());
    assert_eq!(all.available().await.unwrap(), 0);
}

#[tokio::test(start_paused = true)]
async fn clients_with_different_permit_counts_stay_within_the_smallest() {
    let keeper = keeper();
    let (four, two) = (keeper.semaphore("s", 4), keeper.semaphore("s", 2));
    let a = two.acquire().await.unwrap();
    let _b = four.acquire().await.unwrap();
    assert!(four.try_acquire().await.unwrap().is_none(), "a holder was granted its permit of two");
    drop(a);
    let c = four.try_acquire_for(secs(1)).await.unwrap().expect("only holders of four are left");
    let _d = four.acquire().await.unwrap();
    assert!(two.try_acquire().await.unwrap().is_none());
    drop(c);
}

#[tokio::test(start_paused = true)]
async fn a_semaphore_and_a_mutex_of_the_same_name_are_independent() {
    let keeper = keeper();
    let _mutex = keeper.mutex("a").lock().await.unwrap();
    let _permit = keeper.semaphore("a", 1).acquire().await.unwrap();
    let shown = keeper.inspect().unwrap().show("a").await.unwrap();
    assert_eq!(
        shown.iter().map(|info| info.kind).collect::<Vec<_>>(),
        [Kind::Lock, Kind::Semaphore]
    );
    assert_eq!(keeper.inspect().unwrap().break_lock("a").await.unwrap(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_reader_with_a_short_ttl_does_not_evict_one_with_a_long_ttl() {
    let keeper = keeper();
    let long = keeper.rw_lock("a").ttl(secs(3600)).read().await.unwrap();
    let short = keeper.rw_lock("a").ttl(Duration::from_millis(50));
    for _ in 0..20 {
        drop(short.read().await.unwrap());
        sleep(secs(1)).await;
        assert!(short.try_write().await.unwrap().is_none());
    }
    assert_eq!(long.release().await.unwrap(), ReleaseOutcome::Released);
}

#[tokio::test(start_paused = true)]
async fn lock_all_acquires_all_or_none_in_sorted_order() {
    let keeper = keeper();
    let guards = keeper.lock_all(["c", "a", "b", "a"]).lock().await.unwrap();
    let names: Vec<_> = guards.iter().map(Guard::name).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert!(keeper.lock_all(["b", "z"]).try_lock().await.unwrap().is_none());
    assert!(keeper.mutex("z").try_lock().await.unwrap().is_some(), "`z` is still held");
    let error = keeper.lock_all(["0", "b"]).max_wait(secs(3)).lock().await.unwrap_err();
    assert_eq!((error.kind(), error.name()), (ErrorKind::TimedOut, Some("b")));
    assert!(error.waited().unwrap() >= secs(3));
    assert!(guards.is_held());
    assert_eq!(guards.while_held(async { 1 }).await.unwrap(), 1);
    assert_eq!(guards.release().await.unwrap(), ReleaseOutcome::Released);

    for bad in [vec![], vec![""], vec!["a", "b\0"]] {
        let error = keeper.lock_all(bad).lock().await.unwrap_err();
        let kinds = [ErrorKind::InvalidName, ErrorKind::InvalidOption];
        assert!(kinds.contains(&error.kind()), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn sets_of_the_same_names_in_different_orders_do_not_deadlock() {
    let keeper = keeper();
    let mut tasks = Vec::new();
    for i in 0..30 {
        let keeper = keeper.clone();
        tasks.push(tokio::spawn(async move {
            let mut names = ["a", "b", "c", "d"];
            names.rotate_left(i % 4);
            let guards = keeper.lock_all(names[..3].iter().copied()).lock().await.unwrap();
            sleep(secs(1)).await;
            guards.release().await.unwrap()
        }));
    }
    for task in tasks {
        assert_eq!(task.await.unwrap(), ReleaseOutcome::Released);
    }
}

#[tokio::test(start_paused = true)]
async fn lock_all_fails_when_one_lock_is_lost_while_it_waits_for_another() {
    let pair = pair();
    let _b = pair.healthy.mutex("b").lock().await.unwrap();
    let waiter = tokio::spawn({
        let all = pair.faulty.lock_all(["a", "b"]);
        async move { all.lock().await }
    });
    pair.until_queued("b", 1).await;
    pair.healthy.inspect().unwrap().break_lock("a").await.unwrap();
    let error = waiter.await.unwrap().unwrap_err();
    assert_eq!((error.kind(), error.name()), (ErrorKind::Lost, Some("a")));
    pair.until_queued("b", 0).await;
}

#[tokio::test(start_paused = true)]
async fn with_lock_releases_the_lock_after_success_error_panic_and_loss() {
    let keeper = keeper();
    let sum = keeper.with_lock("a", async |guard| guard.name().len() + 1).await.unwrap();
    assert_eq!(sum, 2);
    assert!(keeper.inspect().unwrap().list("").await.unwrap().is_empty());

    let inner: Result<(), &str> = keeper.with_lock("a", async |_| Err("no")).await.unwrap();
    assert_eq!(inner, Err("no"));
    assert!(keeper.inspect().unwrap().list("").await.unwrap().is_empty());

    let panics = tokio::spawn({
        let keeper = keeper.clone();
        async move { keeper.with_lock("a", async |_| panic!("on purpose")).await }
    });
    assert!(panics.await.unwrap_err().is_panic());
    assert!(keeper.mutex("a").try_lock_for(secs(1)).await.unwrap().is_some());

    let lost = keeper.with_lock("a", async |_| {
        keeper.inspect().unwrap().break_lock("a").await.unwrap();
        sleep(secs(100)).await;
    });
    assert_eq!(lost.await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test(start_paused = true)]
async fn inspection_shows_holders_and_waiters_in_order() {
    let pair = pair();
    let keeper = &pair.healthy;
    let guard = keeper.rw_lock("a/1").label("w").write().await.unwrap();
    let _other = keeper.mutex("b").lock().await.unwrap();
    for (i, label) in ["x", "y"].into_iter().enumerate() {
        let lock = keeper.rw_lock("a/1").label(label);
        tokio::spawn(async move { lock.read().await });
        pair.until_queued("a/1", i + 1).await;
        sleep(secs(1)).await;
    }
    let listed = keeper.inspect().unwrap().list("a/").await.unwrap();
    assert_eq!(listed.len(), 1);
    let info = &listed[0];
    assert_eq!((info.name.as_str(), info.kind), ("a/1", Kind::Lock));
    assert_eq!(info.holders.len(), 1);
    let holder = &info.holders[0];
    assert_eq!(holder.owner, Some(guard.owner()));
    assert_eq!(holder.fence, guard.fence());
    assert_eq!((holder.who(), holder.mode), ("w", Mode::Exclusive));
    assert_eq!(holder.age, Some(secs(2)));
    assert!(holder.remaining.unwrap() <= secs(30));
    let waiters: Vec<_> = info.waiters.iter().map(Participant::who).collect();
    assert_eq!(waiters, ["x", "y"]);
    assert_eq!(info.waiters[0].age, Some(secs(2)));
    assert!(keeper.inspect().unwrap().show("unused").await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_watch_reports_holders_and_waiters_that_arrive_and_leave() {
    let pair = pair();
    let keeper = pair.healthy.clone();
    let mut watch = keeper.inspect().unwrap().watch("a").await.unwrap();
    let mut seen = async |expected: EventKind, label: &str| {
        let event = watch.next().await.unwrap();
        assert_eq!((event.what, event.who.who(), &*event.name), (expected, label, "a"));
    };
    let guard = keeper.mutex("a").label("first").lock().await.unwrap();
    let _elsewhere = keeper.mutex("b").lock().await.unwrap();
    seen(EventKind::Acquired, "first").await;
    let second = spawn_lock(keeper.mutex("a").label("second"));
    seen(EventKind::Queued, "second").await;
    let third = spawn_lock(keeper.mutex("a").label("third"));
    seen(EventKind::Queued, "third").await;
    third.abort();
    seen(EventKind::Left, "third").await;
    guard.release().await.unwrap();
    seen(EventKind::Freed, "first").await;
    seen(EventKind::Acquired, "second").await;
    second.await.unwrap().unwrap().release().await.unwrap();
    seen(EventKind::Freed, "second").await;
}

#[tokio::test(start_paused = true)]
async fn errors_name_store_operation_lock_and_cause() {
    let keeper = keeper();
    let error: Error = keeper.mutex("").lock().await.unwrap_err();
    assert_eq!(error.to_string(), "a name must not be empty");
    let error = keeper.mutex("a\"b").ttl(Duration::ZERO).lock().await.unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"memory: lock "a\"b": a ttl of 0ns is too short: the minimum is 10ms"#
    );
    assert_eq!(size_of::<Error>(), size_of::<usize>());
    assert!(!error.is_retryable());
    assert_eq!(error.name(), Some("a\"b"));
}

#[test]
fn guards_and_futures_are_send() {
    fn sendable<T: Send>(_: &T) {}
    fn owned<T: Send + Sync + 'static>() {}
    let keeper = keeper();
    sendable(&keeper.mutex("a").lock());
    sendable(&keeper.rw_lock("a").read());
    sendable(&keeper.semaphore("a", 1).acquire());
    sendable(&keeper.lock_all(["a"]).lock());
    sendable(&keeper.close());
    owned::<Guard>();
    owned::<Keeper>();
    owned::<Error>();
}

#[tokio::test(start_paused = true)]
async fn with_lock_can_be_spawned_although_its_work_borrows() {
    let keeper = keeper();
    let spawned = tokio::spawn(async move {
        let list = vec![1, 2, 3];
        let (borrowed, inner) = (&list, &keeper);
        let work = keeper.with_lock("a", async |guard| {
            let other = inner.mutex("b").lock().await.unwrap();
            sleep(secs(1)).await;
            guard.is_held() && other.is_held() && borrowed.len() == 3
        });
        work.await.unwrap()
    });
    assert!(spawned.await.unwrap());
}
