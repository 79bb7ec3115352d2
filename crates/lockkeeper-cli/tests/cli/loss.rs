//! Loss of the lock: the command is dead before another process can hold it.

use std::time::Duration;

use lockkeeper_testkit::proxy::Proxy;
use lockkeeper_testkit::server::{PostgresServer, RedisServer};

use crate::common::{Output, Sandbox, eventually};

/// Writes the time to a file every 20 ms, and ignores TERM except for a mark.
const STUBBORN: &str =
    "trap 'echo term > term' TERM; echo ready; while :; do date +%s%N >> beats; sleep 0.02; done";

#[test]
fn a_command_that_ignores_term_is_dead_before_another_process_holds_the_lock() {
    let server = RedisServer::start_or_panic();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let proxy = runtime.block_on(Proxy::start(server.addr())).unwrap();
    let (near, far) =
        (Sandbox::on(&server.url()), Sandbox::on(&format!("redis://{}/", proxy.addr())));
    let ttl = ["--ttl", "12s", "--kill-after", "1s"];
    let run = far.spawn(&[&["run", "a"], &ttl[..], &["--", "sh", "-c", STUBBORN]].concat());
    run.wait_out("ready");
    let next = near.spawn(&["run", "a", "--", "date", "+%s%N"]);
    next.wait_err("waiting");
    proxy.freeze();
    let next = next.end();
    assert_eq!(next.code, Some(0));
    let entered: u128 = next.out.trim().parse().unwrap();
    let last = far.last_beat();
    assert!(last < entered, "last beat {last}, entered {entered}");
    let output = run.end();
    assert_eq!(output.code, Some(70), "{output:?}");
    assert!(
        output.err.contains("lost \"a\": it could not be renewed in time; the command was killed"),
        "{output:?}"
    );
    assert_eq!(far.read("term"), "term\n", "TERM comes first");
    assert_eq!(far.last_beat(), last, "the command is dead");
}

/// Revokes the lock of a command that ignores TERM while another process waits for it. Returns how long the
/// command ran beside its successor, the output of its lockkeeper, and whether it received TERM.
fn overlap(sandbox: &Sandbox, options: &[&str], revoke: impl FnOnce()) -> (Duration, Output, bool) {
    let run = sandbox.spawn(&[&["run", "a"], options, &["--", "sh", "-c", STUBBORN]].concat());
    run.wait_out("ready");
    sandbox.wait_for("beats");
    let next = sandbox.spawn(&["run", "a", "--", "date", "+%s%N"]);
    next.wait_err("waiting");
    revoke();
    let next = next.end();
    assert_eq!(next.code, Some(0), "{next:?}");
    let entered: u128 = next.out.trim().parse().unwrap();
    let output = run.end();
    assert_eq!(output.code, Some(70), "{output:?}");
    let beside = sandbox.last_beat().saturating_sub(entered);
    let beside = Duration::from_nanos(u64::try_from(beside).unwrap());
    (beside, output, sandbox.path("term").exists())
}

/// The longest overlap that is accepted after the store dropped the lock: far below `--kill-after` (5 s), and long
/// enough for the notification of the loss on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(2);

#[test]
fn a_command_that_ignores_term_does_not_run_beside_its_successor_after_a_restart_of_postgres() {
    let mut server = PostgresServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let (beside, output, got_term) = overlap(&sandbox, &[], || server.restart().unwrap());
    assert!(beside < AT_ONCE, "the command ran for {beside:?} beside its successor: {output:?}");
    assert!(!got_term, "there is no time for TERM: {output:?}");
    assert!(output.err.contains("the command was killed"), "{output:?}");
}

#[test]
fn a_command_that_ignores_term_does_not_run_beside_its_successor_after_a_break() {
    let server = RedisServer::start_or_panic();
    for sandbox in [Sandbox::on(&server.url()), Sandbox::new()] {
        let broken = || assert_eq!(sandbox.run(&["break", "a", "--yes"]).code, Some(0));
        let (beside, output, got_term) = overlap(&sandbox, &[], broken);
        assert!(
            beside < AT_ONCE,
            "the command ran for {beside:?} beside its successor: {output:?}"
        );
        assert!(!got_term, "there is no time for TERM: {output:?}");
    }
}

/// The command inherits the lock file, so its successor does not acquire the lock before it is dead.
#[test]
fn on_files_a_break_waits_for_the_old_command_to_die() {
    let sandbox = Sandbox::new();
    let grace = ["--overlap-grace", "500ms"];
    let run = sandbox.spawn(&[&["run", "a"], &grace[..], &["--", "sh", "-c", STUBBORN]].concat());
    run.wait_out("ready");
    sandbox.wait_for("beats");
    assert_eq!(sandbox.run(&["break", "a", "--yes"]).code, Some(0));
    let beats = sandbox.read("beats");
    assert_eq!(run.end().code, Some(70));
    assert_eq!(sandbox.read("beats"), beats, "the command ran after the lock was free");
}

#[test]
fn an_overlap_grace_lets_the_command_run_beside_its_successor() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let broken = || assert_eq!(sandbox.run(&["break", "a", "--yes"]).code, Some(0));
    let (beside, output, got_term) = overlap(&sandbox, &["--overlap-grace", "3s"], broken);
    assert!(got_term, "TERM comes first: {output:?}");
    assert!(beside > Duration::from_secs(1), "it had {beside:?}: {output:?}");
}

#[test]
fn a_lock_that_is_revoked_ends_the_command() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let work = "trap 'echo term > term; exit 0' TERM; echo ready; while :; do sleep 0.05; done";
    let grace = ["--ttl", "9s", "--overlap-grace", "5s"];
    let run =
        sandbox.spawn(&[&["run", "a", "--json"], &grace[..], &["--", "sh", "-c", work]].concat());
    run.wait_out("ready");
    // The key of a foreign client replaces the lock, and no client acquires it meanwhile.
    server.command(&["SET", "lockkeeper:{a}", "foreign", "PX", "600000"]);
    let next = sandbox.spawn(&["run", "a", "--", "cat", "term"]);
    next.wait_err("waiting");
    let output = run.end();
    assert_eq!(output.code, Some(70), "{output:?}");
    assert!(output.err.contains(r#""event":"exited""#), "{output:?}");
    assert!(output.err.contains(r#""kind":"lost""#), "{output:?}");
    assert_eq!(
        server.command(&["GET", "lockkeeper:{a}"]),
        "foreign",
        "the foreign key is not deleted"
    );
    server.command(&["DEL", "lockkeeper:{a}"]);
    let next = next.end();
    assert_eq!((next.code, next.out.as_str()), (Some(0), "term\n"), "{next:?}");
}

#[test]
fn a_loss_that_is_noticed_only_at_the_release_is_exit_code_70() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let mut run =
        sandbox.spawn(&["run", "a", "--ttl", "10m", "--", "sh", "-c", "echo ready; read x"]);
    run.wait_out("ready");
    server.command(&["DEL", "lockkeeper:{a}"]);
    run.write_stdin("go\n");
    let output = run.end();
    assert_eq!(output.code, Some(70), "{output:?}");
    assert!(output.err.contains("lost \"a\" before the command ended"), "{output:?}");
}

#[test]
fn a_broken_file_lock_ends_the_command() {
    let sandbox = Sandbox::new();
    let run = sandbox.hold("a", &[]);
    assert_eq!(sandbox.run(&["break", "a", "--yes"]).code, Some(0));
    let output = run.end();
    assert_eq!(output.code, Some(70), "{output:?}");
}

#[test]
fn a_session_that_postgres_terminates_ends_the_command() {
    let server = PostgresServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let run = sandbox.hold("a", &[]);
    // On PostgreSQL, `break` terminates the session.
    assert_eq!(sandbox.run(&["break", "a", "--yes"]).code, Some(0));
    let output = run.end();
    assert_eq!(output.code, Some(70), "{output:?}");
    assert!(output.err.contains("or its session ended; the command was killed"), "{output:?}");
    assert_eq!(sandbox.run(&["run", "a", "--no-wait", "--", "true"]).code, Some(0));
}

#[test]
fn a_command_outlives_its_first_lease() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    // Long enough for the renewals on a busy machine.
    let ttl = ["--ttl", "20s", "--kill-after", "1s"];
    let output = sandbox.run(&[&["run", "a"], &ttl[..], &["--", "sleep", "21"]].concat());
    assert_eq!((output.code, output.err.as_str()), (Some(0), ""));
}

#[test]
fn a_store_that_restarts_within_the_lease_does_not_end_the_command() {
    let mut server = RedisServer::builder().persistent().start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let run = sandbox.spawn(&["run", "a", "--ttl", "60s", "--", "sh", "-c", "echo ready; read x"]);
    run.wait_out("ready");
    server.restart().unwrap();
    let ttl = || server.command(&["PTTL", "lockkeeper:{a}"]).parse::<i64>().unwrap();
    let before = ttl();
    assert!(before > 0);
    eventually("it is renewed", || ttl() > before);
    assert_eq!(run.end().code, Some(1), "`read` fails at the end of stdin");
}

#[test]
fn a_kill_after_that_is_too_long_for_the_lease_is_rejected() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let output =
        sandbox.run(&["run", "a", "--ttl", "5s", "--kill-after", "3s", "--", "touch", "ran"]);
    assert_eq!(output.code, Some(64), "{output:?}");
    assert!(output.err.contains("--kill-after 3s is too long for --ttl 5s"), "{output:?}");
    assert!(!sandbox.path("ran").exists());
    assert_eq!(
        sandbox.run(&["run", "a", "--ttl", "5s", "true"]).code,
        Some(0),
        "the default adapts"
    );
    // A PostgreSQL session has a limited validity, too.
    let server = PostgresServer::start_or_panic();
    let session = Sandbox::on(&server.url());
    let output =
        session.run(&["run", "a", "--ttl", "5s", "--kill-after", "3s", "--", "touch", "ran"]);
    assert_eq!(output.code, Some(64), "{output:?}");
    assert!(!session.path("ran").exists());
    let files = Sandbox::new();
    let output = files.run(&["run", "a", "--kill-after", "1h", "true"]);
    assert_eq!(output.code, Some(0), "files have no lease: {output:?}");
}
