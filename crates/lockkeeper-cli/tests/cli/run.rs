//! `run`: exclusion, exit codes, environment, messages.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use lockkeeper_testkit::server::{PgBouncer, PostgresServer, RedisServer, RedlockNodes};

use crate::common::{Running, Sandbox};

/// Starts fifty commands at once, each of which counts itself and detects an overlap with another.
fn fifty(sandbox: &Sandbox) {
    let work = "mkdir busy || echo overlap >> overlaps; echo run >> runs; rmdir busy";
    let runs: Vec<Running> =
        (0..50).map(|_| sandbox.spawn(&["run", "one", "-q", "--", "sh", "-c", work])).collect();
    for run in runs {
        let output = run.end();
        assert_eq!((output.code, output.err.as_str()), (Some(0), ""));
    }
    assert_eq!(sandbox.read("runs").lines().count(), 50);
    assert_eq!(sandbox.read("overlaps"), "");
}

#[test]
fn fifty_commands_on_one_name_run_once_each_and_never_overlap_on_files() {
    fifty(&Sandbox::new());
}

#[test]
fn fifty_commands_on_one_name_run_once_each_and_never_overlap_on_redis() {
    let server = RedisServer::start_or_panic();
    fifty(&Sandbox::on(&server.url()));
    assert_eq!(server.command(&["KEYS", "*"]), "", "no key is left");
}

#[test]
fn locks_exclude_on_every_store() {
    let (postgres, nodes) = (PostgresServer::start_or_panic(), RedlockNodes::start_or_panic(3));
    let redis = RedisServer::start_or_panic();
    for url in [postgres.url(), redis.url(), nodes.url()] {
        let sandbox = Sandbox::on(&url);
        let mut holder = sandbox.spawn(&["run", "a", "--", "sh", "-c", "echo in; read x; exit 3"]);
        holder.wait_out("in");
        assert_eq!(sandbox.run(&["run", "a", "--no-wait", "true"]).code, Some(75), "{url}");
        let next = sandbox.spawn(&["run", "a", "--", "echo", "next"]);
        next.wait_err("waiting for \"a\": ");
        assert_eq!(next.out(), "", "{url}");
        holder.write_stdin("go\n");
        assert_eq!(holder.end().code, Some(3), "{url}");
        assert_eq!(next.end().out, "next\n", "{url}");
    }
    // A quorum does not support inspection.
    let quorum = Sandbox::on(&nodes.url());
    for args in [&["ls"][..], &["show", "a"], &["watch"], &["break", "a", "-y"]] {
        let output = quorum.run(args);
        assert_eq!(
            (output.code, output.err.lines().count()),
            (Some(64), 1),
            "{args:?}: {output:?}"
        );
    }
    // A URL of a pooler is a usage error.
    let pooler = PgBouncer::before(&postgres).unwrap();
    let output = Sandbox::on(&pooler.url()).run(&["run", "a", "true"]);
    assert_eq!((output.code, output.err.lines().count()), (Some(64), 1), "{output:?}");
    assert!(output.err.contains("PgBouncer"), "{output:?}");
}

#[test]
fn a_second_run_waits_for_the_first() {
    let sandbox = Sandbox::new();
    let mut first = sandbox.spawn(&["run", "a", "--", "sh", "-c", "echo in; read line; echo out"]);
    first.wait_out("in");
    let second = sandbox.spawn(&["run", "a", "--", "sh", "-c", "echo in"]);
    second.wait_err("waiting for \"a\": held by ");
    assert_eq!(second.out(), "");
    first.write_stdin("go\n");
    assert_eq!(first.end().out, "in\nout\n");
    let second = second.end();
    assert_eq!((second.code, second.out.as_str()), (Some(0), "in\n"));
    let lines: Vec<&str> = second.err.lines().collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].contains(":sh for "), "{lines:?}");
    assert!(lines[1].starts_with("lockkeeper: acquired \"a\" after "), "{lines:?}");
}

#[test]
fn run_prints_nothing_if_it_does_not_wait() {
    let output = Sandbox::new().run(&["run", "a", "--", "echo", "-n", "I have the lock"]);
    assert_eq!(
        (output.code, output.out.as_str(), output.err.as_str()),
        (Some(0), "I have the lock", "")
    );
}

#[test]
fn a_quiet_run_prints_no_waiting_messages() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let holder = sandbox.hold("a", &[]);
    let waiter = sandbox.spawn(&["run", "a", "--quiet", "--", "true"]);
    crate::common::eventually("it waits", || sandbox.run(&["ls"]).out.contains("waiting 1"));
    drop(holder);
    // The killed holder has left its lease, which the waiter need not wait for.
    sandbox.run(&["break", "a", "--yes"]);
    let output = waiter.end();
    assert_eq!((output.code, output.err.as_str()), (Some(0), ""));
}

#[test]
fn the_exit_code_is_the_commands_own() {
    let sandbox = Sandbox::new();
    for code in [0, 1, 7, 64, 70, 75, 255] {
        let output = sandbox.run(&["run", "a", "--", "sh", "-c", &format!("exit {code}")]);
        assert_eq!((output.code, output.err.as_str()), (Some(code), ""));
    }
}

#[test]
fn a_command_that_dies_of_a_signal_has_the_exit_code_of_a_shell() {
    let sandbox = Sandbox::new();
    for (signal, code) in [("TERM", 143), ("KILL", 137), ("INT", 130), ("SEGV", 139)] {
        let output = sandbox.run(&["run", "a", "--", "sh", "-c", &format!("kill -{signal} $$")]);
        assert_eq!(output.code, Some(code), "{signal}");
    }
}

#[test]
fn a_command_that_cannot_be_started_has_the_exit_code_of_a_shell_and_releases_the_lock() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("plain"), "no program").unwrap();
    for (command, code) in [("nosuch", 127), ("./nosuch", 127), ("./plain", 126), ("/", 126)] {
        let output = sandbox.run(&["run", "a", "--", command]);
        assert_eq!(output.code, Some(code), "{command}: {output:?}");
        assert_eq!(output.err.lines().count(), 1, "{output:?}");
        assert!(output.err.starts_with(&format!("lockkeeper: {command}: ")), "{output:?}");
        assert_eq!(sandbox.run(&["run", "a", "--no-wait", "true"]).code, Some(0));
    }
}

#[test]
fn a_script_without_an_interpreter_line_is_run_by_a_shell() {
    let sandbox = Sandbox::new();
    fs::write(sandbox.path("script"), "echo \"$0 has $# arguments\"\nexit 3\n").unwrap();
    fs::set_permissions(sandbox.path("script"), fs::Permissions::from_mode(0o755)).unwrap();
    let output = sandbox.run(&["run", "a", "--", "./script", "x", "y z"]);
    assert_eq!((output.code, output.out.as_str()), (Some(3), "./script has 2 arguments\n"));
    let mut command = sandbox.command(&["run", "a", "script"]);
    let path = format!("{}:{}", sandbox.path("").display(), std::env::var("PATH").unwrap());
    let output = Running::start({
        command.env("PATH", path);
        command
    });
    assert_eq!(output.end().code, Some(3), "found in PATH");
}

#[test]
fn a_timeout_is_exit_code_75_or_the_configured_one_and_names_the_holder() {
    let sandbox = Sandbox::new();
    let _holder = sandbox.hold("a", &["--label", "the other"]);
    let tries: [(&[&str], i32); 4] = [
        (&["--no-wait"], 75),
        (&["--wait", "0"], 75),
        (&["--wait", "50ms"], 75),
        (&["--no-wait", "--conflict-exit-code", "0"], 0),
    ];
    for (options, code) in tries {
        let mut args = vec!["run", "a"];
        args.extend(options);
        let output = sandbox.run(&[&args[..], &["--", "touch", "ran"]].concat());
        assert_eq!(output.code, Some(code), "{options:?}: {output:?}");
        assert!(output.err.contains("not acquired"), "{output:?}");
        assert!(output.err.contains("held by the other"), "{output:?}");
    }
    assert!(!sandbox.path("ran").exists());
}

#[test]
fn shared_holders_exclude_only_exclusive_ones() {
    let sandbox = Sandbox::new();
    let _one = sandbox.hold("a", &["--shared"]);
    let _other = sandbox.hold("a", &["--shared", "--wait", "0"]);
    assert_eq!(sandbox.run(&["run", "a", "--no-wait", "true"]).code, Some(75));
}

#[test]
fn a_semaphore_has_as_many_holders_as_permits() {
    let sandbox = Sandbox::new();
    let _one = sandbox.hold("a", &["--permits", "2"]);
    let other = sandbox.hold("a", &["--permits", "2", "--no-wait"]);
    assert_eq!(sandbox.run(&["run", "a", "--permits", "2", "--no-wait", "true"]).code, Some(75));
    // A lock of the same name is independent.
    assert_eq!(sandbox.run(&["run", "a", "--no-wait", "true"]).code, Some(0));
    drop(other);
    assert_eq!(sandbox.run(&["run", "a", "--permits", "2", "true"]).code, Some(0));
}

#[test]
fn a_waiter_for_a_lock_is_shown_the_holder_of_the_lock_and_not_of_a_semaphore() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let _permit = sandbox.hold("a", &["--permits", "1", "--label", "a permit"]);
    let _lock = sandbox.hold("a", &["--label", "the lock"]);
    let output = sandbox.run(&["run", "a", "--no-wait", "true"]);
    assert!(output.err.contains("held by the lock for"), "{output:?}");
    let output = sandbox.run(&["run", "a", "--permits", "1", "--no-wait", "true"]);
    assert!(output.err.contains("held by a permit for"), "{output:?}");
}

#[test]
fn name_fence_and_owner_in_the_environment_of_the_command_replace_inherited_ones() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command(&["run", "orders/42", "--json", "--", "env"]);
    for name in ["NAME", "FENCE", "OWNER"] {
        command.env(format!("LOCKKEEPER_{name}"), "inherited");
    }
    command
        .env("OTHER", "kept")
        .env("LOCKKEEPER_STORE", format!("file:{}", sandbox.path("x").display()));
    let output = Running::start(command).end();
    let mut ours: Vec<&str> =
        output.out.lines().filter(|line| line.contains("LOCKKEEPER")).collect();
    ours.sort_unstable();
    let [fence, name, owner] = ours[..] else { panic!("{ours:?}") };
    assert_eq!(name, "LOCKKEEPER_NAME=orders/42");
    let value = |line: &str| line.split_once('=').unwrap().1.to_owned();
    assert!(output.err.contains(&format!("\"fence\":{}", value(fence))), "{output:?}");
    assert!(output.err.contains(&format!("\"owner\":\"{}\"", value(owner))), "{output:?}");
    assert!(output.out.contains("OTHER=kept"));
}

#[test]
fn the_command_inherits_stdin_stdout_and_stderr() {
    let sandbox = Sandbox::new();
    let mut run = sandbox.spawn(&["run", "a", "--", "sh", "-c", "cat; echo problem >&2"]);
    run.write_stdin("some\ninput\n");
    let output = run.end();
    assert_eq!((output.out.as_str(), output.err.as_str()), ("some\ninput\n", "problem\n"));
}

#[test]
fn run_works_with_closed_stdin_stdout_and_stderr() {
    let sandbox = Sandbox::new();
    let mut command = std::process::Command::new("sh");
    let work = "exec \"$0\" run a -- sh -c 'echo out; echo err >&2; cat; exit 5' <&- >&- 2>&-";
    command.args(["-c", work, crate::common::PROGRAM]);
    sandbox.environ(&mut command);
    assert_eq!(Running::start(command).end().code, Some(5));
}

#[test]
fn a_blocked_reader_of_stderr_delays_neither_the_command_nor_signals() {
    let sandbox = Sandbox::new();
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while std::io::Write::write(&mut writer, &[b'x'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let stuck = |args: &[&str]| {
        let mut command = sandbox.command(args);
        let stderr = writer.try_clone().unwrap();
        command
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::piped())
            .stderr(stderr);
        Running::start_with_stdio(command)
    };
    let run = stuck(&["run", "a", "--json", "--", "sh", "-c", "echo in; exec sleep 600"]);
    run.wait_out("in");
    let waiter = stuck(&["run", "a", "--", "sh", "-c", "echo in"]);
    run.signal(rustix::process::Signal::TERM);
    assert_eq!(run.end().code, Some(143));
    assert_eq!(waiter.end().out, "in\n");
    drop(writer);
    let mut all = Vec::new();
    std::io::Read::read_to_end(&mut reader, &mut all).unwrap();
    assert!(all.iter().all(|byte| *byte == b'x'), "the pipe was full");
}

#[test]
fn names_and_commands_may_begin_with_dashes() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(&["run", "--", "--json", "sh", "-c", "echo $LOCKKEEPER_NAME"]);
    assert_eq!((output.code, output.out.as_str()), (Some(0), "--json\n"));
    assert_eq!(sandbox.run(&["run", "a", "--", "-nosuch"]).code, Some(127));
    assert_eq!(sandbox.run(&["run", "a", "--", ""]).code, Some(127));
    // Options after the command belong to the command.
    let output = sandbox.run(&["run", "a", "echo", "--json", "--wait", "x", "--", "y"]);
    assert_eq!((output.code, output.out.as_str()), (Some(0), "--json --wait x -- y\n"));
}

/// Parses the events on stderr, one JSON object per line.
fn events(err: &str) -> Vec<serde_json::Value> {
    err.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

fn words(events: &[serde_json::Value]) -> Vec<&str> {
    events.iter().map(|event| event["event"].as_str().unwrap()).collect()
}

#[test]
fn with_json_every_event_is_one_line_of_json() {
    let sandbox = Sandbox::new();
    let mut holder =
        sandbox.spawn(&["run", "a", "--label", "me", "--", "sh", "-c", "echo in; read x"]);
    holder.wait_out("in");
    let waiter = sandbox.spawn(&["run", "a", "--json", "--", "sh", "-c", "exit 3"]);
    waiter.wait_err("\"waiting\"");
    holder.write_stdin("go\n");
    let output = waiter.end();
    let events = events(&output.err);
    assert_eq!(words(&events), ["waiting", "acquired", "started", "exited", "released"]);
    assert!(events.iter().all(|event| event["name"] == "a"));
    assert_eq!(events[0]["holders"][0]["label"], "me");
    assert!(events[0]["holders"][0]["age_ms"].is_u64());
    assert!(events[1]["waited_ms"].is_u64() && events[1]["fence"].is_u64());
    assert!(events[2]["pid"].is_u64());
    assert_eq!((&events[3]["code"], &events[3]["signal"]), (&3.into(), &serde_json::Value::Null));
}

#[test]
fn with_json_every_failure_is_json() {
    let sandbox = Sandbox::new();
    let _holder = sandbox.hold("held", &[]);
    let failures: [(&[&str], i32, &str, usize); 6] = [
        (&["run", "a", "--json", "--", "nosuch"], 127, "command", 3),
        (&["run", "held", "--json", "--no-wait", "true"], 75, "conflict", 1),
        (&["run", "a", "--json", "--store", "nosuch:x", "true"], 64, "usage", 1),
        (&["run", "a", "--json", "--store", "redis://127.0.0.1:1", "true"], 69, "unavailable", 1),
        (&["run", "a", "--json", "--wait", "soon", "true"], 64, "usage", 1),
        (&["ls", "--json", "--store", "redis://127.0.0.1:1"], 69, "unavailable", 1),
    ];
    for (args, code, kind, count) in failures {
        let output = sandbox.run(args);
        let events = events(&output.err);
        assert_eq!((output.code, events.len()), (Some(code), count), "{args:?}: {output:?}");
        let failed = events.last().unwrap();
        assert_eq!(
            (&failed["event"], &failed["kind"]),
            (&"failed".into(), &kind.into()),
            "{args:?}"
        );
        assert_eq!(failed["code"], code);
        assert!(!words(&events).contains(&"exited"), "{args:?}: no command ran");
    }
}

#[test]
fn waiters_ahead_are_counted_even_if_all_have_the_same_label() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let _holder = sandbox.hold("a", &["--label", "x"]);
    let mut waiters = Vec::new();
    for ahead in 0..3 {
        let waiter = sandbox.spawn(&["run", "a", "--json", "--label", "x", "true"]);
        waiter.wait_err("\"waiting\"");
        assert_eq!(events(&waiter.err())[0]["ahead"], ahead);
        waiters.push(waiter);
    }
}
