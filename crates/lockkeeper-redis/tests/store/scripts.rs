//! The scripts, called directly: they are idempotent, and every key has an expiry and the hash tag.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::{SystemTime, UNIX_EPOCH};

use lockkeeper_testkit::server::RedisServer;

use crate::common::number;

macro_rules! lua {
    ($($file:literal)+) => {
        concat!($(include_str!(concat!("../../src/", $file, ".lua")), "\n",)+)
    };
}

const STEPS: &str = lua!("claim/commands_fast" "claim/common" "claim/commands");
const RELEASE: &str = lua!("claim/release");
const RENEW: &str = lua!("claim/renew");
const DOWNGRADE: &str = lua!("claim/one" "claim/common" "claim/downgrade");
const BREAK: &str = lua!("claim/one" "claim/common" "inspect/break");
const LOOK: &str = lua!("inspect/look");

pub(crate) const LOCK: &str = "lockkeeper:{a}";
pub(crate) const SEMAPHORE: &str = "lockkeeper:{a}:s";
const SUFFIXES: [&str; 5] = ["", ":r", ":q", ":i", ":f"];
/// A TTL in milliseconds, longer than the tests take.
const TTL: &str = "600000";
/// The TTL of a waiter that must be notified if the lease ahead of it is [`TTL`]: less than a third of this.
const LONG: &str = "2400000";
/// When the queue entry of a waiter expires, in milliseconds.
pub(crate) const FAR: &str = "9000000000000";
/// A channel that may have a subscriber.
const CHANNEL: &str = "lockkeeper:wake:test";

/// A script with its keys and arguments.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) what: String,
    script: &'static str,
    keys: Vec<String>,
    args: Vec<String>,
}

impl Step {
    fn new(what: &str, script: &'static str, of: &str, args: &[&str]) -> Self {
        let keys = SUFFIXES.iter().map(|suffix| format!("{of}{suffix}")).collect();
        let args = args.iter().map(ToString::to_string).collect();
        Self { what: format!("{what} {args:?}"), script, keys, args }
    }

    pub(crate) fn run(&self, server: &RedisServer) -> String {
        let count = self.keys.len().to_string();
        let mut command = vec!["EVAL", self.script, &count];
        command.extend(self.keys.iter().chain(&self.args).map(String::as_str));
        server.command(&command)
    }
}

/// An attempt. The mode is x, s or p; permits are two of three.
pub(crate) fn attempt(owner: &str, mode: &str, queue: bool, floor: &str) -> Step {
    let word = format!("{mode}{}", if queue { "q" } else { "" });
    let (of, take, all) = if mode == "p" { (SEMAPHORE, "2", "3") } else { (LOCK, "1", "1") };
    let front = format!("{owner} {mode} {take} {all} {TTL} ");
    let waiting = format!("1700000000000000 {floor} {FAR} 7 ");
    let args = [&word, owner, TTL, floor, "0", &front, &waiting, "- a label", "0"];
    Step::new("attempt", STEPS, of, &args)
}

/// An attempt for permits, by a client that assumes this limit.
pub(crate) fn permits(owner: &str, queue: bool, take: u32, of: u32) -> Step {
    let mut step = attempt(owner, "p", queue, "0");
    step.args[5] = format!("{owner} p {take} {of} {TTL} ");
    step.what = format!("permits {take} of {of} for {owner}");
    step
}

/// Code that is no script of the store, with the keys of a lock or semaphore.
pub(crate) fn by_hand(of: &str, code: &'static str, args: &[&str]) -> Step {
    Step::new("by hand", code, of, args)
}

/// An attempt of a process that subscribes to a channel, with a ttl of its own.
fn listening(owner: &str, mode: &str, ttl: &str) -> Step {
    let mut step = attempt(owner, mode, true, "0");
    step.what = format!("{} with {ttl} on {CHANNEL}", step.what);
    ttl.clone_into(&mut step.args[2]);
    step.args[5] = format!("{owner} {mode} 1 1 {ttl} ");
    step.args[7] = format!("{CHANNEL} a label");
    step
}

/// The release of a claim whose records are not in the queue, with a fence that the clock has passed.
pub(crate) fn release(owner: &str, kind: &str) -> Step {
    let (of, word) = if kind == "lock" { (LOCK, "lt") } else { (SEMAPHORE, "mt") };
    Step::new("release", STEPS, of, &[word, owner, "1", "0"])
}

/// The release of a claim that expects no waiters.
fn free(owner: &str) -> Step {
    let mut step = Step::new("free", RELEASE, LOCK, &["1", &format!("{owner} ")]);
    step.keys = [0, 2].map(|which| step.keys[which].clone()).into();
    step
}

impl Step {
    /// The record of an attempt.
    fn record(&self) -> String {
        self.args[5..8].concat()
    }

    /// The same attempt or release by a claim that may have these records in the queue.
    pub(crate) fn after(mut self, earlier: &[Step]) -> Self {
        self.what = format!("{} after {}", self.what, earlier.len());
        *self.args.last_mut().unwrap() = earlier.len().to_string();
        self.args.extend(earlier.iter().map(Step::record));
        self
    }

    /// The same attempt by a claim that may have this record in the queue.
    pub(crate) fn after_record(mut self, record: &str) -> Self {
        "1".clone_into(self.args.last_mut().unwrap());
        self.args.push(record.to_owned());
        self
    }

    /// The same attempt by a claim that has just set the holder key without a script.
    pub(crate) fn unconfirmed(mut self) -> Self {
        self.args[0].push('u');
        self
    }

    /// The release of the claim that made this attempt.
    pub(crate) fn release(&self) -> Self {
        let kind = if self.args[0].starts_with('p') { "semaphore" } else { "lock" };
        release(&self.args[1], kind).after(std::slice::from_ref(self))
    }
}

/// All attempts that a test may have made for an owner.
fn all_attempts(owner: &str, kind: &str) -> Vec<Step> {
    let modes: &[&str] = if kind == "lock" { &["x", "s"] } else { &["p"] };
    let mut all = Vec::new();
    for mode in modes {
        all.extend(["0", ahead(), further_ahead()].map(|floor| attempt(owner, mode, true, floor)));
        if kind == "lock" {
            all.extend([TTL, LONG].map(|ttl| listening(owner, mode, ttl)));
        }
    }
    all
}

/// The release of a claim that may wait.
fn leave(owner: &str, kind: &str) -> Step {
    release(owner, kind).after(&all_attempts(owner, kind))
}

fn renew(owner: &str, mode: &str) -> Step {
    let of = if mode == "p" { SEMAPHORE } else { LOCK };
    let mut step = Step::new("renew", RENEW, of, &[owner, mode, "0", TTL]);
    step.keys = [0, 1, 3].map(|which| step.keys[which].clone()).into();
    step
}

fn downgrade(owner: &str) -> Step {
    Step::new("downgrade", DOWNGRADE, LOCK, &[owner, TTL, "0", "1"])
}

pub(crate) fn break_it(kind: &str) -> Step {
    let of = if kind == "lock" { LOCK } else { SEMAPHORE };
    Step::new("break", BREAK, of, &[kind, "1"])
}

fn look(of: &str) -> Step {
    Step::new("look", LOOK, of, &[])
}

/// Returns all keys with their contents.
fn dump(server: &RedisServer) -> BTreeMap<String, Vec<String>> {
    let keys = server.command(&["KEYS", "*"]);
    // A fence that is hardly ahead of the clock expires at any time.
    let is_gone = |key: &str| key.ends_with(":f") && number(server, &["PTTL", key]) < 100;
    let keys = keys.lines().filter(|key| !is_gone(key)).map(|key| {
        let read: &[&str] = match server.command(&["TYPE", key]).as_str() {
            "string" => &["GET", key],
            "zset" => &["ZRANGE", key, "0", "-1", "WITHSCORES"],
            "hash" => &["HGETALL", key],
            other => panic!("{key} is a {other}"),
        };
        let contents = server.command(read);
        let left = number(server, &["PTTL", key]);
        // All leases and queue entries here are new.
        assert!(left > 500_000, "{key} expires in {left} ms");
        assert!(key.starts_with("lockkeeper:{a}"), "{key} is in another slot of a cluster");
        // A sorted set is in the order of its scores, which are times. An entry is a pair of lines.
        let lines: Vec<&str> = contents.lines().collect();
        let mut pairs: Vec<_> = lines.chunks(2).collect();
        pairs.sort_unstable();
        let words = pairs.concat().into_iter().flat_map(|line| line.split(' '));
        (key.to_owned(), words.map(str::to_owned).collect())
    });
    keys.collect()
}

/// Returns whether two dumps are equal, except for small differences of times in milliseconds. Fences are in
/// microseconds.
fn same(once: &BTreeMap<String, Vec<String>>, twice: &BTreeMap<String, Vec<String>>) -> bool {
    let time = |word: &str| word.parse::<i64>().ok().filter(|ms| (1 << 40..1 << 43).contains(ms));
    let close = |(a, b): (&String, &String)| match (time(a), time(b)) {
        (Some(a), Some(b)) => (0..60_000).contains(&(b - a)),
        _ => a == b,
    };
    once.keys().eq(twice.keys())
        && once
            .values()
            .zip(twice.values())
            .all(|(once, twice)| once.len() == twice.len() && once.iter().zip(twice).all(close))
}

/// A fence that is ahead of the clock, by less than the limit.
fn ahead() -> &'static str {
    static AHEAD: LazyLock<String> = LazyLock::new(|| minutes_ahead(30));
    &AHEAD
}

/// A fence that is further ahead.
fn further_ahead() -> &'static str {
    static AHEAD: LazyLock<String> = LazyLock::new(|| minutes_ahead(40));
    &AHEAD
}

fn minutes_ahead(minutes: u128) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    (now.as_micros() + minutes * 60_000_000).to_string()
}

/// Returns states of a lock, with the steps that create them.
fn states() -> Vec<(&'static str, Vec<Step>)> {
    let x = |owner| attempt(owner, "x", true, "0");
    let s = |owner| attempt(owner, "s", true, "0");
    let p = |owner| attempt(owner, "p", true, "0");
    vec![
        ("free", vec![]),
        ("held", vec![x("one")]),
        ("held, writer waits", vec![x("one"), x("two")]),
        ("held, three wait", vec![x("one"), s("two"), s("three"), x("four")]),
        ("read", vec![s("one"), s("two")]),
        ("read, writer and reader wait", vec![s("one"), x("two"), s("three")]),
        ("permits held", vec![p("one")]),
        ("permits held, others wait", vec![p("one"), p("two"), p("three")]),
        ("a fence ahead", vec![attempt("one", "x", true, ahead()), x("two")]),
        ("held, with a fence ahead", vec![attempt("one", "x", true, ahead())]),
        (
            "free, with a fence ahead",
            vec![attempt("one", "x", true, ahead()), release("one", "lock")],
        ),
    ]
}

fn steps() -> Vec<Step> {
    let mut steps = vec![downgrade("one"), downgrade("stranger"), look(LOCK), look(SEMAPHORE)];
    for owner in ["one", "two", "three", "new"] {
        // Only these may have a queue entry.
        let may_wait = ["two", "three"].contains(&owner);
        for mode in ["x", "s", "p"] {
            let kind = if mode == "p" { "semaphore" } else { "lock" };
            for (queue, floor) in [(true, "0"), (false, "0"), (true, further_ahead())] {
                let step = attempt(owner, mode, queue, floor);
                // A claim that does not queue has no records.
                let earlier = all_attempts(owner, kind);
                steps.push(if may_wait && queue { step.after(&earlier) } else { step });
            }
            steps.push(renew(owner, mode));
        }
        steps.push(free(owner));
        for kind in ["lock", "semaphore"] {
            steps.push(leave(owner, kind));
            if !may_wait {
                steps.push(release(owner, kind));
            }
        }
    }
    steps
}

fn set_up(server: &RedisServer, state: &[Step]) {
    server.command(&["FLUSHALL"]);
    for step in state {
        step.run(server);
    }
}

#[test]
fn every_script_is_idempotent() {
    let server = RedisServer::start_or_panic();
    let mut grants = 0;
    for (state, made) in states() {
        for step in steps() {
            set_up(&server, &made);
            let first = step.run(&server);
            let once = dump(&server);
            let second = step.run(&server);
            let twice = dump(&server);
            let case = format!("{} on {state}", step.what);
            assert!(same(&once, &twice), "{case}: {once:#?}\n{twice:#?}");
            // A grant is a fence, in microseconds. A refusal has two lines: the rest of the lease in milliseconds, and
            // the holder.
            let granted = first.len() >= 16 && first.lines().count() == 1;
            if step.what.starts_with("attempt") && granted {
                grants += 1;
                assert_eq!(first, second, "{case}: the repeated grant has another fence");
            }
        }
    }
    assert!(grants > 20, "{grants}");
}

/// Runs steps in one call. Returns the reply to each.
pub(crate) fn together(server: &RedisServer, steps: &[Step]) -> Vec<String> {
    let mut all = Step::new("together", STEPS, LOCK, &[]);
    all.keys = steps.iter().flat_map(|step| step.keys.clone()).collect();
    all.args = steps.iter().flat_map(|step| step.args.clone()).collect();
    all.run(server).lines().map(str::to_owned).collect()
}

#[test]
fn steps_in_one_call_are_executed_in_order() {
    let server = RedisServer::start_or_panic();
    for (state, made) in states() {
        let taken: Vec<Step> = steps().into_iter().filter(|step| step.script == STEPS).collect();
        // In this order and in reverse.
        for taken in [taken.clone(), taken.into_iter().rev().collect::<Vec<_>>()] {
            set_up(&server, &made);
            let apart: Vec<String> = taken.iter().map(|step| step.run(&server)).collect();
            let apart: Vec<String> =
                apart.iter().flat_map(|answer| answer.lines()).map(str::to_owned).collect();
            let after = dump(&server);
            set_up(&server, &made);
            let together = together(&server, &taken);
            // Times differ, but their number of digits shows their kind.
            let kinds = |answers: &[String]| answers.iter().map(String::len).collect::<Vec<_>>();
            assert_eq!(kinds(&apart), kinds(&together), "{state}");
            assert!(after.keys().eq(dump(&server).keys()), "{state}");
        }
    }
}

/// Returns all keys with their contents, with times replaced by their number of digits.
fn shape(server: &RedisServer) -> BTreeMap<String, Vec<String>> {
    let timeless = |word: String| match word.parse::<u64>() {
        // Fences ahead of the clock are far ahead here, and are not replaced.
        Ok(1_000_000_000_000..3_000_000_000_000_000) => format!("{} digits", word.len()),
        _ => word,
    };
    let keys = dump(server).into_iter();
    keys.map(|(key, words)| (key, words.into_iter().map(timeless).collect())).collect()
}

/// Returns states in which a release hands off, or nearly does.
fn states_to_hand_off() -> Vec<(&'static str, Vec<Step>)> {
    let x = |owner| listening(owner, "x", TTL);
    let by_hand = |code| Step::new("by hand", code, LOCK, &[TTL]);
    let mut wants_a_fence = x("two");
    further_ahead().clone_into(&mut wants_a_fence.args[3]);
    wants_a_fence.args[6] = format!("1700000000000000 {} {FAR} 7 ", further_ahead());
    // A label that looks like the fields of a record.
    let mut strange = listening("three", "x", LONG);
    strange.args[7] = format!("{CHANNEL} z x 1 1 {TTL} z");
    let too_long = by_hand(
        "for _, record in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
            if string.sub(record, 1, 4) == 'two ' then
                local place = redis.call('ZSCORE', KEYS[3], record)
                redis.call('ZREM', KEYS[3], record)
                redis.call('ZADD', KEYS[3], place, (record:gsub(' %d+ 7 ', ' 1 7 ')))
            end
        end
        return 1",
    );
    let no_readers = by_hand("return redis.call('SET', KEYS[1], '(readers)', 'PX', ARGV[1])");
    let ended = by_hand("return redis.call('DEL', KEYS[1])");
    let clock_back = by_hand(
        "local record = redis.call('GET', KEYS[1])
        record = record:gsub('600000 (%d+) %d+', '600000 %1 4000000000000000')
        return redis.call('SET', KEYS[1], record, 'PX', ARGV[1])",
    );
    vec![
        ("held, one subscribed waiter", vec![x("one"), x("two")]),
        ("held, three subscribed waiters", vec![x("one"), x("two"), x("three"), x("new")]),
        (
            "held, the last waiter has a long TTL",
            vec![x("one"), x("two"), listening("three", "x", LONG)],
        ),
        (
            "held, the first waiter has a long TTL",
            vec![x("one"), listening("two", "x", LONG), x("three")],
        ),
        (
            "held, the last waiter is a reader",
            vec![x("one"), x("two"), listening("three", "s", TTL)],
        ),
        (
            "held, the first waiter is a reader",
            vec![x("one"), listening("two", "s", TTL), x("three")],
        ),
        (
            "held, the last waiter is not subscribed",
            vec![x("one"), x("two"), attempt("three", "x", true, "0")],
        ),
        ("held, the first waiter has a floor", vec![x("one"), wants_a_fence, x("three")]),
        (
            "held, the first waiter has expired",
            vec![x("one"), x("two"), x("three"), too_long.clone()],
        ),
        (
            "held, the second waiter has expired",
            vec![x("one"), x("three"), x("two"), too_long.clone()],
        ),
        (
            "held, the second waiter has expired, the third has a long TTL",
            vec![x("one"), x("new"), x("two"), listening("three", "x", LONG), too_long],
        ),
        ("held, the last has a strange label", vec![x("one"), x("two"), strange]),
        ("held by readers who are gone", vec![no_readers.clone()]),
        ("held, the clock went back", vec![x("one"), x("two"), clock_back]),
        (
            "its holder's lease has ended, a fence was ahead, one waits",
            vec![attempt("one", "x", true, ahead()), x("two"), ended],
        ),
        ("held by readers that do not exist, one waits", vec![x("one"), x("two"), no_readers]),
    ]
}

#[test]
fn the_fast_script_has_the_same_effects_as_the_full_script() {
    let server = RedisServer::start_or_panic();
    let client = redis::Client::open(server.url()).unwrap();
    let (mut quiet, mut other) =
        (client.get_connection().unwrap(), client.get_connection().unwrap());
    let mut listener = quiet.as_pubsub();
    let mut others = other.as_pubsub();
    others.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
    // Subscribers outside the queue, and a channel that marks the end.
    others.subscribe(&[LOCK, "end"]).unwrap();
    let whole = STEPS;
    let without: &'static str = whole.replacen("while true do", "while false do", 1).leak();
    assert_ne!(whole, without);
    let mut all = states();
    all.extend(states_to_hand_off());
    let mut steps = steps();
    steps.extend(["one", "new"].map(|owner| listening(owner, "x", TTL)));
    steps.retain(|step| step.script == STEPS);
    for is_subscribed in [true, false] {
        if is_subscribed {
            listener.subscribe(CHANNEL).unwrap();
            others.subscribe(CHANNEL).unwrap();
        } else {
            listener.unsubscribe(CHANNEL).unwrap();
            others.unsubscribe(CHANNEL).unwrap();
        }
        for (state, made) in &all {
            for step in &steps {
                let mut run = |script| {
                    set_up(&server, made);
                    server.command(&["PUBLISH", "end", "of the state"]);
                    while others.get_message().unwrap().get_channel_name() != "end" {}
                    let answer = Step { script, ..step.clone() }.run(&server);
                    server.command(&["PUBLISH", "end", "of the step"]);
                    let mut said = Vec::new();
                    loop {
                        let message = others.get_message().unwrap();
                        if message.get_channel_name() == "end" {
                            break;
                        }
                        let text = message.get_payload::<String>().unwrap();
                        said.push(text.split(' ').take(3).collect::<Vec<_>>().join(" "));
                    }
                    let held = server.command(&["GET", LOCK]);
                    (answer.len(), said, shape(&server), held.split(' ').count())
                };
                let (long, short) = (run(without), run(whole));
                assert_eq!(short, long, "{} on {state}, subscribed: {is_subscribed}", step.what);
            }
        }
    }
}

#[test]
fn a_release_without_waiters_has_the_effects_of_the_full_release_or_none() {
    let server = RedisServer::start_or_panic();
    let mut all = states();
    all.extend(states_to_hand_off());
    let mut freed = 0;
    for (state, made) in &all {
        for owner in ["one", "two", "on", "new"] {
            set_up(&server, made);
            release(owner, "lock").run(&server);
            let released = dump(&server);
            set_up(&server, made);
            let before = dump(&server);
            let is_free = free(owner).run(&server) == "1";
            let expected = if is_free { released } else { before };
            assert!(same(&expected, &dump(&server)), "{owner} on {state}, freed: {is_free}");
            freed += usize::from(is_free);
        }
    }
    assert!(freed >= 2, "{freed}");
}

#[test]
fn releases_without_waiters_share_a_call() {
    let server = RedisServer::start_or_panic();
    attempt("one", "x", true, "0").run(&server);
    server.command(&["SET", "lockkeeper:{b}", "two x 1 1 1 1 0 0 - - two"]);
    server.command(&["LPUSH", "lockkeeper:{c}", "of another type"]);
    let mut all = free("one");
    for (owner, name) in [("two", "b"), ("three", "c"), ("four", "d")] {
        all.keys.extend(["", ":q"].map(|suffix| format!("lockkeeper:{{{name}}}{suffix}")));
        all.args.push(format!("{owner} "));
    }
    assert_eq!(all.run(&server).lines().collect::<Vec<_>>(), ["1", "1", "0", "0"]);
    assert_eq!(server.command(&["KEYS", "*"]), "lockkeeper:{c}");
}

/// Monitoring tools subscribe to all channels by a pattern.
#[test]
fn a_pattern_subscriber_does_not_make_a_dead_waiter_a_live_one() {
    let server = RedisServer::start_or_panic();
    let client = redis::Client::open(server.url()).unwrap();
    let mut connection = client.get_connection().unwrap();
    let mut watcher = connection.as_pubsub();
    watcher.psubscribe("*").unwrap();
    for step in [attempt("one", "x", true, "0"), listening("two", "x", TTL), release("one", "lock")]
    {
        step.run(&server);
    }
    assert_eq!(server.command(&["KEYS", "*"]), "");
}

#[test]
fn fences_rise_within_a_call_that_is_faster_than_the_clock() {
    let server = RedisServer::start_or_panic();
    let mut taken = Vec::new();
    for owner in ["one", "two", "three", "four", "five", "six"] {
        taken.push(attempt(owner, "x", false, "0"));
        taken.push(release(owner, "lock"));
    }
    // Also with a queue.
    taken.extend(["one", "two", "three"].map(|owner| attempt(owner, "x", true, "0")));
    taken.extend(["one", "two"].map(|owner| release(owner, "lock")));
    taken.push(attempt("three", "x", true, "0"));
    for _ in 0..20 {
        server.command(&["FLUSHALL"]);
        let answers = together(&server, &taken);
        let fences: Vec<u64> = answers
            .iter()
            .filter_map(|answer| answer.trim_end_matches(" ahead").parse().ok())
            .filter(|&fence| fence > 1 << 50)
            .collect();
        assert_eq!(fences.len(), 8, "{answers:?}");
        assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
    }
}

#[test]
fn a_failed_step_does_not_affect_the_others_of_its_call() {
    let server = RedisServer::start_or_panic();
    server.command(&["LPUSH", "other:{b}", "something else"]);
    let elsewhere = |mut step: Step| {
        step.keys = SUFFIXES.iter().map(|suffix| format!("other:{{b}}{suffix}")).collect();
        step
    };
    let answers = together(
        &server,
        &[
            elsewhere(attempt("one", "x", true, "0")),
            attempt("one", "x", true, "0"),
            elsewhere(release("one", "lock")),
            release("one", "lock"),
        ],
    );
    assert_eq!(answers.len(), 4, "{answers:?}");
    assert!(answers[0].contains("WRONGTYPE") && answers[2].contains("WRONGTYPE"), "{answers:?}");
    assert!(answers[1].len() >= 16 && answers[3] == "1", "{answers:?}");
}

/// Not with waiters: then a second break also breaks the lock of the new holder.
#[test]
fn a_break_is_idempotent_without_waiters() {
    let server = RedisServer::start_or_panic();
    for (state, made) in states() {
        if state.contains("wait") || state.contains("ahead") {
            continue;
        }
        for kind in ["lock", "semaphore"] {
            set_up(&server, &made);
            break_it(kind).run(&server);
            let once = dump(&server);
            assert_eq!(break_it(kind).run(&server), "0", "{kind} on {state}");
            assert!(same(&once, &dump(&server)), "{kind} on {state}");
        }
    }
}

#[test]
fn an_inspection_and_a_refused_try_change_nothing() {
    let server = RedisServer::start_or_panic();
    for (state, made) in states() {
        set_up(&server, &made);
        let before = dump(&server);
        let mut steps = vec![look(LOCK), look(SEMAPHORE)];
        if !before.is_empty() {
            let tries = ["x", "s", "p"].map(|mode| attempt("new", mode, false, "0"));
            let contended = tries.into_iter().filter(|step| {
                let answer = step.run(&server);
                set_up(&server, &made);
                answer.starts_with("0\n")
            });
            steps.extend(contended);
        }
        let before = dump(&server);
        for step in steps {
            step.run(&server);
            let after = dump(&server);
            assert!(same(&before, &after), "{} on {state}", step.what);
        }
    }
}

#[test]
fn releases_leave_no_key_in_any_state() {
    let server = RedisServer::start_or_panic();
    for (state, made) in states() {
        set_up(&server, &made);
        for owner in ["four", "two", "one", "three"] {
            leave(owner, "lock").run(&server);
            leave(owner, "semaphore").run(&server);
        }
        let mut left = dump(&server);
        // The stored fence stays until the clock has passed it.
        let fence = left.remove("lockkeeper:{a}:f");
        assert_eq!(fence.is_some(), state.contains("ahead"), "{state}");
        assert!(left.is_empty(), "{state}: {left:?}");
    }
}

/// Checks the source: a cluster does not route keys that are not in KEYS.
#[test]
fn scripts_use_only_the_keys_that_they_are_given() {
    let given = [
        "HOLDER",
        "SHARERS",
        "QUEUE",
        "INFO",
        "FENCE",
        "KEYS[1]",
        "KEYS[2]",
        "KEYS[3]",
        "KEYS[4]",
        "KEYS[5]",
        "KEYS[key]",
        "KEYS[key + 2]",
        "key",
        "holder",
        "sharers",
        "info",
    ];
    let mut calls = 0;
    for script in [STEPS, RENEW, DOWNGRADE, BREAK, LOOK] {
        for call in script.split("call('").chain(script.split("try('")).skip(1) {
            let Some((command, rest)) = call.split_once('\'') else { continue };
            if command.contains(|c: char| !c.is_ascii_uppercase()) || command == "TIME" {
                continue;
            }
            // A channel is not a key.
            if ["PUBLISH", "PUBSUB"].contains(&command) {
                continue;
            }
            let arguments = rest.strip_prefix(", ").unwrap_or_else(|| panic!("{command}: {rest}"));
            let end = arguments.find([',', ')']).unwrap();
            assert!(given.contains(&&arguments[..end]), "{command} {}", &arguments[..end]);
            calls += 1;
        }
        assert!(!script.contains("KEYS[1] ..") && !script.contains("HOLDER .."));
    }
    assert!(calls > 60, "{calls}");
}
