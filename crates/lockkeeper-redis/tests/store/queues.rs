//! Scripts on queues in unusual states: lost keys, dead waiters, a clock that was set back.

use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;

use futures_util::StreamExt as _;

use std::time::Duration;

use crate::common::{got, lock, nothing_left, number, open, secs, server, waiter, write};
use crate::scripts::{LOCK, SEMAPHORE, attempt, break_it, by_hand, release};

const INFO: &str = "lockkeeper:{a}:i";
const QUEUE: &str = "lockkeeper:{a}:q";
const SHARERS: &str = "lockkeeper:{a}:r";
/// The part after the owner in the record of a waiter whose queue entry has expired.
const EXPIRED: &str = " x 1 1 1000 1794842320775257 0 1 1 - a label";

fn ask(server: &RedisServer, owner: &str, mode: &str) -> String {
    attempt(owner, mode, true, "0").run(server)
}

/// Its record as a holder must not be mistaken for that of its queue entry.
#[test]
fn a_reader_that_lost_the_lock_and_tries_again_is_queued() {
    let server = RedisServer::start_or_panic();
    ask(&server, "one", "s");
    server.command(&["DEL", LOCK]);
    ask(&server, "two", "x");
    ask(&server, "one", "s");
    assert_eq!(release("two", "lock").run(&server), "1");
    assert_eq!(server.command(&["GET", LOCK]), "(readers)");
    assert_eq!(server.command(&["ZRANGE", SHARERS, "0", "-1"]), "one");
    assert_eq!(release("one", "lock").run(&server), "1");
    assert_eq!(server.command(&["KEYS", "*"]), "");
}

#[test]
fn a_reader_that_lost_the_lock_is_not_granted_with_the_next_reader() {
    let server = RedisServer::start_or_panic();
    ask(&server, "one", "x");
    ask(&server, "two", "s");
    server.command(&["ZADD", SHARERS, "99999999999999", "lost"]);
    server.command(&["HSET", INFO, "lost", "lost s 1 1 1000 1 1 0 - - a label"]);
    assert_eq!(release("one", "lock").run(&server), "1");
    assert_eq!(server.command(&["ZRANGE", SHARERS, "0", "-1"]), "two");
    assert_eq!(server.command(&["HKEYS", INFO]), "two");
}

/// A release without waiters does not remove such readers.
#[test]
fn a_reader_that_lost_the_lock_does_not_share_it_after_a_writer_has_left() {
    let server = RedisServer::start_or_panic();
    ask(&server, "lost", "s");
    server.command(&["DEL", LOCK]);
    ask(&server, "one", "x");
    assert_eq!(release("one", "lock").run(&server), "1");
    ask(&server, "two", "s");
    assert_eq!(server.command(&["ZRANGE", SHARERS, "0", "-1"]), "two");
    assert_eq!(release("two", "lock").run(&server), "1");
    assert_eq!(server.command(&["KEYS", "*"]), "");
}

/// Makes the queue entry of a waiter expire.
fn expire(server: &RedisServer, owner: &str) {
    let code = "for _, record in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
            if string.match(record, '^%S+') == ARGV[1] then
                local place = redis.call('ZSCORE', KEYS[3], record)
                redis.call('ZREM', KEYS[3], record)
                redis.call('ZADD', KEYS[3], place, ARGV[1] .. ARGV[2])
            end
        end
        return 1";
    by_hand(LOCK, code, &[owner, EXPIRED]).run(server);
}

/// A lock that is held for long, whose waiters are killed before they refresh their places.
#[test]
fn dead_waiters_do_not_accumulate_behind_a_holder() {
    let server = RedisServer::start_or_panic();
    ask(&server, "holder", "x");
    for number in 0..100 {
        let owner = format!("dead{number}");
        ask(&server, &owner, "x");
        expire(&server, &owner);
    }
    let queue = number(&server, &["ZCARD", QUEUE]);
    assert!(queue <= 20, "{queue} in the queue");
}

#[test]
fn a_waiter_that_refreshes_its_expired_place_in_time_keeps_it() {
    let server = RedisServer::start_or_panic();
    for owner in ["one", "two", "three"] {
        ask(&server, owner, "x");
    }
    expire(&server, "two");
    let refresh = attempt("two", "x", true, "0").after_record(&format!("two{EXPIRED}"));
    refresh.run(&server);
    let owners = server.command(&["ZRANGE", QUEUE, "0", "-1"]);
    let owners: Vec<&str> = owners.lines().filter_map(|record| record.split(' ').next()).collect();
    assert_eq!(owners, ["two", "three"]);
    assert!(!server.command(&["ZRANGE", QUEUE, "0", "0"]).contains(EXPIRED));
}

/// The holder's fence is ahead of the clock, as after the clock was set back.
#[test]
fn a_hand_off_grants_a_higher_fence_even_if_the_clock_was_set_back() {
    let server = RedisServer::start_or_panic();
    for step in [release("one", "lock"), break_it("lock")] {
        server.command(&["FLUSHALL"]);
        ask(&server, "one", "x");
        ask(&server, "two", "x");
        let record = "one x 1 1 600000 5000000000000000 5000000000000000 0 - - a label";
        server.command(&["SET", LOCK, record, "PX", "600000"]);
        assert_eq!(step.run(&server), "1");
        let record = server.command(&["GET", LOCK]);
        assert!(record.starts_with("two x 1 1 600000 "), "{record}");
        assert_eq!(record.split(' ').nth(6), Some("5000000000000001"), "{record}");
    }
}

#[tokio::test]
async fn waiters_outside_the_queue_are_notified_of_every_release() {
    let server = RedisServer::start_or_panic();
    let client = redis::Client::open(server.url()).unwrap();
    let mut messages = client.get_async_pubsub().await.unwrap();
    messages.subscribe(&[LOCK, SEMAPHORE]).await.unwrap();
    let mut messages = messages.into_on_message();
    // Without and with a waiter, a reader, and a semaphore.
    for (holds, waits, kind) in [
        ("x", None, "lock"),
        ("x", Some("x"), "lock"),
        ("s", None, "lock"),
        ("p", None, "semaphore"),
    ] {
        ask(&server, "one", holds);
        if let Some(mode) = waits {
            ask(&server, "two", mode);
        }
        assert_eq!(release("one", kind).run(&server), "1");
        let message = soon("a message", messages.next()).await.unwrap();
        assert_eq!(message.get_payload_bytes(), b"free", "{holds} {kind}");
        release("two", kind).run(&server);
        soon("a message", messages.next()).await.unwrap();
    }
}

/// Otherwise it would refresh after a third of its own TTL, long after the lease of a dead holder has ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_notified_if_the_new_holder_has_a_shorter_lease() {
    let server = RedisServer::start_or_panic();
    let keeper = open(&server.url()).await;
    // A TTL long enough that its end causes no retry.
    let first = keeper.mutex("a").ttl(secs(600)).lock().await.unwrap();
    let short = keeper.mutex("a").ttl(secs(2));
    let second = waiter(&keeper, "a", 1, async move { short.lock().await }).await;
    let long = keeper.mutex("a").ttl(secs(600));
    let third = waiter(&keeper, "a", 2, async move { long.lock().await }).await;
    first.release().await.unwrap();
    // Detached, so that it is not renewed.
    let ticket = got(second).await.detach().unwrap();
    got(third).await.release().await.unwrap();
    drop(ticket);
}

/// The lock was granted by another client between two calls of an attempt that took it ahead of the queue.
#[test]
fn an_unconfirmed_attempt_returns_the_lock_only_once() {
    let server = RedisServer::start_or_panic();
    let mine = attempt("mine", "x", true, "0");
    ask(&server, "one", "x");
    mine.run(&server);
    ask(&server, "three", "x");
    assert_eq!(release("one", "lock").run(&server), "1");
    assert!(server.command(&["GET", LOCK]).starts_with("mine "));
    // A repeated call has no flag `u`.
    mine.clone().after_record("another record").run(&server);
    assert!(server.command(&["GET", LOCK]).starts_with("mine "));
    // With the flag, the lock goes to the queue.
    mine.unconfirmed().run(&server);
    assert!(server.command(&["GET", LOCK]).starts_with("three "));
}

#[tokio::test]
async fn a_try_is_granted_a_lock_whose_last_reader_has_died() {
    let (server, keeper) = server().await;
    let long = keeper.rw_lock("a").ttl(secs(600)).read().await.unwrap();
    let dead = keeper.rw_lock("a").ttl(Duration::from_millis(300)).read().await.unwrap();
    let ticket = dead.detach().unwrap();
    long.release().await.unwrap();
    assert!(number(&server, &["PTTL", LOCK]) > 60_000, "the holder key outlives the readers");
    tokio::time::sleep(Duration::from_millis(400)).await;
    let guard = keeper.mutex("a").try_lock().await.unwrap();
    guard.expect("no reader is left").release().await.unwrap();
    drop(ticket);
    nothing_left(&keeper, &server).await;
}

/// A program that ends has no time for a second request, and its keeper does not know of the waiter.
#[tokio::test]
async fn a_guard_dropped_at_the_end_of_its_runtime_hands_the_lock_to_a_waiter_of_another_store() {
    let (server, keeper) = server().await;
    let (url, (locked, is_locked)) = (server.url(), tokio::sync::oneshot::channel());
    let (queues, has_queued) = tokio::sync::oneshot::channel();
    let program = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let guard = runtime.block_on(async {
            let keeper = open(&url).await.ttl(secs(600));
            let guard = lock(&keeper, "a").await;
            locked.send(()).unwrap();
            has_queued.await.unwrap();
            // From now on, waiters of other processes are likely.
            tokio::time::sleep(Duration::from_millis(150)).await;
            guard
        });
        let _entered = runtime.enter();
        drop(guard);
    });
    is_locked.await.unwrap();
    let waiting = waiter(&keeper, "a", 1, write(&keeper, "a")).await;
    queues.send(()).unwrap();
    program.join().unwrap();
    got(waiting).await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}
