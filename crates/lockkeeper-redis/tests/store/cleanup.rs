//! The cost of a call on the server does not depend on the number of holders or of dead waiters.
//!
//! Cost is the number of commands, including those inside scripts, which does not depend on the speed of the machine.

use lockkeeper_testkit::server::RedisServer;
use lockkeeper_testkit::wait::soon;

use crate::common::{got, lock, nothing_left, number, open, queued, secs};
use crate::scripts::{FAR, LOCK, SEMAPHORE, Step, attempt, by_hand, permits, release, together};

/// The maximum number of commands that one call may run.
const MAX_COMMANDS: u64 = 80;
const HELD: u32 = 8000;
const DEAD: &str = "20000";

/// Runs a step. Returns its reply and the number of commands that the server ran.
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

/// Runs a step until it does not reply "again". Returns its last reply and the number of calls.
fn repeated(server: &RedisServer, step: &Step) -> (String, u64) {
    for count in 1..=1000 {
        let (answer, commands) = counted(server, step);
        assert!(commands <= MAX_COMMANDS, "{}: {commands} commands", step.what);
        if !answer.ends_with("again") {
            return (answer, count);
        }
    }
    panic!("{}: still \"again\" after 1000 calls", step.what);
}

/// Creates holders of one permit each, whose leases end at a time in milliseconds.
fn hold_many(server: &RedisServer, ends: &str) {
    let code = "for i = 1, ARGV[1] do
            redis.call('ZADD', KEYS[2], ARGV[2], 'holder' .. i)
            local record = 'holder' .. i .. ' p 1 10000 600000 1 1 0 - - a label'
            redis.call('HSET', KEYS[4], 'holder' .. i, record)
        end
        redis.call('PEXPIRE', KEYS[2], '600000')
        return redis.call('PEXPIRE', KEYS[4], '600000')";
    by_hand(SEMAPHORE, code, &[&HELD.to_string(), ends]).run(server);
    // Makes the script recount, since the keys were changed by hand.
    release("stranger", "semaphore").run(server);
}

/// Adds waiters to the front of a queue.
fn wait_many(server: &RedisServer, of: &str, record: &str) {
    let code = "for i = 1, ARGV[1] do
            redis.call('ZADD', KEYS[3], i - ARGV[1] - 1, 'dead' .. i .. ' ' .. ARGV[2])
        end
        return redis.call('PEXPIRE', KEYS[3], '600000')";
    by_hand(of, code, &[DEAD, record]).run(server);
}

/// Compares costs, with a tolerance: a step may or may not have to extend the expiry of a key.
#[track_caller]
fn same_costs(many: &[u64], few: &[u64]) {
    let costs = many.iter().zip(few);
    assert!(costs.clone().all(|(many, few)| many.abs_diff(*few) <= 4), "{many:?} and {few:?}");
}

#[test]
fn the_cost_of_a_permit_does_not_depend_on_the_permits_held() {
    let server = RedisServer::start_or_panic();
    let steps = [
        permits("new", false, 1, 10_000),
        permits("new", false, 1, 10_000),
        release("new", "semaphore"),
        // More permits than are free: a try, and a waiter.
        permits("other", false, 5000, 10_000),
        permits("other", true, 5000, 10_000),
        permits("other", true, 5000, 10_000),
        permits("third", true, 1, 10_000),
        permits("other", true, 5000, 10_000).release(),
        permits("third", true, 1, 10_000).release(),
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
fn the_cost_of_a_reader_does_not_depend_on_the_number_of_readers() {
    let server = RedisServer::start_or_panic();
    let steps = [
        attempt("new", "s", false, "0"),
        release("new", "lock"),
        attempt("other", "x", false, "0"),
        attempt("other", "x", true, "0"),
        attempt("other", "x", true, "0").release(),
    ];
    let costs = || steps.iter().map(|step| counted(&server, step).1).collect::<Vec<_>>();
    attempt("one", "s", false, "0").run(&server);
    let few = costs();
    let code = "for i = 1, 8000 do
            redis.call('ZADD', KEYS[2], ARGV[1], 'holder' .. i)
            redis.call('HSET', KEYS[4], 'holder' .. i, 'holder' .. i .. ' s 1 1 600000 1 1 0 - - a label')
        end
        return 1";
    by_hand(LOCK, code, &[FAR]).run(&server);
    same_costs(&costs(), &few);
}

#[test]
fn permits_of_many_dead_holders_are_freed_in_bounded_calls() {
    let server = RedisServer::start_or_panic();
    for queue in [false, true] {
        server.command(&["FLUSHALL"]);
        hold_many(&server, FAR);
        let first = permits("new", queue, 1, HELD);
        assert!(!first.run(&server).ends_with("again"), "all are held");
        // All leases end.
        let end_all = "for _, owner in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
                redis.call('ZADD', KEYS[2], '1', owner)
            end
            return 1";
        by_hand(SEMAPHORE, end_all, &[]).run(&server);
        let (fence, calls) = repeated(&server, &permits("new", queue, HELD, HELD).after(&[first]));
        assert!(fence.len() >= 16, "{fence}");
        assert!(calls > 20, "{calls} calls removed {HELD} holders");
        assert_eq!(release("new", "semaphore").run(&server), "1");
        assert_eq!(server.command(&["KEYS", "*"]), "");
    }
}

/// Even if it has not been removed yet.
#[test]
fn a_holder_whose_lease_has_ended_holds_nothing() {
    let server = RedisServer::start_or_panic();
    for queue in [false, true] {
        server.command(&["FLUSHALL"]);
        hold_many(&server, "1");
        let last = "holder999";
        assert_eq!(release(last, "semaphore").run(&server), "0");
        hold_many(&server, FAR);
        let end_some =
            "for i = 1, 1000 do redis.call('ZADD', KEYS[2], '1', 'holder' .. i) end return 1";
        by_hand(SEMAPHORE, end_some, &[]).run(&server);
        // It requests more permits than are free: its queue entry keeps its record.
        let ask = permits(last, queue, 10_000, 10_000);
        let (answer, _) = repeated(&server, &ask);
        assert!(answer.len() < 16, "{answer}");
        let waits = server.command(&["ZRANGE", &format!("{SEMAPHORE}:q"), "0", "-1"]);
        assert_eq!(waits.contains(" p 10000 10000 "), queue, "{waits}");
        assert_eq!(number(&server, &["ZCARD", &format!("{SEMAPHORE}:r")]), 7000);
        assert_eq!(ask.release().run(&server), "0");
    }
}

#[test]
fn a_release_removes_dead_waiters_in_bounded_calls() {
    let server = RedisServer::start_or_panic();
    let channel = "lockkeeper:wake:gone";
    for (what, ends, mode) in [
        ("expired waiters", "1", "x"),
        ("waiters of a dead process", FAR, "x"),
        ("readers of a dead process", FAR, "s"),
    ] {
        for then in ["x", "s"] {
            server.command(&["FLUSHALL"]);
            attempt("one", "x", true, "0").run(&server);
            let live = attempt("two", then, true, "0");
            live.run(&server);
            let record = format!("{mode} 1 1 600000 1 0 {ends} s {channel} a label");
            wait_many(&server, LOCK, &record);
            let (answer, calls) = repeated(&server, &release("one", "lock"));
            assert_eq!(answer, "0", "{what}: the first call released it");
            assert!(calls > 60, "{what}: {calls} calls");
            let (fence, commands) = counted(&server, &live);
            assert!(fence.len() >= 16 && commands <= MAX_COMMANDS, "{what}: {fence}, {commands}");
            assert_eq!(release("two", "lock").run(&server), "1");
            assert_eq!(server.command(&["KEYS", "*"]), "", "{what}");
        }
    }
}

#[test]
fn an_attempt_removes_dead_waiters_in_bounded_calls_and_then_replies() {
    let server = RedisServer::start_or_panic();
    for (of, mode) in [(LOCK, "x"), (LOCK, "s"), (SEMAPHORE, "p")] {
        for queue in [false, true] {
            server.command(&["FLUSHALL"]);
            wait_many(&server, of, &format!("{mode} 1 1 600000 1 0 1 s - a label"));
            let ask = attempt("one", mode, queue, "0");
            let (fence, calls) = repeated(&server, &ask);
            assert!(fence.len() >= 16, "{mode}: {fence}");
            assert!(calls > 60, "{mode}: {calls} calls");
        }
    }
}

/// When a lease ends, all waiters of a process retry at the same time, in shared calls.
#[test]
fn attempts_that_share_a_call_share_its_limit_of_removals() {
    let server = RedisServer::start_or_panic();
    let dead = |key: &str| number(&server, &["ZCARD", key]);
    let steps = |mode: &str| -> Vec<Step> {
        (0..64).map(|i| attempt(&format!("live{i}"), mode, true, "0")).collect()
    };
    for (of, mode) in [(LOCK, "x"), (LOCK, "s"), (SEMAPHORE, "p")] {
        server.command(&["FLUSHALL"]);
        wait_many(&server, of, &format!("{mode} 1 1 600000 1 0 1 s - a label"));
        let queue = format!("{of}:q");
        let before = dead(&queue);
        let answers = together(&server, &steps(mode));
        let removed = before + 64 - dead(&queue);
        assert!(removed <= 256, "{mode}: one call removed {removed} waiters");
        assert!(answers.iter().all(|answer| answer == "again"), "{mode}: {answers:?}");
        // Later calls grant the lock to the first waiter.
        let granted = (0..200).find_map(|_| {
            together(&server, &steps(mode)).into_iter().find(|answer| answer.len() >= 16)
        });
        assert!(granted.is_some(), "{mode}");
        assert!(dead(&queue) < 64, "{mode}");
    }
    // The same for expired leases.
    server.command(&["FLUSHALL"]);
    hold_many(&server, FAR);
    let end_all = "for _, owner in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
            redis.call('ZADD', KEYS[2], '1', owner)
        end
        return 1";
    by_hand(SEMAPHORE, end_all, &[]).run(&server);
    together(&server, &steps("p"));
    let removed = i64::from(HELD) - dead(&format!("{SEMAPHORE}:r"));
    assert!(removed <= 256 + 64, "one call removed {removed} holders");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_live_waiter_behind_many_dead_ones_acquires_at_once() {
    let server = RedisServer::start_or_panic();
    let keeper = open(&server.url()).await.ttl(secs(36_000));
    // After a release, a downgrade and a break. A downgrade skips only expired waiters: a writer of a dead process is
    // detected when the lock is granted to it, which does not happen while readers hold it.
    for (how, ends) in [("release", FAR), ("downgrade", "1"), ("break", FAR)] {
        let record = format!("x 1 1 600000 1 0 {ends} s lockkeeper:wake:gone a label");
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
    soon("the releases", keeper.close()).await;
    nothing_left(&keeper, &server).await;
}
