//! `ls`, `show`, `watch`, `break`.

use std::process::Stdio;

use lockkeeper_testkit::server::{PostgresServer, RedisServer};
use rexpect::session::spawn_command;
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{Running, Sandbox, eventually, golden};

/// Replaces times and fences, which differ from run to run, and the alignment.
fn without_times(table: &str) -> String {
    let mut text = String::new();
    for line in table.lines() {
        let cells = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty());
        let cells = cells.map(|cell| {
            let digits = cell.starts_with(|c: char| c.is_ascii_digit());
            match cell {
                _ if digits && cell.contains("permit") => cell.to_owned(),
                _ if digits && cell.len() > 10 => "FENCE#".to_owned(),
                _ if digits => "TIME#".to_owned(),
                _ => cell.to_owned(),
            }
        });
        text += &cells.collect::<Vec<_>>().join("  ");
        text.push('\n');
    }
    text
}

#[test]
fn a_table_shows_holders_and_waiters_in_order() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    assert_eq!(sandbox.run(&["ls"]).out, "", "no lock is held");
    let _one = sandbox.hold("orders/1", &["--label", "web-1"]);
    let _two = sandbox.hold("orders/2", &["--label", "web-2", "--shared"]);
    let _gpu = sandbox.hold("gpu", &["--label", "trainer", "--permits", "4"]);
    let mut waiters = Vec::new();
    for label in ["first", "second"] {
        let waiter = sandbox.spawn(&["run", "orders/1", "--label", label, "true"]);
        waiter.wait_err("waiting");
        waiters.push(waiter);
    }
    golden("ls.txt", &without_times(&sandbox.run(&["ls"]).out));
    golden("ls-prefix.txt", &without_times(&sandbox.run(&["ls", "orders/"]).out));
    golden("show.txt", &without_times(&sandbox.run(&["show", "orders/1"]).out));
    let aligned = sandbox.run(&["ls"]).out;
    let column = aligned.lines().next().unwrap().find("STATE").unwrap();
    let is_aligned = |line: &str| line[column..].starts_with(['S', 'h', 'w']);
    assert!(aligned.lines().all(is_aligned), "{aligned}");

    let json: Value =
        serde_json::from_str(&sandbox.run(&["show", "orders/1", "--json"]).out).unwrap();
    assert_eq!(json[0]["kind"], "lock");
    assert_eq!(json[0]["holders"][0]["label"], "web-1");
    assert!(json[0]["holders"][0]["remaining_ms"].as_u64().unwrap() <= 30_000);
    assert_eq!(json[0]["waiters"][1]["label"], "second");
    let none: Value = serde_json::from_str(&sandbox.run(&["show", "free", "--json"]).out).unwrap();
    assert_eq!(none, Value::Array(Vec::new()));
}

#[test]
fn a_holder_without_a_label_is_shown_as_unknown() {
    let dir = tempfile::tempdir().unwrap();
    let sandbox = Sandbox::on(&format!("file:{}", dir.path().display()));
    let file = std::fs::File::create(dir.path().join("a.lock")).unwrap();
    file.lock().unwrap();
    let table = sandbox.run(&["ls"]).out;
    let row = table.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!(row, ["a", "held", "exclusive", "(unknown)", "-", "-", "-"]);
    let json: Value = serde_json::from_str(&sandbox.run(&["show", "a", "--json"]).out).unwrap();
    assert_eq!(json[0]["holders"][0]["label"], Value::Null);
    let output = sandbox.run(&["run", "a", "--wait", "10ms", "true"]);
    assert!(output.err.contains("held by (unknown)"), "{output:?}");
}

#[test]
fn watch_prints_events_as_they_happen() {
    let sandbox = Sandbox::new();
    let watch = sandbox.spawn(&["watch", "a", "--json"]);
    watch.wait_out("[]\n");
    let holder = sandbox.hold("a", &["--label", "me"]);
    watch.wait_out(r#""event":"acquired""#);
    drop(holder);
    watch.wait_out(r#""event":"freed""#);
    let lines = watch.out();
    let event: Value = serde_json::from_str(lines.lines().nth(1).unwrap()).unwrap();
    assert_eq!((&event["name"], &event["who"]["label"]), (&"a".into(), &"me".into()));
}

#[test]
fn watch_ends_when_its_reader_is_gone() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(&["watch"]);
    let (reader, writer) = std::io::pipe().unwrap();
    command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped());
    let watch = Running::start_with_stdio(command);
    drop(reader);
    let output = watch.end();
    assert_eq!((output.code, output.err.as_str()), (Some(0), ""));
}

#[test]
fn a_closed_stdout_is_not_a_failure() {
    let sandbox = Sandbox::new();
    let _holder = sandbox.hold("a", &[]);
    for args in [&["ls"][..], &["show", "a"], &["doctor"], &["man"], &["--help"]] {
        let mut command = sandbox.command(args);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped());
        let output = Running::start_with_stdio(command).end();
        assert_eq!((output.code, output.err.as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn control_characters_from_the_store_are_shown_escaped() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    server.command(&["SET", "lockkeeper:{a}", "\x1b[2Jboo\x07", "PX", "600000"]);
    for args in
        [&["ls"][..], &["show", "a"], &["run", "a", "--no-wait", "true"], &["break", "a", "-y"]]
    {
        let output = sandbox.run(args);
        assert!(format!("{}{}", output.out, output.err).contains("boo"), "{output:?}");
        assert!(
            !output.out.contains(['\x1b', '\x07']) && !output.err.contains(['\x1b', '\x07']),
            "{output:?}"
        );
    }
}

/// Characters that a terminal interprets or does not show: `ESC`, `BEL`, a C1 control, bidirectional controls,
/// zero-width characters.
const HIDDEN: [char; 9] = [
    '\x1b', '\x07', '\u{9b}', '\u{202e}', '\u{2066}', '\u{200f}', '\u{200b}', '\u{feff}',
    '\u{2060}',
];

#[test]
fn invisible_characters_in_names_and_labels_are_shown_escaped() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let (name, label) = ("pay\u{200b}\u{9b}ments\u{2060}", "web\u{202e}1\u{feff}\u{2066}");
    let watch = sandbox.spawn(&["watch"]);
    let watch_json = sandbox.spawn(&["watch", "--json"]);
    watch_json.wait_out("[]");
    let _holder = sandbox.hold(name, &["--label", label]);
    let waiter = sandbox.spawn(&["run", name, "--label", label, "true"]);
    waiter.wait_err("waiting");
    let waiter_json = sandbox.spawn(&["run", name, "--json", "true"]);
    waiter_json.wait_err("waiting");
    watch.wait_out("acquired");
    watch_json.wait_out("acquired");
    let mut shown = vec![watch.out(), watch_json.out(), waiter.err(), waiter_json.err()];
    for args in [
        &["ls"][..],
        &["ls", "--json"],
        &["show", name],
        &["show", name, "--json"],
        &["show", "\u{202e}free"],
        &["run", name, "--no-wait", "true"],
        &["run", name, "--no-wait", "--json", "true"],
        &["run", name, "--wait", "\u{202e}", "true"],
        &["break", name],
        &["break", name, "--yes"],
    ] {
        let output = sandbox.run(args);
        shown.push(output.out + &output.err);
    }
    for text in &shown {
        assert!(!text.is_empty() && !text.contains(HIDDEN), "{text:?}");
    }
    assert!(
        shown[0].contains(r#""pay\u{200b}\u{9b}ments\u{2060}"  web\u{202e}1\u{feff}\u{2066}"#),
        "{shown:?}"
    );
    // The JSON parses to the original text.
    let line = shown[1].lines().find(|line| line.contains("acquired")).unwrap();
    let event: Value = serde_json::from_str(line).unwrap();
    assert_eq!((&event["name"], &event["who"]["label"]), (&name.into(), &label.into()));
    let listed: Value = serde_json::from_str(&shown[5]).unwrap();
    assert_eq!(listed[0]["name"], name);
}

#[test]
fn control_characters_in_the_error_of_a_server_are_shown_escaped() {
    let server = PostgresServer::start_or_panic();
    // The server repeats the name of the database that it does not have.
    let (server, _) =
        server.url().rsplit_once('/').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
    let sandbox = Sandbox::on(&format!("{server}/%1B%5B2Jboo%C2%9B%E2%80%AE"));
    for args in [&["run", "a", "true"][..], &["run", "a", "--json", "true"], &["ls"], &["doctor"]] {
        let output = sandbox.run(args);
        let text = output.out.clone() + &output.err;
        assert!(text.contains("boo") && !text.contains(HIDDEN), "{output:?}");
        assert!(text.contains(r"\u{1b}[2Jboo") || args.contains(&"--json"), "{output:?}");
    }
}

#[test]
fn break_releases_a_lock_and_its_holder_is_notified() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let output = sandbox.run(&["break", "a"]);
    assert_eq!((output.code, output.out.as_str()), (Some(0), "\"a\" is not held\n"));
    let holder = sandbox.hold("a", &["--label", "stuck"]);
    let output = sandbox.run(&["break", "a"]);
    assert_eq!(output.code, Some(64), "stdin is not a terminal: {output:?}");
    assert!(output.err.contains("held by stuck for"), "{output:?}");
    let output = sandbox.run(&["break", "a", "--yes"]);
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.out.contains("it was held by stuck"), "{output:?}");
    assert_eq!(holder.end().code, Some(70));
    assert_eq!(sandbox.run(&["run", "a", "--no-wait", "true"]).code, Some(0));
}

#[test]
fn break_asks_and_does_not_break_another_holder_than_the_one_confirmed() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let prompt = || {
        let mut command = sandbox.command(&["break", "a"]);
        command.env("TERM", "xterm");
        let mut session = spawn_command(command, Some(30_000)).unwrap();
        session.process_mut().set_kill_timeout(Some(1000));
        session.exp_string("Break it? [y/N] ").unwrap();
        session
    };
    let one = sandbox.hold("a", &["--label", "the same"]);
    let mut session = prompt();
    session.send_line("n").unwrap();
    session.exp_string("not broken").unwrap();

    let mut session = prompt();
    one.signal(Signal::TERM);
    assert_eq!(one.end().code, Some(143));
    let other = sandbox.hold("a", &["--label", "the same"]);
    session.send_line("y").unwrap();
    session.exp_string("not broken: \"a\" is now held by the same").unwrap();

    let mut session = prompt();
    session.send_line("y").unwrap();
    session.exp_string("broke \"a\": it was held by the same").unwrap();
    assert_eq!(other.end().code, Some(70));
    eventually("it is free", || sandbox.run(&["ls"]).out.is_empty());
}

#[test]
fn locks_on_postgres_are_listed_by_prefix() {
    let server = PostgresServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    assert_eq!(sandbox.run(&["ls", "orders/"]).out, "");
    let _held = sandbox.hold("orders/1", &["--label", "web-1"]);
    eventually("the name is listed", || sandbox.run(&["ls", "orders/"]).out.contains("orders/1"));
    let listed = sandbox.run(&["ls", "orders/"]).out;
    assert!(listed.contains("web-1"), "{listed}");
    assert_eq!(sandbox.run(&["ls", "invoices/"]).out, "");
}

/// Without the table of names, an empty list and exit code 0 would claim that no lock is held.
#[test]
fn a_prefix_on_postgres_without_names_is_rejected_with_an_alternative() {
    let server = PostgresServer::start_or_panic();
    let sandbox = Sandbox::on(&format!("{}?names_table=off", server.url()));
    let _held = sandbox.hold("orders/1", &["--label", "web-1"]);
    for args in [&["ls", "orders/"][..], &["ls", "orders/", "--json"], &["watch", "orders/"]] {
        let output = sandbox.run(args);
        assert_eq!((output.code, output.out.as_str()), (Some(64), ""), "{args:?}: {}", output.err);
        for text in ["names_table=off", "without a prefix"] {
            assert!(output.err.contains(text), "{args:?}: {}", output.err);
        }
    }
    let listed = sandbox.run(&["ls"]).out;
    assert!(listed.contains("web-1") && listed.contains("pg:"), "{listed}");
    let shown = sandbox.run(&["show", "orders/1"]).out;
    assert!(shown.contains("orders/1") && shown.contains("web-1"), "{shown}");

    // `show` accepts a key of the list with `foreign_keys=on`.
    let key = listed.lines().nth(1).unwrap().split_whitespace().next().unwrap();
    let rejected = sandbox.run(&["show", key]);
    assert_eq!(rejected.code, Some(64));
    assert!(rejected.err.contains("foreign_keys=on"), "{}", rejected.err);
    let url = format!("{}?foreign_keys=on", server.url());
    let shown = sandbox.run(&["show", key, "--store", &url]);
    assert!(shown.out.contains("web-1"), "{shown:?}");
}
