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
    let output = sandbox.run(&["acquire", "deploy", "--ttl", "10m"]);
    assert_eq!((output.code, output.err.as_str()), (Some(0), ""), "{output:?}");
    fs::write(sandbox.path("ticket"), &output.out).unwrap();
    assert_eq!(sandbox.run(&["run", "deploy", "--no-wait", "true"]).code, Some(75));
    let left = || server.command(&["PTTL", "lockkeeper:{deploy}"]).parse::<i64>().unwrap();
    assert!((540_000..=600_000).contains(&left()));

    let output = sandbox.run(&["renew", "ticket", "--ttl", "20m"]);
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(left() > 1_100_000);
    let mut release = sandbox.spawn(&["release"]);
    release.write_stdin(&output.out);
    let released = release.end();
    assert_eq!((released.code, released.err.as_str()), (Some(0), ""));
    assert_eq!(sandbox.run(&["run", "deploy", "--no-wait", "true"]).code, Some(0));
    for command in ["renew", "release"] {
        let output = sandbox.run(&[command, "ticket"]);
        assert_eq!(output.code, Some(70), "{output:?}");
    }
}

/// A renewal would keep the lock held for another TTL if the release then failed.
#[test]
fn a_release_sends_no_renewal() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    for options in [&[][..], &["--shared"], &["--permits", "3"]] {
        let output = sandbox.run(&[&["acquire", "a", "--ttl", "10m"], options].concat());
        fs::write(sandbox.path("ticket"), &output.out).unwrap();
        server.command(&["CONFIG", "RESETSTAT"]);
        assert_eq!(sandbox.run(&["release", "ticket"]).code, Some(0), "{options:?}");
        let calls = server.command(&["INFO", "commandstats"]);
        let scripts = calls.lines().find(|line| line.starts_with("cmdstat_evalsha:"));
        // One when the client connects, which does nothing, and the release.
        let twice = scripts.is_some_and(|line| line.starts_with("cmdstat_evalsha:calls=2,"));
        assert!(twice, "only the release script runs: {options:?}: {calls}");
        assert!(!calls.contains("cmdstat_pexpire:"), "a renewal: {options:?}: {calls}");
        let output = sandbox.run(&["release", "ticket"]);
        assert_eq!(output.code, Some(70), "{options:?}: {output:?}");
        assert!(output.err.contains("\"a\" is not held with this ticket"), "{output:?}");
    }
}

#[test]
fn an_acquire_that_waits_can_be_interrupted_and_leaves_the_queue() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let _holder = sandbox.hold("a", &[]);
    assert_eq!(sandbox.run(&["acquire", "a", "--wait", "50ms"]).code, Some(75));
    let waiter = sandbox.spawn(&["acquire", "a"]);
    waiter.wait_err("waiting");
    waiter.signal(Signal::INT);
    assert_eq!(waiter.end().code, Some(130));
    assert!(!sandbox.run(&["ls"]).out.contains("waiting"));
}

#[test]
fn an_acquire_can_be_interrupted_while_it_connects() {
    let server = RedisServer::start_or_panic();
    server.stop();
    let sandbox = Sandbox::on(&format!("{}?connect_timeout=60s", server.url()));
    let acquire = sandbox.spawn(&["acquire", "a"]);
    // A signal before its handlers are registered would kill it instead.
    let last = Signal::USR2;
    eventually("it catches signals", || mask_has(acquire.pid(), "SigCgt", last));
    acquire.signal(Signal::INT);
    assert_eq!(acquire.end().code, Some(130));
    server.cont();
}

#[test]
fn a_lock_whose_ticket_cannot_be_written_is_released() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = sandbox.command(&["acquire", "a"]);
    command.stdin(Stdio::null()).stdout(full).stderr(Stdio::piped());
    let output = Running::start_with_stdio(command).end();
    assert_eq!(output.code, Some(74), "{output:?}");
    assert!(output.err.contains("the lock was released"), "{output:?}");
    assert_eq!(sandbox.run(&["run", "a", "--no-wait", "true"]).code, Some(0));
}

#[test]
fn a_store_without_tickets_names_one_that_supports_them() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(&["acquire", "a"]);
    assert_eq!(output.code, Some(64));
    assert!(output.err.contains("use Redis"), "{output:?}");
}

#[test]
fn tickets_work_on_a_quorum() {
    let nodes = RedlockNodes::start_or_panic(3);
    let sandbox = Sandbox::on(&nodes.url());
    let output = sandbox.run(&["acquire", "a", "--ttl", "10m"]);
    assert_eq!(output.code, Some(0), "{output:?}");
    fs::write(sandbox.path("ticket"), &output.out).unwrap();
    assert_eq!(sandbox.run(&["run", "a", "--no-wait", "true"]).code, Some(75));
    assert_eq!(sandbox.run(&["renew", "ticket"]).code, Some(0));
    assert_eq!(sandbox.run(&["release", "ticket"]).code, Some(0));
    assert_eq!(sandbox.run(&["run", "a", "--no-wait", "true"]).code, Some(0));
}

#[test]
fn a_stale_ticket_or_one_for_another_store_is_lost_and_changes_nothing() {
    let (one, other) = (RedisServer::start_or_panic(), RedisServer::start_or_panic());
    let sandbox = Sandbox::on(&one.url());
    fs::write(sandbox.path("stale"), sandbox.run(&["acquire", "a"]).out).unwrap();
    for command in ["renew", "release"] {
        let output = sandbox.run(&[command, "stale", "--store", &other.url()]);
        assert_eq!((output.code, output.err.lines().count()), (Some(70), 1), "{output:?}");
    }
    assert_eq!(other.command(&["DBSIZE"]), "0");
    assert_eq!(sandbox.run(&["release", "stale"]).code, Some(0));
    let held = sandbox.run(&["acquire", "a"]);
    assert_eq!(held.code, Some(0));
    for command in ["renew", "release"] {
        assert_eq!(sandbox.run(&[command, "stale"]).code, Some(70));
    }
    assert_eq!(sandbox.run(&["run", "a", "--no-wait", "true"]).code, Some(75), "it is still held");
}

#[test]
fn invalid_tickets_are_rejected() {
    let sandbox = Sandbox::new();
    for text in ["", "{}", "null", "[1", "{\"name\":\"a\"}"] {
        let mut release = sandbox.spawn(&["release"]);
        release.write_stdin(text);
        let output = release.end();
        assert_eq!(output.code, Some(64), "{text:?}: {output:?}");
        assert!(output.err.contains("not a ticket"), "{text:?}: {output:?}");
    }
    fs::write(sandbox.path("plain"), "hello").unwrap();
    for (args, right) in [(["release", "plain"], "not a ticket"), (["renew", "nosuch"], "nosuch: ")]
    {
        let output = sandbox.run(&args);
        assert_eq!(output.code, Some(64), "{output:?}");
        assert!(output.err.contains(right), "{output:?}");
    }
}

#[test]
fn a_modified_ticket_is_rejected_and_changes_nothing() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let output = sandbox.run(&["acquire", "a", "--ttl", "10m"]);
    fs::write(sandbox.path("ticket"), &output.out).unwrap();
    let ticket: serde_json::Value = serde_json::from_str(&output.out).unwrap();
    let before = server.command(&["GET", "lockkeeper:{a}"]);
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    for (field, value, code, why) in [
        ("ttl", r#"{"secs":0,"nanos":0}"#, 64, "too short"),
        ("ttl", r#"{"secs":18446744073709551615,"nanos":0}"#, 64, "too long"),
        ("mode", r#"{"permits":{"take":0,"of":3}}"#, 64, "permits"),
        ("mode", r#"{"permits":{"take":4,"of":3}}"#, 64, "permits"),
        ("mode", r#"{"permits":{"take":1,"of":3}}"#, 70, "ticket"),
        ("mode", r#""shared""#, 70, "ticket"),
        ("mode", r#""root""#, 64, "not a ticket"),
        ("label", r#""\u001b[2J""#, 64, "control characters"),
        ("name", r#""""#, 64, "empty"),
        ("name", r#""b""#, 70, "ticket"),
        ("owner", r#""00000000000000000000000000000000""#, 70, "ticket"),
        ("owner", r#""unknown""#, 64, "hexadecimal"),
        ("fence", "null", 64, "fence"),
        ("fence", "0", 64, "fence"),
        ("fence", "9007199254740990", 70, "the ticket does not match a hold"),
        ("fence", "9223372036854775807", 70, "the ticket does not match a hold"),
        ("fence", "9223372036854775808", 64, "fence"),
    ] {
        let mut altered = ticket.clone();
        altered[field] = json(value);
        fs::write(sandbox.path("altered"), altered.to_string()).unwrap();
        // A release compares only the name, kind and owner.
        let is_holder = code == 70 && (field == "fence" || value == r#""shared""#);
        for command in if is_holder { &["renew"][..] } else { &["renew", "release"] } {
            let output = sandbox.run(&[command, "altered"]);
            assert_eq!(output.code, Some(code), "{command} {field} {value}: {output:?}");
            assert_eq!(output.err.lines().count(), 1, "{output:?}");
            assert!(output.err.contains(why), "{command} {field} {value}: {output:?}");
        }
    }
    assert_eq!(server.command(&["GET", "lockkeeper:{a}"]), before);
    assert_eq!(server.command(&["DBSIZE"]), "1", "the key of the lock, and no other");
    assert_eq!(sandbox.run(&["release", "ticket"]).code, Some(0));
}
