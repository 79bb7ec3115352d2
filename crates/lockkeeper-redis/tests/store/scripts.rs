//! The scripts, run by hand: twice is once, every key has an expiry and the hash tag.

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
const RENEW: &str = lua!("claim/renew");
const DOWNGRADE: &str = lua!("claim/one" "claim/common" "claim/downgrade");
const BREAK: &str = lua!("claim/one" "claim/common" "inspect/break");
const LOOK: &str = lua!("inspect/look");

pub(crate) const LOCK: &str = "lockkeeper:{a}";
pub(crate) const SEMAPHORE: &str = "lockkeeper:{a}:s";
const SUFFIXES: [&str; 6] = ["", ":x", ":r", ":q", ":i", ":f"];
/// So long that nothing ends on the way.
const TTL: &str = "600000";
/// Long enough that it must be told of a lease that is shorter.
const LONG: &str = "2400000";
/// Where somebody may listen.
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

/// The mode is x, s or p; permits are two of three.
pub(crate) fn attempt(owner: &str, mode: &str, queue: bool, floor: &str) -> Step {
    let word = format!("{mode}{}", if queue { "q" } else { "" });
    let (of, take, all) = if mode == "p" { (SEMAPHORE, "2", "3") } else { (LOCK, "1", "1") };
    let head = format!(" {mode} {take} {all} {TTL} ");
    let args = [&word, owner, TTL, floor, &head, " 7 - a label"];
    Step::new("attempt", STEPS, of, &args)
}

/// An attempt for permits, by a client that knows of so many.
pub(crate) fn permits(owner: &str, queue: bool, take: u32, of: u32) -> Step {
    let mut step = attempt(owner, "p", queue, "0");
    step.args[4] = format!(" p {take} {of} {TTL} ");
    step.what = format!("permits {take} of {of} for {owner}");
    step
}

/// Code to be run by hand, with the keys of a lock or semaphore.
pub(crate) fn by_hand(of: &str, code: &'static str, args: &[&str]) -> Step {
    Step::new("by hand", code, of, args)
}

/// The same for a waiter whose process listens on a channel, with a ttl of its own.
fn listening(owner: &str, mode: &str, ttl: &str) -> Step {
    let mut step = attempt(owner, mode, true, "0");
    step.what = format!("{} with {ttl} on {CHANNEL}", step.what);
    ttl.clone_into(&mut step.args[2]);
    step.args[4] = format!(" {mode} 1 1 {ttl} ");
    step.args[5] = format!(" 7 {CHANNEL} a label");
    step
}

pub(crate) fn release(owner: &str, kind: &str) -> Step {
    let (of, word) = if kind == "lock" { (LOCK, "lt") } else { (SEMAPHORE, "mt") };
    Step::new("release", STEPS, of, &[word, owner])
}

fn renew(owner: &str, mode: &str) -> Step {
    let of = if mode == "p" { SEMAPHORE } else { LOCK };
    let mut step = Step::new("renew", RENEW, of, &[owner, mode, TTL]);
    step.keys = [0, 1, 2, 4].map(|which| step.keys[which].clone()).into();
    step
}

fn downgrade(owner: &str) -> Step {
    Step::new("downgrade", DOWNGRADE, LOCK, &[owner, TTL, "1"])
}

pub(crate) fn break_it(kind: &str) -> Step {
    let of = if kind == "lock" { LOCK } else { SEMAPHORE };
    Step::new("break", BREAK, of, &[kind, "1"])
}

fn look(of: &str) -> Step {
    Step::new("look", LOOK, of, &[])
}

/// Everything in the database: each key with its contents.
fn dump(server: &RedisServer) -> BTreeMap<String, Vec<String>> {
    let keys = server.command(&["KEYS", "*"]);
    // A fence may be ahead of the clock by a moment only.
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
        // All that is held or waits here has just been given its time.
        assert!(left > 500_000, "{key} expires in {left} ms");
        assert!(key.starts_with("lockkeeper:{a}"), "{key} is elsewhere on a cluster");
        // A set is in the order of its scores, which are times; an entry is a pair of lines.
        let lines: Vec<&str> = contents.lines().collect();
        let mut pairs: Vec<_> = lines.chunks(2).collect();
        pairs.sort_unstable();
        let words = pairs.concat().into_iter().flat_map(|line| line.split(' '));
        (key.to_owned(), words.map(str::to_owned).collect())
    });
    keys.collect()
}

/// The same, but for times in milliseconds, which may have gone on a little. Fences are in microseconds.
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

/// A fence that is ahead of the clock, and yet plausible.
fn ahead() -> &'static str {
    static AHEAD: LazyLock<String> = LazyLock::new(|| minutes_ahead(30));
    &AHEAD
}

/// One that is further ahead.
fn further_ahead() -> &'static str {
    static AHEAD: LazyLock<String> = LazyLock::new(|| minutes_ahead(40));
    &AHEAD
}

fn minutes_ahead(minutes: u128) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    (now.as_micros() + minutes * 60_000_000).to_string()
}

/// States that a step may meet: how they come about.
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
    let mut steps = vec![downgrade("one"), downgrade("nobody"), look(LOCK), look(SEMAPHORE)];
    for owner in ["one", "two", "three", "new"] {
        for mode in ["x", "s", "p"] {
            steps.push(attempt(owner, mode, true, "0"));
            steps.push(attempt(owner, mode, false, "0"));
            steps.push(attempt(owner, mode, true, further_ahead()));
            steps.push(renew(owner, mode));
        }
        steps.push(release(owner, "lock"));
        steps.push(release(owner, "semaphore"));
    }
    steps
}

fn come_to(server: &RedisServer, state: &[Step]) {
    server.command(&["FLUSHALL"]);
    for step in state {
        step.run(server);
    }
}

#[test]
fn every_script_run_twice_is_run_once() {
    let server = RedisServer::start_or_panic();
    let mut grants = 0;
    for (state, made) in states() {
        for step in steps() {
            come_to(&server, &made);
            let first = step.run(&server);
            let once = dump(&server);
            let second = step.run(&server);
            let twice = dump(&server);
            let case = format!("{} on {state}", step.what);
            assert!(same(&once, &twice), "{case}: {once:#?}\n{twice:#?}");
            // A fence is in microseconds, what is left of a lease in milliseconds.
            // A refusal has two lines, what is left and the holder.
            let granted = first.len() >= 16 && first.lines().count() == 1;
            if step.what.starts_with("attempt") && granted {
                grants += 1;
                assert_eq!(first, second, "{case}: the same grant with the same fence");
            }
        }
    }
    assert!(grants > 20, "{grants}");
}

/// Runs steps in one call; the answer to each.
pub(crate) fn together(server: &RedisServer, steps: &[Step]) -> Vec<String> {
    let mut all = Step::new("together", STEPS, LOCK, &[]);
    all.keys = steps.iter().flat_map(|step| step.keys.clone()).collect();
    all.args = steps.iter().flat_map(|step| step.args.clone()).collect();
    all.run(server).lines().map(str::to_owned).collect()
}

#[test]
fn steps_that_share_a_call_are_taken_one_after_the_other() {
    let server = RedisServer::start_or_panic();
    for (state, made) in states() {
        let taken: Vec<Step> = steps().into_iter().filter(|step| step.script == STEPS).collect();
        // In this order and in the other.
        for taken in [taken.clone(), taken.into_iter().rev().collect::<Vec<_>>()] {
            come_to(&server, &made);
            let apart: Vec<String> = taken.iter().map(|step| step.run(&server)).collect();
            let apart: Vec<String> =
                apart.iter().flat_map(|answer| answer.lines()).map(str::to_owned).collect();
            let after = dump(&server);
            come_to(&server, &made);
            let together = together(&server, &taken);
            // Times are not the same, but how long they are tells what they are.
            let kinds = |answers: &[String]| answers.iter().map(String::len).collect::<Vec<_>>();
            assert_eq!(kinds(&apart), kinds(&together), "{state}");
            assert!(after.keys().eq(dump(&server).keys()), "{state}");
        }
    }
}

/// Everything in the database, without what is another time each time.
fn shape(server: &RedisServer) -> BTreeMap<String, Vec<String>> {
    let timeless = |word: String| match word.parse::<u64>() {
        // Fences that are ahead of the clock are far ahead here, and no times.
        Ok(1_000_000_000_000..3_000_000_000_000_000) => format!("{} digits", word.len()),
        _ => word,
    };
    let keys = dump(server).into_iter();
    keys.map(|(key, words)| (key, words.into_iter().map(timeless).collect())).collect()
}

/// States in which a release hands over, or nearly does.
fn states_to_hand_over() -> Vec<(&'static str, Vec<Step>)> {
    let x = |owner| listening(owner, "x", TTL);
    let by_hand = |code| Step::new("by hand", code, LOCK, &[TTL]);
    let mut wants_a_fence = x("two");
    further_ahead().clone_into(&mut wants_a_fence.args[3]);
    // Looks like an heir's record, but is a label.
    let mut strange = listening("three", "x", LONG);
    strange.args[5] = format!(" 7 {CHANNEL} z x 1 1 {TTL} z");
    let too_long = by_hand(
        "local record = redis.call('HGET', KEYS[5], 'two')
        return redis.call('HSET', KEYS[5], 'two', (record:gsub('600000 %d+ 7', '600000 1 7')))",
    );
    let no_readers = by_hand("return redis.call('SET', KEYS[1], '(readers)', 'PX', ARGV[1])");
    let ghost = by_hand(
        "redis.call('ZADD', KEYS[3], '4000000000000', 'ghost')
        redis.call('HSET', KEYS[5], 'ghost', '1 1 s 1 1 600000 0 7 - a label')
        redis.call('PEXPIRE', KEYS[5], ARGV[1])
        return redis.call('PEXPIRE', KEYS[3], ARGV[1])",
    );
    let fence_ahead =
        by_hand("return redis.call('SET', KEYS[6], '4000000000000000', 'PX', ARGV[1])");
    let ended = by_hand("return redis.call('DEL', KEYS[1], KEYS[2])");
    let clock_back = by_hand(
        "local record = redis.call('GET', KEYS[2])
        record = record:gsub('^(%d+) %d+', '%1 4000000000000000')
        return redis.call('SET', KEYS[2], record, 'PX', ARGV[1])",
    );
    vec![
        ("held, one listens", vec![x("one"), x("two")]),
        ("held, three listen", vec![x("one"), x("two"), x("three"), x("new")]),
        (
            "held, the last listens for long",
            vec![x("one"), x("two"), listening("three", "x", LONG)],
        ),
        (
            "held, the first listens for long",
            vec![x("one"), listening("two", "x", LONG), x("three")],
        ),
        ("held, a reader listens last", vec![x("one"), x("two"), listening("three", "s", TTL)]),
        ("held, a reader listens first", vec![x("one"), listening("two", "s", TTL), x("three")]),
        ("held, the last is deaf", vec![x("one"), x("two"), attempt("three", "x", true, "0")]),
        ("held, the first wants a fence", vec![x("one"), wants_a_fence, x("three")]),
        (
            "held, the first has waited too long",
            vec![x("one"), x("two"), x("three"), too_long.clone()],
        ),
        (
            "held, the second has waited too long",
            vec![x("one"), x("three"), x("two"), too_long.clone()],
        ),
        (
            "held, the second has waited too long, the third waits for long",
            vec![x("one"), x("new"), x("two"), listening("three", "x", LONG), too_long],
        ),
        ("held, the last has a strange label", vec![x("one"), x("two"), strange]),
        ("held by readers who are gone", vec![no_readers.clone()]),
        ("held, readers have lost it", vec![x("one"), ghost.clone()]),
        ("held, readers have lost it, one waits", vec![x("one"), x("two"), ghost]),
        ("held, a fence was ahead, one waits", vec![x("one"), x("two"), fence_ahead.clone()]),
        ("held, a fence was ahead", vec![x("one"), fence_ahead]),
        ("held, the clock went back", vec![x("one"), x("two"), clock_back]),
        (
            "its holder's lease has ended, a fence was ahead, one waits",
            vec![attempt("one", "x", true, ahead()), x("two"), ended],
        ),
        ("held by readers who are gone, one waits", vec![x("one"), x("two"), no_readers]),
    ]
}

#[test]
fn the_short_part_does_nothing_but_what_the_long_part_does() {
    let server = RedisServer::start_or_panic();
    let client = redis::Client::open(server.url()).unwrap();
    let (mut quiet, mut other) =
        (client.get_connection().unwrap(), client.get_connection().unwrap());
    let mut listener = quiet.as_pubsub();
    let mut others = other.as_pubsub();
    others.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
    // Those who listen without a place in the queue, and a last word.
    others.subscribe(&[LOCK, "end"]).unwrap();
    let whole = STEPS;
    let without: &'static str = whole.replacen("while true do", "while false do", 1).leak();
    assert_ne!(whole, without);
    let mut all = states();
    all.extend(states_to_hand_over());
    let mut steps = steps();
    steps.extend(["one", "two", "three", "new"].map(|owner| listening(owner, "x", TTL)));
    steps.retain(|step| step.script == STEPS);
    for is_heard in [true, false] {
        if is_heard {
            listener.subscribe(CHANNEL).unwrap();
            others.subscribe(CHANNEL).unwrap();
        } else {
            listener.unsubscribe(CHANNEL).unwrap();
            others.unsubscribe(CHANNEL).unwrap();
        }
        for (state, made) in &all {
            for step in &steps {
                let mut run = |script| {
                    come_to(&server, made);
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
                    let held = server.command(&["GET", &format!("{LOCK}:x")]);
                    (answer.len(), said, shape(&server), held.split(' ').count())
                };
                let (long, short) = (run(without), run(whole));
                assert_eq!(short, long, "{} on {state}, heard: {is_heard}", step.what);
            }
        }
    }
}

#[test]
fn fences_rise_within_a_call_that_no_clock_could_tell_apart() {
    let server = RedisServer::start_or_panic();
    let mut taken = Vec::new();
    for owner in ["one", "two", "three", "four", "five", "six"] {
        taken.push(attempt(owner, "x", false, "0"));
        taken.push(release(owner, "lock"));
    }
    // With a queue, too.
    taken.extend(["one", "two", "three"].map(|owner| attempt(owner, "x", true, "0")));
    taken.extend(["one", "two"].map(|owner| release(owner, "lock")));
    taken.push(attempt("three", "x", true, "0"));
    for _ in 0..20 {
        server.command(&["FLUSHALL"]);
        let answers = together(&server, &taken);
        let fences: Vec<u64> = answers
            .iter()
            .filter_map(|answer| answer.parse().ok())
            .filter(|&fence| fence > 1 << 50)
            .collect();
        assert_eq!(fences.len(), 8, "{answers:?}");
        assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
    }
}

#[test]
fn a_step_that_fails_does_not_fail_those_that_share_its_call() {
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

/// Not on a queue: there a second break takes the lock from whoever the first gave it to.
#[test]
fn a_break_is_idempotent_without_waiters() {
    let server = RedisServer::start_or_panic();
    for (state, made) in states() {
        if state.contains("wait") || state.contains("ahead") {
            continue;
        }
        for kind in ["lock", "semaphore"] {
            come_to(&server, &made);
            break_it(kind).run(&server);
            let once = dump(&server);
            assert_eq!(break_it(kind).run(&server), "0", "{kind} on {state}");
            assert!(same(&once, &dump(&server)), "{kind} on {state}");
        }
    }
}

#[test]
fn a_look_and_a_try_in_vain_change_nothing() {
    let server = RedisServer::start_or_panic();
    for (state, made) in states() {
        come_to(&server, &made);
        let before = dump(&server);
        let mut steps = vec![look(LOCK), look(SEMAPHORE)];
        if !before.is_empty() {
            let tries = ["x", "s", "p"].map(|mode| attempt("new", mode, false, "0"));
            let contended = tries.into_iter().filter(|step| {
                let answer = step.run(&server);
                come_to(&server, &made);
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
fn every_state_can_be_released_to_nothing() {
    let server = RedisServer::start_or_panic();
    for (state, made) in states() {
        come_to(&server, &made);
        for owner in ["four", "two", "one", "three"] {
            release(owner, "lock").run(&server);
            release(owner, "semaphore").run(&server);
        }
        let mut left = dump(&server);
        // Stays until the clock has passed the fence.
        let fence = left.remove("lockkeeper:{a}:f");
        assert_eq!(fence.is_some(), state.contains("ahead"), "{state}");
        assert!(left.is_empty(), "{state}: {left:?}");
    }
}

/// The same in the source: a key that is not in KEYS is one that a cluster does not know of.
#[test]
fn scripts_use_no_keys_but_those_they_are_given() {
    let given = [
        "HOLDER",
        "HELD",
        "SHARERS",
        "QUEUE",
        "INFO",
        "FENCE",
        "KEYS[1]",
        "KEYS[2]",
        "KEYS[3]",
        "KEYS[4]",
        "KEYS[5]",
        "KEYS[6]",
        "KEYS[place]",
        "key",
        "holder",
        "held",
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
            // A channel is no key.
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
