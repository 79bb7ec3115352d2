//! What one call costs the server does not depend on how many hold, nor on how many waiters have died.
//!
//! Commands are counted, also those that scripts run: that does not depend on how fast the machine is.

use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;

use crate::common::{got, lock, nothing_left, number, open, queued, secs};
use crate::scripts::{LOCK, SEMAPHORE, Step, attempt, by_hand, permits, release, together};

/// The most commands that one call may run.
const MOST: u64 = 80;
const HELD: u32 = 8000;
const DEAD: &str = "20000";

/// Runs a step; its answer, and how many commands the server ran for it.
fn counted(server: &RedisServer, step: &Step) -> (String, u64) {
    server.command(&["CONFIG", "RESETSTAT"]);
    let answer = step.run(server);
    let stats = server.command(&["INFO", "commandstats"]);
    let calls = stats.lines().filter_map(|line| {
        let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        let calls = rest.split(',').next()?.parse::<u64>().ok()?;
        (!name.starts_with("config") && !name.starts_with("info")).then_some(calls)
    });
    (answer, calls.sum())
}

/// Runs a step until it does not want to be called again; its last answer, and how often it was called.
fn repeated(server: &RedisServer, step: &Step) -> (String, u64) {
    for count in 1..=1000 {
        let (answer, commands) = counted(server, step);
        assert!(commands <= MOST, "{}: {commands} commands", step.what);
        if !answer.ends_with("again") {
            return (answer, count);
        }
    }
    panic!("{}: no end", step.what);
}

/// Holders of a permit each, whose leases end at a time in milliseconds.
fn hold_many(server: &RedisServer, ends: &str) {
    let code = "for i = 1, ARGV[1] do
            redis.call('ZADD', KEYS[3], ARGV[2], 'holder' .. i)
            redis.call('HSET', KEYS[5], 'holder' .. i, '1 1 p 1 10000 600000 0 s - a label')
        end
        redis.call('PEXPIRE', KEYS[3], '600000')
        return redis.call('PEXPIRE', KEYS[5], '600000')";
    by_hand(SEMAPHORE, code, &[&HELD.to_string(), ends]).run(server);
    // Which takes stock, because another client has changed the keys.
    release("stranger", "semaphore").run(server);
}

/// Waiters for a lock, in front of others.
fn wait_many(server: &RedisServer, of: &str, record: &str) {
    let code = "for i = 1, ARGV[1] do
            redis.call('ZADD', KEYS[4], i - ARGV[1] - 1, 'dead' .. i)
            redis.call('HSET', KEYS[5], 'dead' .. i, ARGV[2])
        end
        redis.call('PEXPIRE', KEYS[4], '600000')
        return redis.call('PEXPIRE', KEYS[5], '600000')";
    by_hand(of, code, &[DEAD, record]).run(server);
}

const FAR: &str = "9000000000000";

/// A step may have to make a key live for longer, or not.
#[track_caller]
fn same_costs(many: &[u64], few: &[u64]) {
    let costs = many.iter().zip(few);
    assert!(costs.clone().all(|(many, few)| many.abs_diff(*few) <= 4), "{many:?} and {few:?}");
}

#[test]
fn a_permit_costs_the_same_however_many_are_held() {
    let server = RedisServer::start_or_panic();
    let steps = [
        permits("new", false, 1, 10_000),
        permits("new", false, 1, 10_000),
        release("new", "semaphore"),
        // Two that do not fit: one that only tries, and one that waits.
        permits("other", false, 5000, 10_000),
        permits("other", true, 5000, 10_000),
        permits("other", true, 5000, 10_000),
        permits("third", true, 1, 10_000),
        release("other", "semaphore"),
        release("third", "semaphore"),
    ];
    let costs = || steps.iter().map(|step| counted(&server, step).1).collect::<Vec<_>>();
    permits("one", false, 6000, 10_000).run(&server);
    let few = costs();
    server.command(&["FLUSHALL"]);
    hold_many(&server, FAR);
    let many = costs();
    same_costs(&many, &few);
    assert_eq!(number(&server, &["ZCARD", &format!("{SEMAPHORE}:r")]), i64::from(HELD));
}

#[test]
fn a_reader_costs_the_same_however_many_read() {
    let server = RedisServer::start_or_panic();
    let steps = [
        attempt("new", "s", false, "0"),
        release("new", "lock"),
        attempt("other", "x", false, "0"),
        attempt("other", "x", true, "0"),
        release("other", "lock"),
    ];
    let costs = || steps.iter().map(|step| counted(&server, step).1).collect::<Vec<_>>();
    attempt("one", "s", false, "0").run(&server);
    let few = costs();
    let code = "for i = 1, 8000 do
            redis.call('ZADD', KEYS[3], ARGV[1], 'holder' .. i)
            redis.call('HSET', KEYS[5], 'holder' .. i, '1 1 s 1 1 600000 0 s - a label')
        end
        return 1";
    by_hand(LOCK, code, &[FAR]).run(&server);
    same_costs(&costs(), &few);
}

#[test]
fn permits_of_many_dead_holders_are_freed_by_bounded_calls() {
    let server = RedisServer::start_or_panic();
    for queue in [false, true] {
        server.command(&["FLUSHALL"]);
        hold_many(&server, FAR);
        assert!(!permits("new", queue, 1, HELD).run(&server).ends_with("again"), "all are held");
        // All leases end.
        let end_all = "for _, owner in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
                redis.call('ZADD', KEYS[3], '1', owner)
            end
            return 1";
        by_hand(SEMAPHORE, end_all, &[]).run(&server);
        let (fence, calls) = repeated(&server, &permits("new", queue, HELD, HELD));
        assert!(fence.len() >= 16, "{fence}");
        assert!(calls > 20, "{calls} calls removed {HELD} holders");
        assert_eq!(release("new", "semaphore").run(&server), "1");
        assert_eq!(server.command(&["KEYS", "*"]), "");
    }
}

/// One that was not removed yet is not taken for a holder.
#[test]
fn a_holder_whose_lease_has_ended_among_many_has_nothing() {
    let server = RedisServer::start_or_panic();
    for queue in [false, true] {
        server.command(&["FLUSHALL"]);
        hold_many(&server, "1");
        let last = "holder999";
        assert_eq!(release(last, "semaphore").run(&server), "0");
        hold_many(&server, FAR);
        let end_some =
            "for i = 1, 1000 do redis.call('ZADD', KEYS[3], '1', 'holder' .. i) end return 1";
        by_hand(SEMAPHORE, end_some, &[]).run(&server);
        // It asks for more than there is: a place in the queue must not cost it its record.
        let ask = permits(last, queue, 10_000, 10_000);
        let (answer, _) = repeated(&server, &ask);
        assert!(answer.len() < 16, "{answer}");
        let waits = server.command(&["HGET", &format!("{SEMAPHORE}:i"), last]);
        assert_eq!(waits.contains(" p 10000 10000 "), queue, "{waits}");
        assert_eq!(number(&server, &["ZCARD", &format!("{SEMAPHORE}:r")]), 7000);
        assert_eq!(release(last, "semaphore").run(&server), "0");
    }
}

#[test]
fn a_release_removes_dead_waiters_by_bounded_calls() {
    let server = RedisServer::start_or_panic();
    let channel = "lockkeeper:wake:gone";
    for (what, ends, mode) in [
        ("whose place has ended", "1", "x"),
        ("whose process is gone", FAR, "x"),
        ("readers whose process is gone", FAR, "s"),
    ] {
        for then in ["x", "s"] {
            server.command(&["FLUSHALL"]);
            attempt("one", "x", true, "0").run(&server);
            let live = attempt("two", then, true, "0");
            live.run(&server);
            let record = format!("1 0 {mode} 1 1 600000 {ends} s {channel} a label");
            wait_many(&server, LOCK, &record);
            let (answer, calls) = repeated(&server, &release("one", "lock"));
            assert_eq!(answer, "0", "{what}: the first call released it");
            assert!(calls > 60, "{what}: {calls} calls");
            let (fence, commands) = counted(&server, &live);
            assert!(fence.len() >= 16 && commands <= MOST, "{what}: {fence}, {commands}");
            assert_eq!(release("two", "lock").run(&server), "1");
            assert_eq!(server.command(&["KEYS", "*"]), "", "{what}");
        }
    }
}

#[test]
fn an_attempt_removes_dead_waiters_by_bounded_calls_and_answers_when_it_is_done() {
    let server = RedisServer::start_or_panic();
    for (of, mode) in [(LOCK, "x"), (LOCK, "s"), (SEMAPHORE, "p")] {
        for queue in [false, true] {
            server.command(&["FLUSHALL"]);
            wait_many(&server, of, &format!("1 0 {mode} 1 1 600000 1 s - a label"));
            let ask = attempt("one", mode, queue, "0");
            let (fence, calls) = repeated(&server, &ask);
            assert!(fence.len() >= 16, "{mode}: {fence}");
            assert!(calls > 60, "{mode}: {calls} calls");
        }
    }
}

/// The waiters of a process ask at the same moment, when the lease in front of them ends, and share calls.
#[test]
fn asks_that_share_a_call_also_share_the_limit_of_what_it_removes() {
    let server = RedisServer::start_or_panic();
    let dead = |key: &str| number(&server, &["ZCARD", key]);
    let steps = |mode: &str| -> Vec<Step> {
        (0..64).map(|i| attempt(&format!("live{i}"), mode, true, "0")).collect()
    };
    for (of, mode) in [(LOCK, "x"), (LOCK, "s"), (SEMAPHORE, "p")] {
        server.command(&["FLUSHALL"]);
        wait_many(&server, of, &format!("1 0 {mode} 1 1 600000 1 s - a label"));
        let queue = format!("{of}:q");
        let before = dead(&queue);
        let answers = together(&server, &steps(mode));
        let removed = before + 64 - dead(&queue);
        assert!(removed <= 256, "{mode}: one call removed {removed} waiters");
        assert!(answers.iter().all(|answer| answer == "again"), "{mode}: {answers:?}");
        // The calls that follow let the first one in.
        let granted = (0..200).find_map(|_| {
            together(&server, &steps(mode)).into_iter().find(|answer| answer.len() >= 16)
        });
        assert!(granted.is_some(), "{mode}");
        assert!(dead(&queue) < 64, "{mode}");
    }
    // The same for ended leases.
    server.command(&["FLUSHALL"]);
    hold_many(&server, FAR);
    let end_all = "for _, owner in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
            redis.call('ZADD', KEYS[3], '1', owner)
        end
        return 1";
    by_hand(SEMAPHORE, end_all, &[]).run(&server);
    together(&server, &steps("p"));
    let removed = i64::from(HELD) - dead(&format!("{SEMAPHORE}:r"));
    assert!(removed <= 256 + 64, "one call removed {removed} holders");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_live_waiter_behind_many_dead_ones_has_its_turn_at_once() {
    let server = RedisServer::start_or_panic();
    let keeper = open(&server.url()).await.ttl(secs(36_000));
    // By a release, by a downgrade and by a break. (A writer whose process is gone is found out when its turn comes,
    // which is not while others read.)
    for (how, ends) in [("release", FAR), ("downgrade", "1"), ("break", FAR)] {
        let record = format!("1 0 x 1 1 600000 {ends} s lockkeeper:wake:gone a label");
        let guard = lock(&keeper, "a").await;
        let rw_lock = keeper.rw_lock("a");
        let waiter = tokio::spawn(async move { rw_lock.read().await });
        queued(&keeper, "a", 1).await;
        wait_many(&server, LOCK, &record);
        match how {
            "release" => drop(guard.release().await.unwrap()),
            "downgrade" => guard.downgrade().await.unwrap(),
            _ => assert_eq!(keeper.inspect().unwrap().break_lock("a").await.unwrap(), 1),
        }
        got(waiter).await.release().await.unwrap();
        if how == "downgrade" {
            keeper.inspect().unwrap().break_lock("a").await.unwrap();
        }
    }
    soon("the end", keeper.close()).await;
    nothing_left(&keeper, &server).await;
}
