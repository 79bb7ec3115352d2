//! `acquire`, `renew`, `release`.

use std::fs;
use std::process::Stdio;

use lockkeeper_testkit::server::{RedisServer, RedlockNodes};
use rustix::process::Signal;

use crate::common::{Running, Sandbox, eventually, mask_has};

#[test]
fn a_ticket_is_acquired_renewed_and_released_by_different_processes() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let said = sandbox.say(&["acquire", "deploy", "--ttl", "10m"]);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{said:?}");
    fs::write(sandbox.path("ticket"), &said.out).unwrap();
    assert_eq!(sandbox.say(&["run", "deploy", "--no-wait", "true"]).code, Some(75));
    let left = || server.command(&["PTTL", "lockkeeper:{deploy}"]).parse::<i64>().unwrap();
    assert!((540_000..=600_000).contains(&left()));

    let said = sandbox.say(&["renew", "ticket", "--ttl", "20m"]);
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(left() > 1_100_000);
    let mut release = sandbox.spawn(&["release"]);
    release.tell(&said.out);
    let released = release.end();
    assert_eq!((released.code, released.err.as_str()), (Some(0), ""));
    assert_eq!(sandbox.say(&["run", "deploy", "--no-wait", "true"]).code, Some(0));
    for command in ["renew", "release"] {
        let said = sandbox.say(&[command, "ticket"]);
        assert_eq!(said.code, Some(70), "{said:?}");
    }
}

/// A renewal would make the lock last for the ticket's ttl if the release then failed.
#[test]
fn a_release_sends_no_renewal() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    for options in [&[][..], &["--shared"], &["--permits", "3"]] {
        let said = sandbox.say(&[&["acquire", "a", "--ttl", "10m"], options].concat());
        fs::write(sandbox.path("ticket"), &said.out).unwrap();
        server.command(&["CONFIG", "RESETSTAT"]);
        assert_eq!(sandbox.say(&["release", "ticket"]).code, Some(0), "{options:?}");
        let calls = server.command(&["INFO", "commandstats"]);
        let scripts = calls.lines().find(|line| line.starts_with("cmdstat_evalsha:"));
        let once = scripts.is_some_and(|line| line.starts_with("cmdstat_evalsha:calls=1,"));
        assert!(once, "one script runs, the release: {options:?}: {calls}");
        let said = sandbox.say(&["release", "ticket"]);
        assert_eq!(said.code, Some(70), "{options:?}: {said:?}");
        assert!(said.err.contains("\"a\" is lost"), "{said:?}");
    }
}

#[test]
fn an_acquire_that_waits_can_be_interrupted_and_leaves_the_queue() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let _holder = sandbox.hold("a", &[]);
    assert_eq!(sandbox.say(&["acquire", "a", "--wait", "50ms"]).code, Some(75));
    let waiter = sandbox.spawn(&["acquire", "a"]);
    waiter.wait_err("waiting");
    waiter.signal(Signal::INT);
    assert_eq!(waiter.end().code, Some(130));
    assert!(!sandbox.say(&["ls"]).out.contains("waits"));
}

#[test]
fn an_acquire_can_be_interrupted_while_it_connects() {
    let server = RedisServer::start_or_panic();
    server.stop();
    let sandbox = Sandbox::on(&format!("{}?connect_timeout=60s", server.url()));
    let acquire = sandbox.spawn(&["acquire", "a"]);
    // It hears signals from its start on; one that came before would end it in another way.
    let last = Signal::USR2;
    eventually("it catches signals", || mask_has(acquire.pid(), "SigCgt", last));
    acquire.signal(Signal::INT);
    assert_eq!(acquire.end().code, Some(130));
    server.cont();
}

#[test]
fn a_ticket_that_cannot_be_written_is_released_again() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = sandbox.command(&["acquire", "a"]);
    command.stdin(Stdio::null()).stdout(full).stderr(Stdio::piped());
    let said = Running::start_as_it_is(command).end();
    assert_eq!(said.code, Some(74), "{said:?}");
    assert_eq!(sandbox.say(&["run", "a", "--no-wait", "true"]).code, Some(0));
}

#[test]
fn a_store_without_tickets_says_which_have_them() {
    let sandbox = Sandbox::new();
    let said = sandbox.say(&["acquire", "a"]);
    assert_eq!(said.code, Some(64));
    assert!(said.err.contains("Redis has them"), "{said:?}");
}

#[test]
fn a_ticket_of_a_quorum_works_too() {
    let nodes = RedlockNodes::start_or_panic(3);
    let sandbox = Sandbox::on(&nodes.url());
    let said = sandbox.say(&["acquire", "a", "--ttl", "10m"]);
    assert_eq!(said.code, Some(0), "{said:?}");
    fs::write(sandbox.path("ticket"), &said.out).unwrap();
    assert_eq!(sandbox.say(&["run", "a", "--no-wait", "true"]).code, Some(75));
    assert_eq!(sandbox.say(&["renew", "ticket"]).code, Some(0));
    assert_eq!(sandbox.say(&["release", "ticket"]).code, Some(0));
    assert_eq!(sandbox.say(&["run", "a", "--no-wait", "true"]).code, Some(0));
}

#[test]
fn a_ticket_for_another_store_or_a_stale_one_is_lost_and_does_no_harm() {
    let (one, other) = (RedisServer::start_or_panic(), RedisServer::start_or_panic());
    let sandbox = Sandbox::on(&one.url());
    fs::write(sandbox.path("stale"), sandbox.say(&["acquire", "a"]).out).unwrap();
    for command in ["renew", "release"] {
        let said = sandbox.say(&[command, "stale", "--store", &other.url()]);
        assert_eq!((said.code, said.err.lines().count()), (Some(70), 1), "{said:?}");
    }
    assert_eq!(other.command(&["DBSIZE"]), "0");
    assert_eq!(sandbox.say(&["release", "stale"]).code, Some(0));
    let held = sandbox.say(&["acquire", "a"]);
    assert_eq!(held.code, Some(0));
    for command in ["renew", "release"] {
        assert_eq!(sandbox.say(&[command, "stale"]).code, Some(70));
    }
    assert_eq!(sandbox.say(&["run", "a", "--no-wait", "true"]).code, Some(75), "it is still held");
}

#[test]
fn what_is_not_a_ticket_is_refused() {
    let sandbox = Sandbox::new();
    for text in ["", "{}", "null", "[1", "{\"name\":\"a\"}"] {
        let mut release = sandbox.spawn(&["release"]);
        release.tell(text);
        let said = release.end();
        assert_eq!(said.code, Some(64), "{text:?}: {said:?}");
        assert!(said.err.contains("not a ticket"), "{text:?}: {said:?}");
    }
    fs::write(sandbox.path("plain"), "hello").unwrap();
    for (args, right) in [(["release", "plain"], "not a ticket"), (["renew", "nosuch"], "nosuch: ")]
    {
        let said = sandbox.say(&args);
        assert_eq!(said.code, Some(64), "{said:?}");
        assert!(said.err.contains(right), "{said:?}");
    }
}

#[test]
fn a_ticket_that_was_altered_is_refused_at_once_and_touches_nothing() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let said = sandbox.say(&["acquire", "a", "--ttl", "10m"]);
    fs::write(sandbox.path("ticket"), &said.out).unwrap();
    let ticket: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    let before = server.command(&["GET", "lockkeeper:{a}:x"]);
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    for (field, value, code, why) in [
        ("ttl", r#"{"secs":0,"nanos":0}"#, 64, "a ttl of 0ns is too short"),
        ("ttl", r#"{"secs":18446744073709551615,"nanos":0}"#, 64, "too long"),
        ("mode", r#"{"permits":{"take":0,"of":3}}"#, 64, "it takes no permits"),
        ("mode", r#"{"permits":{"take":4,"of":3}}"#, 64, "4 permits, of 3"),
        ("mode", r#"{"permits":{"take":1,"of":3}}"#, 70, "lost"),
        ("mode", r#""shared""#, 70, "lost"),
        ("mode", r#""root""#, 64, "not a ticket"),
        ("label", r#""\u001b[2J""#, 64, "control characters"),
        ("name", r#""""#, 64, "must not be empty"),
        ("name", r#""b""#, 70, "lost"),
        ("owner", r#""00000000000000000000000000000000""#, 70, "lost"),
        ("owner", r#""nobody""#, 64, "32 hexadecimal digits"),
        ("fence", "null", 64, "it has no fence"),
        ("fence", "0", 64, "a fence is from 1"),
        ("fence", "9007199254740990", 70, "the ticket is not that of a hold"),
        ("fence", "9223372036854775807", 70, "the ticket is not that of a hold"),
        ("fence", "9223372036854775808", 64, "a fence is from 1"),
    ] {
        let mut altered = ticket.clone();
        altered[field] = json(value);
        fs::write(sandbox.path("altered"), altered.to_string()).unwrap();
        // A release does not compare these: with the right owner it is the holder's.
        let is_holders = code == 70 && (field == "fence" || value == r#""shared""#);
        for command in if is_holders { &["renew"][..] } else { &["renew", "release"] } {
            let said = sandbox.say(&[command, "altered"]);
            assert_eq!(said.code, Some(code), "{command} {field} {value}: {said:?}");
            assert_eq!(said.err.lines().count(), 1, "{said:?}");
            assert!(said.err.contains(why), "{command} {field} {value}: {said:?}");
        }
    }
    assert_eq!(server.command(&["GET", "lockkeeper:{a}:x"]), before);
    assert_eq!(server.command(&["DBSIZE"]), "2", "the lock's own two keys, and nothing else");
    assert_eq!(sandbox.say(&["release", "ticket"]).code, Some(0));
}
