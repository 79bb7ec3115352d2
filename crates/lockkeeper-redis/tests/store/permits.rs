//! The permits in use never exceed the smallest limit of their holders, even after keys were deleted or changed.

use std::collections::BTreeMap;

use lockkeeper_testkit::server::RedisServer;

use crate::scripts::{SEMAPHORE, break_it, by_hand, permits, release};

/// Owners, the permits that each takes, and its limit.
const OWNERS: [(&str, u32, u32); 6] =
    [("a", 1, 3), ("b", 2, 4), ("c", 3, 4), ("d", 1, 5), ("e", 2, 6), ("f", 3, 6)];

/// Returns the holders whose leases have not ended, with their permits and limits.
fn holders(server: &RedisServer) -> BTreeMap<String, (u32, u32)> {
    let code = "local found = {}
        for _, owner in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '2', '+inf')) do
            found[#found + 1] = redis.call('HGET', KEYS[4], owner) or owner
        end
        return found";
    let found = by_hand(SEMAPHORE, code, &[]).run(server);
    let holder = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        (words[0].to_owned(), (words[2].parse().unwrap(), words[3].parse().unwrap()))
    };
    found.lines().map(holder).collect()
}

/// Returns the stored counters: holders and permits.
fn tally(server: &RedisServer) -> (usize, u32) {
    let text = server.command(&["HGET", &format!("{SEMAPHORE}:i"), "(tally)"]);
    if text == "(nil)" {
        return (0, 0);
    }
    let mut numbers = text.split(' ').map(|number| number.parse::<u32>().unwrap());
    (numbers.next().unwrap() as usize, numbers.next().unwrap())
}

#[test]
fn random_steps_never_exceed_the_limit_and_refuse_no_attempt_that_fits() {
    let server = RedisServer::start_or_panic();
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut grants, mut refusals) = (0, 0);
    for step in 0..3000 {
        let case = format!("seed {seed}, step {step}");
        let (owner, take, of) = OWNERS[random.usize(..OWNERS.len())];
        let before = holders(&server);
        match random.u32(..100) {
            0..50 => {
                let queue = random.u32(..4) == 0;
                let answer = permits(owner, queue, take, of).run(&server);
                let after = holders(&server);
                if answer.len() >= 16 {
                    grants += 1;
                    assert!(after.contains_key(owner), "{case}");
                } else {
                    refusals += 1;
                    // The step may have granted permits to an earlier waiter.
                    let used: u32 = after.values().map(|held| held.0).sum();
                    let limit = after.values().map(|held| held.1).min().unwrap_or(of).min(of);
                    let waiters = server.command(&["ZRANGE", &format!("{SEMAPHORE}:q"), "0", "-1"]);
                    let others = waiters.lines().any(|waiter| !waiter.starts_with(owner));
                    assert!(
                        used + take > limit || others,
                        "{case}: {after:?} refuse {take} of {of}"
                    );
                }
            }
            50..80 => {
                let answer = permits(owner, true, take, of).release().run(&server);
                assert_eq!(
                    answer == "1",
                    before.contains_key(owner),
                    "{case}: {answer} {before:?}"
                );
            }
            80..92 => {
                let end = "return redis.call('ZADD', KEYS[2], 'XX', '1', ARGV[1])";
                by_hand(SEMAPHORE, end, &[owner]).run(&server);
                continue;
            }
            // Changes by other clients, and expiry of keys.
            92..94 => drop(server.command(&["DEL", &format!("{SEMAPHORE}:r")])),
            94..96 => drop(server.command(&["DEL", &format!("{SEMAPHORE}:i")])),
            96..97 => {
                let info = format!("{SEMAPHORE}:i");
                if random.bool() {
                    server.command(&["HDEL", &info, "(tally)"]);
                } else if !before.is_empty() {
                    server.command(&["HSET", &info, "(tally)", "not a tally"]);
                }
            }
            97..98 => drop(server.command(&["ZREM", &format!("{SEMAPHORE}:r"), owner])),
            _ => drop(break_it("semaphore").run(&server)),
        }
        // A sharer without a record does not count as a hold.
        let lost = "for _, owner in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
                if redis.call('HEXISTS', KEYS[4], owner) == 0 then redis.call('ZREM', KEYS[2], owner) end
            end
            return 1";
        by_hand(SEMAPHORE, lost, &[]).run(&server);
        let held = holders(&server);
        let used: u32 = held.values().map(|held| held.0).sum();
        let limit = held.values().map(|held| held.1).min().unwrap_or(u32::MAX);
        assert!(used <= limit, "{case}: {held:?}");
        // Any step corrects the counters.
        release("stranger", "semaphore").run(&server);
        let held = holders(&server);
        let used = held.values().map(|held| held.0).sum();
        assert_eq!(tally(&server), (held.len(), used), "{case}: {held:?}");
    }
    assert!(grants > 200 && refusals > 100, "seed {seed}: {grants} grants, {refusals} refusals");
}
