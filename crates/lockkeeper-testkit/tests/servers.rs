//! Tests that servers start, stop, restart and leave nothing behind.
#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use lockkeeper_testkit::server::{Binaries, PostgresServer, RedisServer, Server};

/// Longer than any server takes to reply.
const LONG: Duration = Duration::from_secs(20);
/// How long to wait for a reply that a stopped server must not send.
const SHORT: Duration = Duration::from_millis(300);

fn redis() -> RedisServer {
    RedisServer::start_or_panic()
}

fn postgres() -> PostgresServer {
    PostgresServer::start_or_panic()
}

/// Returns whether the process exists, if only as a zombie.
fn exists(pid: u32) -> bool {
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    rustix::process::test_kill_process(pid).is_ok()
}

fn listens(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
}

/// Checks by binding: a refused connection would not show that the port can be bound.
fn is_free(port: u16) -> bool {
    TcpListener::bind(("127.0.0.1", port)).is_ok()
}

#[track_caller]
fn assert_starts_and_answers(server: &Server, url: &str) {
    assert!(server.answers(LONG));
    assert!(exists(server.pid()));
    assert_eq!(server.url(), url.replace("PORT", &server.port().to_string()));
    assert_eq!(server.addr().port(), server.port());
    assert!(server.dir().join("server.log").is_file());
}

#[test]
fn redis_starts_and_answers() {
    assert_starts_and_answers(&redis(), "redis://127.0.0.1:PORT/");
}

#[test]
fn postgres_starts_and_answers() {
    assert_starts_and_answers(&postgres(), "postgres://postgres@127.0.0.1:PORT/postgres");
}

#[track_caller]
fn assert_different_ports(one: &Server, other: &Server) {
    assert_ne!(one.port(), other.port());
    assert_ne!(one.pid(), other.pid());
    assert!(one.answers(LONG) && other.answers(LONG));
}

#[test]
fn two_redis_servers_get_different_ports() {
    assert_different_ports(&redis(), &redis());
}

#[test]
fn two_postgres_servers_get_different_ports() {
    assert_different_ports(&postgres(), &postgres());
}

#[track_caller]
fn assert_gone(pid: u32, port: u16, dir: &Path) {
    assert!(!exists(pid), "process {pid} still exists");
    assert!(is_free(port), "port {port} is still taken");
    assert!(!dir.exists(), "{} still exists", dir.display());
}

#[track_caller]
fn assert_gone_after_drop<S: std::ops::Deref<Target = Server>>(server: S) {
    let (pid, port, dir) = (server.pid(), server.port(), server.dir().to_owned());
    assert!(exists(pid) && listens(port) && dir.exists());
    drop(server);
    assert_gone(pid, port, &dir);
}

#[test]
fn a_dropped_redis_leaves_no_process_port_or_directory() {
    assert_gone_after_drop(redis());
}

#[test]
fn a_dropped_postgres_leaves_no_process_port_or_directory() {
    assert_gone_after_drop(postgres());
}

#[test]
fn a_stopped_redis_is_gone_after_drop() {
    let server = redis();
    server.stop();
    assert_gone_after_drop(server);
}

#[test]
fn a_stopped_postgres_is_gone_after_drop() {
    let server = postgres();
    server.stop();
    assert_gone_after_drop(server);
}

#[track_caller]
fn assert_gone_after_a_panic<S: std::ops::Deref<Target = Server>>(start: impl FnOnce() -> S) {
    let mut left = None;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let server = start();
        left = Some((server.pid(), server.port(), server.dir().to_owned()));
        panic!("on purpose");
    }));
    assert!(panicked.is_err());
    let (pid, port, dir) = left.unwrap();
    assert_gone(pid, port, &dir);
}

#[test]
fn a_panicking_test_leaves_no_redis() {
    assert_gone_after_a_panic(redis);
}

#[test]
fn a_panicking_test_leaves_no_postgres() {
    assert_gone_after_a_panic(postgres);
}

#[track_caller]
fn assert_restarts_on_its_port(server: &mut Server) {
    let (port, pid) = (server.port(), server.pid());
    server.kill9();
    assert!(!exists(pid), "process {pid} still exists");
    assert!(!listens(port));
    server.kill9();
    server.restart().unwrap();
    assert_eq!(server.port(), port);
    assert_ne!(server.pid(), pid);
    assert!(server.answers(LONG));
    // Also without `kill9` before it.
    let pid = server.pid();
    server.restart().unwrap();
    assert!(!exists(pid), "process {pid} still exists");
    assert_eq!(server.port(), port);
    assert!(server.answers(LONG));
}

#[test]
fn a_killed_redis_restarts_on_its_port() {
    assert_restarts_on_its_port(&mut redis());
}

#[test]
fn a_killed_postgres_restarts_on_its_port() {
    assert_restarts_on_its_port(&mut postgres());
}

#[track_caller]
fn assert_answers_only_while_running(server: &Server) {
    server.stop();
    assert!(!server.answers(SHORT));
    server.cont();
    assert!(server.answers(LONG));
}

#[test]
fn a_stopped_redis_does_not_answer_until_it_continues() {
    assert_answers_only_while_running(&redis());
}

#[test]
fn a_stopped_postgres_does_not_answer_until_it_continues() {
    assert_answers_only_while_running(&postgres());
}

/// Returns the child processes of a server, with their states.
fn processes_of(parent: u32) -> Vec<(String, String)> {
    let stats = fs::read_dir("/proc").unwrap().flatten();
    let stats = stats.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
    let fields = stats.map(|stat| {
        let (pid, rest) = stat.split_once(" (").unwrap();
        let mut rest = rest.rsplit_once(") ").unwrap().1.split(' ').map(str::to_owned);
        (pid.to_owned(), rest.next().unwrap(), rest.next().unwrap())
    });
    let of_parent = fields.filter(|(_, _, of)| *of == parent.to_string());
    of_parent.map(|(pid, state, _)| (pid, state)).collect()
}

#[test]
#[cfg(target_os = "linux")]
fn stop_and_kill_reach_the_sessions_of_postgres_too() {
    let mut server = postgres();
    server.stop();
    let stopped = processes_of(server.pid());
    // A stopped server cannot reap a child that has just ended.
    let (ended, stopped): (Vec<_>, Vec<_>) = stopped.into_iter().partition(|(_, s)| s == "Z");
    assert!(!stopped.is_empty(), "{ended:?}");
    assert!(stopped.iter().all(|(_, state)| state == "T"), "{stopped:?}");
    server.cont();
    assert!(server.answers(LONG));
    let children = processes_of(server.pid());
    // Stopped, so that no child exits on its own when the main process is gone.
    server.stop();
    server.kill9();
    for (pid, _) in children {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // A zombie counts as dead: the machine's init reaps it.
        assert!(stat.is_empty() || stat.contains(") Z "), "{stat}");
    }
}

#[test]
fn redis_receives_further_arguments() {
    let server = RedisServer::with_args(&["--maxmemory", "1mb"]).unwrap();
    assert_eq!(server.command(&["CONFIG", "GET", "maxmemory"]), "maxmemory\n1048576");
}

#[test]
fn postgres_receives_further_arguments() {
    let server = PostgresServer::with_args(&["-c", "fsync=off"]).unwrap();
    assert!(server.answers(LONG));
    let options = fs::read_to_string(server.dir().join("data/postmaster.opts")).unwrap();
    assert!(options.contains("fsync=off"), "{options}");
}

#[test]
fn a_server_that_does_not_start_reports_the_end_of_its_log() {
    let error = RedisServer::with_args(&["--no-such-option", "1"]).unwrap_err().to_string();
    assert!(error.starts_with("redis-server: exited during start"), "{error}");
    assert!(error.contains("no-such-option"), "{error}");
    let error = PostgresServer::with_args(&["-c", "no_such_option=1"]).unwrap_err().to_string();
    assert!(error.starts_with("postgres: exited during start"), "{error}");
    assert!(error.contains("no_such_option"), "{error}");
    assert_eq!(error.lines().count(), 1);
}

#[test]
fn a_start_waits_while_another_server_has_the_port() {
    let mut server = redis();
    // Killed directly, because `kill9` would reserve the port.
    let pid = rustix::process::Pid::from_raw(server.pid().try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    while listens(server.port()) {
        thread::sleep(Duration::from_millis(5));
    }
    let mut other = Command::new("redis-server")
        .args(["--port", &server.port().to_string(), "--save", ""])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    while !listens(server.port()) {
        assert!(other.try_wait().unwrap().is_none(), "the other server did not start");
        thread::sleep(Duration::from_millis(5));
    }
    let mistaken_for_other = server.answers(LONG);
    let log = server.dir().join("server.log");
    let restarting = thread::spawn(move || server.restart().map(|()| server));
    while !restarting.is_finished()
        && !fs::read_to_string(&log).unwrap().contains("Address already in use")
    {
        thread::sleep(Duration::from_millis(5));
    }
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(restarting.join().unwrap().unwrap().answers(LONG));
    assert!(!mistaken_for_other);
}

#[test]
#[cfg(target_os = "linux")]
fn the_port_of_a_killed_server_stays_reserved() {
    let mut server = redis();
    // A connection that the kill leaves half closed.
    let connection = TcpStream::connect(server.addr()).unwrap();
    server.kill9();
    assert!(!is_free(server.port()));
    assert!(!listens(server.port()));
    let mut other = Command::new("redis-server");
    other.args(["--port", &server.port().to_string(), "--bind", "127.0.0.1", "--save", ""]);
    let output = other.output().unwrap();
    let log = String::from_utf8_lossy(&output.stdout);
    assert!(log.contains("Address already in use"), "{log}");
    drop(connection);
    server.restart().unwrap();
    assert!(server.answers(LONG));
}

#[test]
fn a_missing_program_is_an_error_that_names_the_package() {
    let empty = tempfile::tempdir().unwrap();
    let nowhere = Binaries::within([empty.path().to_owned()]);
    let error = RedisServer::from_binaries(&nowhere, &[]).unwrap_err().to_string();
    assert_eq!(error, "redis-server is not installed: try `apt-get install redis-server`");
    let error = PostgresServer::from_binaries(&nowhere, &[]).unwrap_err().to_string();
    assert_eq!(error, "postgres is not installed: try `apt-get install postgresql`");
}

/// Set in the child process that the test kills.
const CHILD_PROCESS: &str = "LOCKKEEPER_TEST_CHILD_PROCESS";

#[test]
fn servers_end_when_their_test_process_is_killed() {
    use std::io::{BufRead as _, BufReader, Write as _};
    if std::env::var_os(CHILD_PROCESS).is_some() {
        let servers: [Box<dyn std::ops::Deref<Target = Server>>; 2] =
            [Box::new(redis()), Box::new(postgres())];
        for server in &servers {
            // Not by `println!`, which the test harness captures.
            writeln!(std::io::stdout(), "{} {}", server.pid(), server.dir().display()).unwrap();
        }
        thread::sleep(Duration::from_secs(600));
        return;
    }
    let mut doomed = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "servers_end_when_their_test_process_is_killed"])
        .env(CHILD_PROCESS, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(doomed.stdout.take().unwrap()).lines().map(Result::unwrap);
    let words = lines.map(|line| line.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())));
    let servers = words.flatten().filter_map(|(pid, dir)| Some((pid.parse::<u32>().ok()?, dir)));
    let servers: Vec<_> = servers.take(2).collect();
    doomed.kill().unwrap();
    doomed.wait().unwrap();
    assert_eq!(servers.len(), 2);
    for (pid, dir) in servers {
        let start = std::time::Instant::now();
        while exists(pid) || Path::new(&dir).exists() {
            assert!(start.elapsed() < LONG, "process {pid} or {dir} still exists");
            thread::sleep(Duration::from_millis(20));
        }
    }
}
