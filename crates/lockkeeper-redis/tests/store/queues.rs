//! What the scripts do with a queue, in states that only accidents make.

use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;

use futures_util::StreamExt as _;

use crate::common::{got, number, open, secs, waiter};
use crate::scripts::{LOCK, SEMAPHORE, attempt, break_it, release};

const INFO: &str = "lockkeeper:{a}:i";
const QUEUE: &str = "lockkeeper:{a}:q";
const SHARERS: &str = "lockkeeper:{a}:r";
const HELD: &str = "lockkeeper:{a}:x";
/// Of a waiter whose time is over.
const DEAD: &str = "1794842320775257 0 x 1 1 1000 1 1 - somebody";

fn ask(server: &RedisServer, owner: &str, mode: &str) -> String {
    attempt(owner, mode, true, "0").run(server)
}

/// Its record as a reader must not be taken for the one that it waits with.
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
fn a_reader_that_lost_the_lock_does_not_get_it_with_the_next() {
    let server = RedisServer::start_or_panic();
    ask(&server, "one", "x");
    ask(&server, "two", "s");
    server.command(&["ZADD", SHARERS, "99999999999999", "lost"]);
    server.command(&["HSET", INFO, "lost", DEAD]);
    assert_eq!(release("one", "lock").run(&server), "1");
    assert_eq!(server.command(&["ZRANGE", SHARERS, "0", "-1"]), "two");
    assert_eq!(server.command(&["HKEYS", INFO]), "two");
}

/// A lock that is held for long, and whoever waits for it is killed before it looks again.
#[test]
fn waiters_that_died_do_not_pile_up_behind_a_holder() {
    let server = RedisServer::start_or_panic();
    ask(&server, "holder", "x");
    for number in 0..100 {
        let owner = format!("dead {number}");
        ask(&server, &owner, "x");
        server.command(&["HSET", INFO, &owner, DEAD]);
    }
    let queue = number(&server, &["ZCARD", QUEUE]);
    let records = number(&server, &["HLEN", INFO]);
    assert!(queue <= 20 && records == queue, "{queue} in the queue, {records} records");
}

#[test]
fn the_first_in_a_queue_finds_no_records_of_the_dead() {
    let server = RedisServer::start_or_panic();
    server.command(&["HSET", INFO, "dead", DEAD]);
    ask(&server, "one", "x");
    ask(&server, "two", "x");
    assert_eq!(server.command(&["HKEYS", INFO]), "two");
}

#[test]
fn a_waiter_that_looks_in_time_keeps_its_place() {
    let server = RedisServer::start_or_panic();
    for owner in ["one", "two", "three"] {
        ask(&server, owner, "x");
    }
    // Its time is over, and nobody has seen that yet.
    server.command(&["HSET", INFO, "two", DEAD]);
    ask(&server, "two", "x");
    ask(&server, "three", "x");
    assert_eq!(server.command(&["ZRANGE", QUEUE, "0", "-1"]), "two\nthree");
    assert_ne!(server.command(&["HGET", INFO, "two"]), DEAD);
}

/// As after a jump back of the server's clock: what the holder has is ahead of it.
#[test]
fn who_is_handed_the_lock_has_a_higher_fence_than_who_had_it() {
    let server = RedisServer::start_or_panic();
    for step in [release("one", "lock"), break_it("lock")] {
        server.command(&["FLUSHALL"]);
        ask(&server, "one", "x");
        ask(&server, "two", "x");
        let record = "5000000000000000 5000000000000000 x 1 1 600000 0 7 - a label";
        server.command(&["SET", HELD, record, "PX", "600000"]);
        assert_eq!(step.run(&server), "1");
        assert_eq!(server.command(&["GET", LOCK]), "two");
        let record = server.command(&["GET", HELD]);
        assert_eq!(record.split(' ').nth(1), Some("5000000000000001"), "{record}");
    }
}

#[tokio::test]
async fn waiters_outside_the_queue_are_notified_of_every_release() {
    let server = RedisServer::start_or_panic();
    let client = redis::Client::open(server.url()).unwrap();
    let mut words = client.get_async_pubsub().await.unwrap();
    words.subscribe(&[LOCK, SEMAPHORE]).await.unwrap();
    let mut words = words.into_on_message();
    // Alone, with a waiter, as a reader, and a semaphore.
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
        let word = soon("a word", words.next()).await.unwrap();
        assert_eq!(word.get_payload_bytes(), b"free", "{holds} {kind}");
        release("two", kind).run(&server);
        soon("a word", words.next()).await.unwrap();
    }
}

/// It would look again after a third of its own ttl, and whoever was let in before it may be dead by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_learns_that_the_one_let_in_before_it_has_a_short_lease() {
    let server = RedisServer::start_or_panic();
    let keeper = open(&server.url()).await;
    // So long that nobody looks on its account.
    let first = keeper.mutex("a").ttl(secs(600)).lock().await.unwrap();
    let short = keeper.mutex("a").ttl(secs(2));
    let second = waiter(&keeper, "a", 1, async move { short.lock().await }).await;
    let long = keeper.mutex("a").ttl(secs(600));
    let third = waiter(&keeper, "a", 2, async move { long.lock().await }).await;
    first.release().await.unwrap();
    // As good as dead: it is not renewed any more.
    let ticket = got(second).await.detach().unwrap();
    got(third).await.release().await.unwrap();
    drop(ticket);
}
