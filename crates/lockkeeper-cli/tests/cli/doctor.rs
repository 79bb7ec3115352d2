//! `doctor` on healthy and on misconfigured stores. The assertions match settings and addresses, not the whole wording,
//! which belongs to the stores.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::process::Command;

use lockkeeper_testkit::server::{
    PgBouncer, PostgresServer, RedisCluster, RedisSentinel, RedisServer, RedlockNodes, ServerClock,
};

use crate::common::{Output, Running, Sandbox};

/// Returns the lines that begin with a severity.
fn lines<'a>(output: &'a Output, severity: &str) -> Vec<&'a str> {
    output.out.lines().filter(|line| line.starts_with(severity)).collect()
}

#[track_caller]
fn finds(output: &Output, code: i32, severity: &str, text: &str) {
    assert_eq!(output.code, Some(code), "{output:?}");
    let found = lines(output, severity).iter().any(|line| line.contains(text));
    assert!(found, "no {severity} with {text:?}: {output:?}");
}

#[test]
fn a_safe_directory_passes_and_unsafe_ones_do_not() {
    let sandbox = Sandbox::new();
    let output = sandbox.run(&["doctor"]);
    assert_eq!((output.code, lines(&output, "OK").len()), (Some(0), 5), "{output:?}");

    let dir = sandbox.path("open to all");
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    let url = format!("file:{}?polling=on", dir.display());
    finds(&sandbox.run(&["doctor", "--store", &url]), 2, "FAIL", "chmod");
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777)).unwrap();
    let output = sandbox.run(&["doctor", "--store", &url]);
    finds(&output, 1, "WARN", "mode 1777");
    finds(&output, 1, "WARN", "polling=on");

    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    let url = format!("file:{}", dir.display());
    finds(&sandbox.run(&["doctor", "--store", &url]), 1, "WARN", "mode 0755");

    let temporary = tempfile::tempdir().unwrap();
    let url = format!("file:{}", temporary.path().display());
    finds(&sandbox.run(&["doctor", "--store", &url]), 1, "WARN", "/tmp");

    let mut command = sandbox.command(&["doctor"]);
    command.env("XDG_RUNTIME_DIR", sandbox.path(""));
    finds(&Running::start(command).end(), 1, "WARN", "session");

    fs::write(sandbox.path("plain"), "").unwrap();
    let url = format!("file:{}", sandbox.path("plain").display());
    finds(&sandbox.run(&["doctor", "--store", &url]), 2, "FAIL", "not a directory");
    // Not even root can write there.
    finds(&sandbox.run(&["doctor", "--store", "file:/proc/self"]), 2, "FAIL", "/proc/self");
    assert_eq!(sandbox.run(&["doctor", "--store", "zoo:x"]).code, Some(64));
}

#[test]
fn a_directory_of_another_user_is_a_failure() {
    if !rustix::process::geteuid().is_root() {
        // Written to stderr directly, which the test harness does not capture.
        let test = "a_directory_of_another_user_is_a_failure";
        let _ = writeln!(
            std::io::stderr(),
            "NOT RUN: {test}: only root can change the owner of a directory"
        );
        return;
    }
    let sandbox = Sandbox::new();
    let theirs = sandbox.path("theirs");
    fs::create_dir(&theirs).unwrap();
    chown(&theirs, Some(12_345), None).unwrap();
    let url = format!("file:{}", theirs.display());
    finds(&sandbox.run(&["doctor", "--store", &url]), 2, "FAIL", "12345");
    let output = sandbox.run(&["run", "--store", &url, "a", "--", "true"]);
    assert!(output.err.contains("chown 0"), "{output:?}");
}

#[test]
fn a_healthy_redis_passes() {
    let server = RedisServer::builder().persistent().start_or_panic();
    let output = Sandbox::on(&server.url()).run(&["doctor"]);
    assert_eq!(
        (output.code, output.out.lines().count()),
        (Some(0), lines(&output, "OK").len()),
        "{output:?}"
    );
    for text in ["login", "Redis", "RESP3", "noeviction", "appendfsync always", "clock"] {
        finds(&output, 0, "OK", text);
    }
    let output = Sandbox::on(&server.url()).run(&["doctor", "--json"]);
    for line in output.out.lines() {
        let finding: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(finding["severity"], "ok");
    }
}

#[test]
fn redis_settings_that_may_lose_locks_are_reported() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    finds(&sandbox.run(&["doctor"]), 1, "WARN", "appendonly no");
    server.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    finds(&sandbox.run(&["doctor"]), 1, "WARN", "maxmemory-policy is allkeys-lru");
    server.command(&["CONFIG", "SET", "maxmemory", "100mb"]);
    finds(&sandbox.run(&["doctor"]), 2, "FAIL", "evicted");
    let replicated = format!("{}?min_replicas=1", server.url());
    finds(&sandbox.run(&["doctor", "--store", &replicated]), 2, "FAIL", "min_replicas");
    let resp2 = format!("{}?protocol=resp2", server.url());
    finds(&sandbox.run(&["doctor", "--store", &resp2]), 2, "OK", "RESP2");
}

#[test]
fn a_redis_that_may_lose_grants_in_a_crash_is_reported() {
    let log = RedisServer::builder().arg("--appendonly", "yes").start_or_panic();
    let output = Sandbox::on(&log.url()).run(&["doctor"]);
    finds(&output, 1, "WARN", "appendfsync everysec");
}

#[test]
fn a_user_that_may_not_read_settings_is_a_warning() {
    let server = RedisServer::start_or_panic();
    let rules = ["on", ">secret", "~*", "&*", "+@all", "-info", "-config"];
    server.command(&[&["ACL", "SETUSER", "low"][..], &rules].concat());
    let sandbox = Sandbox::on(&server.url().replace("redis://", "redis://low:secret@"));
    let output = sandbox.run(&["doctor"]);
    for text in ["INFO", "CONFIG GET"] {
        finds(&output, 1, "WARN", text);
    }
    finds(&output, 1, "OK", "RESP3");
    assert_eq!(
        sandbox.run(&["run", "a", "true"]).code,
        Some(0),
        "locks work without INFO and CONFIG"
    );
    server.command(&["ACL", "SETUSER", "low", "resetchannels"]);
    finds(&sandbox.run(&["doctor"]), 1, "WARN", "no messages");
    assert!(!format!("{output:?}").contains("secret"), "{output:?}");
}

/// Moves the wall clock of a program forward by an hour, and no other clock.
const SHIM: &str = "
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t which, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, which, at);
    if (!failed && which == CLOCK_REALTIME) at->tv_sec += 3600;
    return failed;
}
";

#[test]
fn a_difference_between_clocks_is_reported() {
    let server = RedisServer::builder().persistent().start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let (source, shim) = (sandbox.path("shim.c"), sandbox.path("shim.so"));
    fs::write(&source, SHIM).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&shim).arg(&source);
    assert_eq!(Running::start(compiler).end().code, Some(0), "this test needs a C compiler");
    let mut command = sandbox.command(&["doctor"]);
    command.env("LD_PRELOAD", &shim);
    let output = Running::start(command).end();
    finds(&output, 1, "WARN", "3600.0s");
    finds(&sandbox.run(&["doctor"]), 0, "OK", "clock");
}

#[test]
fn behind_sentinels_the_master_is_diagnosed() {
    let mut sentinel = RedisSentinel::start_or_panic();
    let sandbox = Sandbox::on(&sentinel.url());
    let output = sandbox.run(&["doctor"]);
    let master = sentinel.master().addr();
    finds(&output, 1, "OK", &format!("{master}: reachable"));
    finds(&output, 1, "WARN", &format!("{master}: 1 replicas"));
    let waits = format!("{}?min_replicas=1", sentinel.url());
    finds(&sandbox.run(&["doctor", "--store", &waits]), 1, "OK", "1 replicas");
    let unknown = sentinel.url().replace("mymaster", "unknown");
    finds(&sandbox.run(&["doctor", "--store", &unknown]), 2, "FAIL", "unknown");
    for sentinel in sentinel.sentinels_mut() {
        sentinel.kill9();
    }
    assert_eq!(lines(&sandbox.run(&["doctor"]), "FAIL").len(), 1);
}

#[test]
fn every_master_of_a_cluster_is_diagnosed() {
    let mut cluster = RedisCluster::start_or_panic();
    let sandbox = Sandbox::on(&cluster.url());
    let output = sandbox.run(&["doctor"]);
    let reachable = lines(&output, "OK").into_iter().filter(|line| line.contains("reachable"));
    assert!(reachable.count() >= 3, "{output:?}");
    let node = &mut cluster.nodes_mut()[0];
    let dead = node.addr();
    node.kill9();
    finds(&sandbox.run(&["doctor"]), 2, "FAIL", &dead.to_string());
}

#[test]
fn a_redis_that_refuses_or_does_not_answer_is_a_failure() {
    let server = RedisServer::builder().password("right").start_or_panic();
    let sandbox = Sandbox::new();
    let wrong = server.url().replace("right", "wrong");
    finds(&sandbox.run(&["doctor", "--store", &wrong]), 2, "FAIL", "password");
    let none = format!("redis://{}/", server.addr());
    finds(&sandbox.run(&["doctor", "--store", &none]), 2, "FAIL", "password");
    let closed = sandbox.run(&["doctor", "--store", "redis://127.0.0.1:1/"]);
    finds(&closed, 2, "FAIL", "127.0.0.1:1");
    server.stop();
    let silent = format!("{}?connect_timeout=200ms", server.url());
    finds(&sandbox.run(&["doctor", "--store", &silent]), 2, "FAIL", "no answer");
    server.cont();
}

#[test]
fn replicas_that_may_lose_grants_or_take_no_locks_are_reported() {
    let master = RedisServer::start_or_panic();
    let replica = RedisServer::builder().replica_of(&master).start_or_panic();
    let sandbox = Sandbox::new();
    let output = sandbox.run(&["doctor", "--store", &master.url()]);
    finds(&output, 1, "WARN", "min_replicas");
    let waits = format!("{}?min_replicas=1", master.url());
    finds(&sandbox.run(&["doctor", "--store", &waits]), 1, "OK", "1 replicas");
    let output = sandbox.run(&["doctor", "--store", &replica.url()]);
    finds(&output, 2, "FAIL", &format!("replica of 127.0.0.1:{}", master.port()));
    let other = RedisServer::start_or_panic();
    let quorum = format!("redlock://{},{},{}", master.addr(), replica.addr(), other.addr());
    let output = sandbox.run(&["doctor", "--store", &quorum]);
    finds(&output, 2, "FAIL", "make it a master");
}

/// A failover may promote any of them.
#[test]
fn replicas_that_grants_do_not_wait_for_are_reported() {
    let master = RedisServer::start_or_panic();
    let replica = || RedisServer::builder().replica_of(&master);
    let (one, two) = (replica().start_or_panic(), replica().start_or_panic());
    let sandbox = Sandbox::new();
    let doctor = |wanted: &str| {
        let url = format!("{}?min_replicas={wanted}", master.url());
        sandbox.run(&["doctor", "--store", &url])
    };
    finds(&doctor("0"), 1, "WARN", "?min_replicas=2");
    finds(&doctor("1"), 1, "WARN", "?min_replicas=2");
    finds(&doctor("2"), 1, "OK", "2 replicas");
    finds(&doctor("3"), 2, "FAIL", "min_replicas");
    // A replica that is never promoted need not have every grant.
    two.command(&["CONFIG", "SET", "replica-priority", "0"]);
    finds(&doctor("1"), 1, "OK", "2 replicas, 1 of which may be promoted");
    drop((one, two));
}

#[test]
fn clocks_of_replicas_are_compared_with_that_of_the_master() {
    let (masters, replicas) = (ServerClock::new().unwrap(), ServerClock::new().unwrap());
    let master = RedisServer::builder().clock(&masters).user("ann", "secret").start_or_panic();
    let replica = RedisServer::builder().clock(&replicas).user("ann", "secret");
    let replica = replica.replica_of(&master).start_or_panic();
    let sandbox = Sandbox::on(&master.url());
    finds(&sandbox.run(&["doctor"]), 1, "OK", "the clocks of its replicas");
    // Both are ahead by the same: the local clock does not matter.
    masters.set_ahead(1_500_000);
    replicas.set_ahead(1_500_000);
    finds(&sandbox.run(&["doctor"]), 1, "OK", "the clocks of its replicas");
    for (master_ahead, replica_ahead, text) in [(400_000, 0, "behind"), (0, 400_000, "ahead of")] {
        masters.set_ahead(master_ahead);
        replicas.set_ahead(replica_ahead);
        let output = sandbox.run(&["doctor"]);
        finds(&output, 1, "WARN", &replica.addr().to_string());
        finds(&output, 1, "WARN", text);
    }
    // The replica refuses the login, and later does not answer.
    masters.set_ahead(0);
    replica.command(&["ACL", "SETUSER", "ann", ">other", "<secret"]);
    let output = sandbox.run(&["doctor"]);
    finds(&output, 1, "WARN", &format!("{} cannot be read", replica.addr()));
    replica.stop();
    let silent = format!("{}?connect_timeout=500ms", master.url());
    let output = sandbox.run(&["doctor", "--store", &silent]);
    replica.cont();
    finds(&output, 1, "WARN", "no answer in time");
    assert!(!format!("{output:?}").contains("secret"), "{output:?}");
}

#[test]
fn a_quorum_is_diagnosed_node_by_node() {
    let nodes = RedlockNodes::start_or_panic(3);
    let sandbox = Sandbox::on(&nodes.url());
    let output = sandbox.run(&["doctor"]);
    finds(&output, 1, "OK", "the nodes ");
    for node in nodes.nodes() {
        finds(&output, 1, "OK", &format!("{}: reachable", node.addr()));
    }
    let [one, two, _] = nodes.nodes() else { panic!("three") };
    let twice = format!("redlock://{},{},localhost:{}", one.addr(), two.addr(), one.port());
    finds(&sandbox.run(&["doctor", "--store", &twice]), 2, "FAIL", "the same server");
}

#[test]
fn a_healthy_postgres_passes_and_a_standby_or_pooler_does_not() {
    let server = PostgresServer::start_or_panic();
    let output = Sandbox::on(&server.url()).run(&["doctor"]);
    assert_eq!(
        (output.code, output.out.lines().count()),
        (Some(0), lines(&output, "OK").len()),
        "{output:?}"
    );
    for text in ["login", "pooler", "idle_session_timeout", "locks", "fsync"] {
        finds(&output, 0, "OK", text);
    }
    server.stop();
    let silent = format!("{}?connect_timeout=1", server.url());
    let output = Sandbox::new().run(&["doctor", "--store", &silent]);
    server.cont();
    assert_eq!(lines(&output, "FAIL").len(), 1, "{output:?}");
    let standby = server.standby().unwrap();
    finds(&Sandbox::on(&standby.url()).run(&["doctor"]), 2, "FAIL", "standby");
    let pooler = PgBouncer::before(&server).unwrap();
    finds(&Sandbox::on(&pooler.url()).run(&["doctor"]), 2, "FAIL", "PgBouncer");
    let unsafe_server = PostgresServer::with_args(&["-c", "fsync=off"]).unwrap();
    finds(&Sandbox::on(&unsafe_server.url()).run(&["doctor"]), 1, "WARN", "fsync");
    let closed = Sandbox::new().run(&["doctor", "--store", "postgres://u:hunter2@127.0.0.1:1/"]);
    assert_eq!(closed.code, Some(2), "{closed:?}");
    assert!(!closed.out.contains("hunter2"), "{closed:?}");
}
