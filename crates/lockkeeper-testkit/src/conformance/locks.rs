//! The behaviour of mutexes, readers-writer locks and semaphores.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lockkeeper_core::{ErrorKind, Fences, Guard, Keeper, ReleaseOutcome, Result, State};
use tokio::sync::{Barrier, mpsc, oneshot};

use super::{Subject, soon};
use crate::history::History;

/// Many tasks contend for one name: holders never overlap, and fences rise.
pub async fn holders_never_overlap_under_contention(subject: Subject) {
    let keepers = [subject.keeper(), subject.keeper()];
    let history = History::new();
    let tasks: Vec<_> = (0..8)
        .map(|i| {
            let mutex = keepers[i % 2].mutex(subject.name("a"));
            let history = history.clone();
            tokio::spawn(async move {
                for _ in 0..10 {
                    let guard = mutex.lock().await.expect("the store answers");
                    let open = history.begin("a", guard.owner(), guard.mode(), guard.fence());
                    tokio::task::yield_now().await;
                    open.end();
                    guard.release().await.expect("the store answers");
                }
            })
        })
        .collect();
    for task in tasks {
        soon("ten locks", task).await.expect("does not panic");
    }
    assert_eq!(history.assert_clean().holds, 80);
    subject.assert_nothing_left(&[&keepers[0], &keepers[1]]).await;
}

/// A mutex, or all permits of a semaphore: only one client can acquire it.
#[derive(Debug, Clone, Copy)]
enum Exclusive {
    Mutex,
    Permits(u32),
}

impl Exclusive {
    async fn try_acquire(self, keeper: &Keeper, name: String) -> Result<Option<Guard>> {
        match self {
            Exclusive::Mutex => keeper.mutex(name).try_lock().await,
            Exclusive::Permits(all) => keeper.semaphore(name, all).try_acquire_many(all).await,
        }
    }
}

/// A try is refused only if another client holds the lock: if clients try a free lock, or all permits of a free
/// semaphore, concurrently, one of them acquires it.
pub async fn exactly_one_of_concurrent_tries_for_a_free_lock_succeeds(subject: Subject) {
    let clients = subject.clients(4).await;
    let kinds = if subject.capabilities().permits {
        &[Exclusive::Mutex, Exclusive::Permits(1), Exclusive::Permits(3)][..]
    } else {
        &[Exclusive::Mutex]
    };
    for round in 0..10 {
        for lock in kinds {
            let barrier = Arc::new(Barrier::new(clients.len()));
            let tries: Vec<_> = clients
                .iter()
                .map(|keeper| {
                    let name = subject.name(&format!("a{round}"));
                    let (keeper, barrier) = (keeper.clone(), barrier.clone());
                    tokio::spawn(async move {
                        barrier.wait().await;
                        lock.try_acquire(&keeper, name).await
                    })
                })
                .collect();
            let mut guards = Vec::new();
            for one in tries {
                let answer = soon("a try", one).await.expect("does not panic");
                guards.extend(answer.expect("the store decides"));
            }
            assert_eq!(guards.len(), 1, "of {} in round {round}, {lock:?}", clients.len());
            for guard in guards {
                guard.release().await.expect("the store answers");
            }
        }
    }
    let clients: Vec<&Keeper> = clients.iter().collect();
    subject.assert_nothing_left(&clients).await;
}

/// Two guards are two owners, even of one `Mutex` object.
pub async fn two_guards_of_one_mutex_exclude_each_other(subject: Subject) {
    let keeper = subject.keeper();
    let mutex = Arc::new(keeper.mutex(subject.name("a")));
    let guard = soon("lock", mutex.lock()).await.unwrap();
    assert!(guard.is_held());
    assert!(mutex.try_lock().await.unwrap().is_none());
    assert!(mutex.clone().try_lock().await.unwrap().is_none());
    assert!(keeper.mutex(subject.name("a")).try_lock().await.unwrap().is_none());
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    drop(mutex.try_lock().await.unwrap().expect("free again"));
    subject.assert_nothing_left(&[&keeper]).await;
}

/// Contention is `None` for a try, and `TimedOut` after `max_wait`.
pub async fn a_failed_try_returns_none_and_a_bounded_wait_times_out(subject: Subject) {
    let keeper = subject.keeper();
    let mutex = keeper.mutex(subject.name("a"));
    let guard = mutex.lock().await.unwrap();
    let wait = Duration::from_millis(50);
    assert!(soon("try_lock", mutex.try_lock()).await.unwrap().is_none());
    let start = Instant::now();
    assert!(soon("try_lock_for", mutex.try_lock_for(wait)).await.unwrap().is_none());
    assert!(start.elapsed() >= wait, "gave up after {:?}", start.elapsed());
    let error = soon("lock", mutex.clone().max_wait(wait).lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert!(error.waited().unwrap() >= wait);
    assert!(guard.is_held());
    drop(guard);
    soon("lock", mutex.lock()).await.unwrap().release().await.unwrap();
    subject.assert_nothing_left(&[&keeper]).await;
}

/// All waiters are granted the lock; on a fair store in FIFO order.
pub async fn waiters_are_granted_the_lock_in_order_where_declared(subject: Subject) {
    let keeper = subject.keeper();
    let mutex = keeper.mutex(subject.name("a"));
    let guard = mutex.lock().await.unwrap();
    let (entered, mut order) = mpsc::unbounded_channel();
    let mut waiters = Vec::new();
    for i in 0..6 {
        let (mutex, entered) = (mutex.clone(), entered.clone());
        waiters.push(tokio::spawn(async move {
            let guard = mutex.lock().await.unwrap();
            entered.send(i).unwrap();
            guard.release().await.unwrap();
        }));
        subject.wait_for_waiters("a", i + 1).await;
    }
    guard.release().await.unwrap();
    let mut seen = Vec::new();
    for waiter in waiters {
        seen.push(soon("the next waiter", order.recv()).await.unwrap());
        soon("its release", waiter).await.unwrap();
    }
    if !subject.capabilities().fair {
        seen.sort_unstable();
    }
    assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
    subject.assert_nothing_left(&[&keeper]).await;
}

/// A store that declares push wakes a waiter long before its next poll; on other stores the waiter is granted
/// the lock at its next poll.
pub async fn a_waiter_is_handed_the_lock_when_it_is_released(subject: Subject) {
    // A waiter polls after a third of its TTL, which is longer than `soon` waits.
    let keeper = subject.keeper();
    let mutex = keeper.mutex(subject.name("a"));
    for _ in 0..3 {
        let guard = mutex.lock().await.unwrap();
        let waiter = tokio::spawn({
            let mutex = mutex.clone();
            async move { mutex.lock().await.unwrap() }
        });
        subject.wait_for_waiters("a", 1).await;
        assert!(!waiter.is_finished());
        let fence = guard.fence();
        guard.release().await.unwrap();
        let next = soon("the waiter", waiter).await.unwrap();
        assert!(next.is_held());
        assert!(subject.capabilities().fences == Fences::None || next.fence() > fence);
        next.release().await.unwrap();
    }
    subject.assert_nothing_left(&[&keeper]).await;
}

/// The TTL does not limit how long a lock is held.
pub async fn a_lock_is_renewed_for_as_long_as_it_is_held(subject: Subject) {
    let keeper = subject.keeper();
    let mutex = keeper.mutex(subject.name("a")).ttl(subject.ttl);
    let guard = mutex.lock().await.unwrap();
    let start = Instant::now();
    while start.elapsed() < subject.ttl * 5 / 2 {
        assert!(guard.is_held(), "lost after {:?}", start.elapsed());
        assert!(mutex.try_lock().await.unwrap().is_none());
        tokio::time::sleep(subject.ttl / 10).await;
    }
    assert_eq!(guard.release().await.unwrap(), ReleaseOutcome::Released);
    subject.assert_nothing_left(&[&keeper]).await;
}

/// A guard can be dropped on a thread without a runtime.
pub async fn a_guard_dropped_on_a_plain_thread_releases_its_lock(subject: Subject) {
    let keeper = subject.keeper();
    let mutex = keeper.mutex(subject.name("a"));
    let guard = mutex.lock().await.unwrap();
    std::thread::spawn(move || drop(guard)).join().expect("does not panic");
    soon("lock", mutex.lock()).await.unwrap().release().await.unwrap();
    subject.assert_nothing_left(&[&keeper]).await;
}

async fn no_shared_locks(subject: Subject, keeper: &Keeper) {
    let error = keeper.rw_lock(subject.name("a")).read().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    subject.assert_nothing_left(&[keeper]).await;
}

/// Readers share the lock, a writer excludes all others.
pub async fn readers_share_and_writers_exclude(subject: Subject) {
    let keeper = subject.keeper();
    if !subject.capabilities().shared {
        return no_shared_locks(subject, &keeper).await;
    }
    let lock = keeper.rw_lock(subject.name("a"));
    let writer = lock.write().await.unwrap();
    assert!(lock.try_read().await.unwrap().is_none());
    assert!(lock.try_write().await.unwrap().is_none());
    let fence = writer.fence();
    writer.release().await.unwrap();
    let readers = [lock.read().await.unwrap(), lock.read().await.unwrap()];
    assert!(readers.iter().all(Guard::is_held));
    assert!(readers.iter().all(|reader| reader.fence() >= fence));
    assert!(lock.try_write().await.unwrap().is_none());
    assert!(keeper.mutex(subject.name("a")).try_lock().await.unwrap().is_none());
    let [one, two] = readers;
    one.release().await.unwrap();
    assert!(lock.try_write().await.unwrap().is_none(), "a reader is left");
    two.release().await.unwrap();
    let writer = soon("write", lock.write()).await.unwrap();
    assert!(subject.capabilities().fences == Fences::None || writer.fence() > fence);
    writer.release().await.unwrap();
    subject.assert_nothing_left(&[&keeper]).await;
}

/// On a fair store, readers queue behind a writer and are granted together after it. On any store, every waiter
/// acquires the lock.
pub async fn readers_do_not_overtake_a_waiting_writer(subject: Subject) {
    let keeper = subject.keeper();
    if !subject.capabilities().shared {
        return no_shared_locks(subject, &keeper).await;
    }
    let lock = keeper.rw_lock(subject.name("a"));
    let reader = lock.read().await.unwrap();
    let (entered, mut order) = mpsc::unbounded_channel();
    let mut tasks = Vec::new();
    for (i, who) in ["writer", "reader", "reader"].into_iter().enumerate() {
        let (lock, entered) = (lock.clone(), entered.clone());
        tasks.push(tokio::spawn(async move {
            let guard = if who == "writer" { lock.write().await } else { lock.read().await };
            let (release, released) = oneshot::channel::<()>();
            entered.send((who, release)).unwrap();
            // Until the sender is dropped.
            let _ = released.await;
            guard.unwrap().release().await.unwrap();
        }));
        if subject.capabilities().fair {
            subject.wait_for_waiters("a", i + 1).await;
        }
    }
    if subject.capabilities().fair {
        assert!(lock.try_read().await.unwrap().is_none(), "a try overtook a writer");
        assert!(order.try_recv().is_err(), "a reader overtook a writer");
        reader.release().await.unwrap();
        let (who, writer) = soon("the writer", order.recv()).await.unwrap();
        assert_eq!(who, "writer");
        assert!(order.try_recv().is_err(), "a reader beside a writer");
        drop(writer);
        // Both hold before either releases: they were granted together.
        let together = [soon("a reader", order.recv()).await, soon("another", order.recv()).await];
        assert!(together.iter().flatten().all(|(who, _)| *who == "reader"));
    } else {
        reader.release().await.unwrap();
        for _ in 0..3 {
            drop(soon("a turn", order.recv()).await);
        }
    }
    for task in tasks {
        soon("its release", task).await.unwrap();
    }
    subject.assert_nothing_left(&[&keeper]).await;
}

/// A failed try leaves nothing that blocks readers.
pub async fn a_failed_try_write_does_not_block_readers(subject: Subject) {
    let keeper = subject.keeper();
    if !subject.capabilities().shared {
        return no_shared_locks(subject, &keeper).await;
    }
    let lock = keeper.rw_lock(subject.name("a"));
    let one = lock.read().await.unwrap();
    assert!(lock.try_write().await.unwrap().is_none());
    let two = lock.try_read().await.unwrap().expect("readers still acquire");
    drop((one, two));
    subject.assert_nothing_left(&[&keeper]).await;
}

/// No other writer acquires the lock during a downgrade from write to read.
pub async fn a_downgrade_admits_no_other_writer(subject: Subject) {
    let keeper = subject.keeper();
    let lock = keeper.rw_lock(subject.name("a"));
    let guard = lock.write().await.unwrap();
    if !subject.capabilities().downgrade {
        let error = guard.downgrade().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(guard.state(), State::Held, "an unsupported downgrade changed the hold");
        guard.release().await.unwrap();
        return subject.assert_nothing_left(&[&keeper]).await;
    }
    let writer = tokio::spawn({
        let lock = lock.clone();
        async move { lock.write().await.unwrap() }
    });
    subject.wait_for_waiters("a", 1).await;
    soon("downgrade", guard.downgrade()).await.unwrap();
    guard.downgrade().await.expect("a downgrade is idempotent");
    let another = lock.try_write_for(Duration::from_millis(100)).await.unwrap();
    assert!(another.is_none(), "a writer acquired beside a reader");
    assert!(!writer.is_finished(), "the waiting writer acquired beside a reader");
    assert!(guard.is_held());
    guard.release().await.unwrap();
    soon("the writer", writer).await.unwrap().release().await.unwrap();
    let guard = soon("write", lock.write()).await.unwrap();
    guard.downgrade().await.unwrap();
    assert!(lock.try_write().await.unwrap().is_none(), "a writer acquired beside a reader");
    let reader = soon("read", lock.read()).await.unwrap();
    drop((guard, reader));
    subject.assert_nothing_left(&[&keeper]).await;
}

/// A semaphore never grants more permits than it has, and a set of permits completely or not at all.
pub async fn a_semaphore_grants_as_many_permits_as_it_has(subject: Subject) {
    let keeper = subject.keeper();
    let semaphore = keeper.semaphore(subject.name("a"), 3);
    if !subject.capabilities().permits {
        let error = semaphore.acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        return subject.assert_nothing_left(&[&keeper]).await;
    }
    assert_eq!(semaphore.acquire_many(4).await.unwrap_err().kind(), ErrorKind::InvalidOption);
    let two = soon("two permits", semaphore.acquire_many(2)).await.unwrap();
    assert!(semaphore.try_acquire_many(2).await.unwrap().is_none());
    let one = semaphore.try_acquire().await.unwrap().expect("one is left");
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    drop((one, two));

    let history = History::new();
    let tasks: Vec<_> = (0..6)
        .map(|i| {
            let (semaphore, history) = (semaphore.clone(), history.clone());
            tokio::spawn(async move {
                for _ in 0..5 {
                    let guard = semaphore.acquire_many(i % 3 + 1).await.unwrap();
                    let open = history.begin("a", guard.owner(), guard.mode(), None);
                    tokio::task::yield_now().await;
                    open.end();
                    guard.release().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        soon("five acquires", task).await.expect("does not panic");
    }
    assert_eq!(history.assert_clean().holds, 30);
    subject.assert_nothing_left(&[&keeper]).await;
}

/// A semaphore and a mutex of one name are independent.
pub async fn a_semaphore_and_a_mutex_of_one_name_are_independent(subject: Subject) {
    let keeper = subject.keeper();
    let mutex = keeper.mutex(subject.name("a")).lock().await.unwrap();
    let permit = soon("acquire", keeper.semaphore(subject.name("a"), 1).acquire()).await;
    match permit {
        Ok(permit) => {
            assert!(subject.capabilities().permits, "permits that were not declared");
            mutex.release().await.unwrap();
            let mutex = keeper.mutex(subject.name("a")).try_lock().await.unwrap();
            assert!(mutex.is_some(), "a permit blocks the mutex");
            drop(permit);
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(!subject.capabilities().permits);
            mutex.release().await.unwrap();
        }
    }
    subject.assert_nothing_left(&[&keeper]).await;
}
