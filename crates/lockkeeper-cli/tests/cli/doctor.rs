//! `doctor`, on healthy and on sick stores.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::process::Command;

use lockkeeper_testkit::server::{
    PgBouncer, PostgresServer, RedisCluster, RedisSentinel, RedisServer, RedlockNodes, ServerClock,
};

use crate::common::{Running, Said, Sandbox};

/// The lines that begin with a severity.
fn lines<'a>(said: &'a Said, severity: &str) -> Vec<&'a str> {
    said.out.lines().filter(|line| line.starts_with(severity)).collect()
}

#[track_caller]
fn finds(said: &Said, code: i32, severity: &str, text: &str) {
    assert_eq!(said.code, Some(code), "{said:?}");
    let found = lines(said, severity).iter().any(|line| line.contains(text));
    assert!(found, "no {severity} with {text:?}: {said:?}");
}

#[test]
fn a_healthy_directory_is_well_and_sick_ones_are_not() {
    let sandbox = Sandbox::new();
    let said = sandbox.say(&["doctor"]);
    assert_eq!((said.code, lines(&said, "OK").len()), (Some(0), 5), "{said:?}");

    let dir = sandbox.path("open to all");
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    let url = format!("file:{}?polling=on", dir.display());
    finds(&sandbox.say(&["doctor", "--store", &url]), 2, "FAIL", "every user may write to it");
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777)).unwrap();
    let said = sandbox.say(&["doctor", "--store", &url]);
    finds(&said, 1, "WARN", "others may create files");
    finds(&said, 1, "WARN", "not told of changes");

    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    let url = format!("file:{}", dir.display());
    finds(&sandbox.say(&["doctor", "--store", &url]), 1, "WARN", "others may read");

    let temporary = tempfile::tempdir().unwrap();
    let url = format!("file:{}", temporary.path().display());
    finds(&sandbox.say(&["doctor", "--store", &url]), 1, "WARN", "where old files are removed");

    let mut command = sandbox.command(&["doctor"]);
    command.env("XDG_RUNTIME_DIR", sandbox.path(""));
    finds(&Running::start(command).end(), 1, "WARN", "last session ends");

    fs::write(sandbox.path("plain"), "").unwrap();
    let url = format!("file:{}", sandbox.path("plain").display());
    finds(&sandbox.say(&["doctor", "--store", &url]), 2, "FAIL", "not a directory");
    // Nobody may write there, not even root.
    finds(&sandbox.say(&["doctor", "--store", "file:/proc/self"]), 2, "FAIL", "may write to");
    assert_eq!(sandbox.say(&["doctor", "--store", "zoo:x"]).code, Some(64));
}

/// Only root can give a directory away.
#[test]
fn a_directory_of_another_user_is_a_failure() {
    if !rustix::process::geteuid().is_root() {
        // To stderr itself, which the test harness does not capture.
        let test = "a_directory_of_another_user_is_a_failure";
        let _ = writeln!(std::io::stderr(), "NOT RUN: {test}: only root can give a directory away");
        return;
    }
    let sandbox = Sandbox::new();
    let theirs = sandbox.path("theirs");
    fs::create_dir(&theirs).unwrap();
    chown(&theirs, Some(12_345), None).unwrap();
    let url = format!("file:{}", theirs.display());
    finds(&sandbox.say(&["doctor", "--store", &url]), 2, "FAIL", "it belongs to user 12345");
    let said = sandbox.say(&["run", "--store", &url, "a", "--", "true"]);
    assert!(said.err.contains("chown 0"), "{said:?}");
}

#[test]
fn a_healthy_redis_is_well() {
    let server = RedisServer::builder().persistent().start_or_panic();
    let said = Sandbox::on(&server.url()).say(&["doctor"]);
    assert_eq!(
        (said.code, said.out.lines().count()),
        (Some(0), lines(&said, "OK").len()),
        "{said:?}"
    );
    for text in ["login is right", "Redis", "RESP3", "noeviction", "appendfsync always", "clock"] {
        finds(&said, 0, "OK", text);
    }
    let said = Sandbox::on(&server.url()).say(&["doctor", "--json"]);
    for line in said.out.lines() {
        let finding: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(finding["severity"], "ok");
    }
}

#[test]
fn a_redis_that_may_lose_locks_is_told_apart() {
    let server = RedisServer::start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    finds(&sandbox.say(&["doctor"]), 1, "WARN", "a restart forgets locks");
    server.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    finds(&sandbox.say(&["doctor"]), 1, "WARN", "no maxmemory yet");
    server.command(&["CONFIG", "SET", "maxmemory", "100mb"]);
    finds(&sandbox.say(&["doctor"]), 2, "FAIL", "locks may be evicted");
    let wanting = format!("{}?min_replicas=1", server.url());
    finds(&sandbox.say(&["doctor", "--store", &wanting]), 2, "FAIL", "min_replicas is 1");
    let resp2 = format!("{}?protocol=resp2", server.url());
    finds(&sandbox.say(&["doctor", "--store", &resp2]), 2, "OK", "RESP2 as asked for");
}

#[test]
fn grants_that_a_crash_may_forget_are_told_of() {
    let log = RedisServer::builder().arg("--appendonly", "yes").start_or_panic();
    let said = Sandbox::on(&log.url()).say(&["doctor"]);
    finds(&said, 1, "WARN", "a crash may forget the last grants (appendfsync everysec)");
}

#[test]
fn a_user_that_may_not_read_settings_is_no_failure() {
    let server = RedisServer::start_or_panic();
    let rules = ["on", ">secret", "~*", "&*", "+@all", "-info", "-config"];
    server.command(&[&["ACL", "SETUSER", "low"][..], &rules].concat());
    let sandbox = Sandbox::on(&server.url().replace("redis://", "redis://low:secret@"));
    let said = sandbox.say(&["doctor"]);
    for text in ["INFO is not allowed", "CONFIG GET is not allowed"] {
        finds(&said, 1, "WARN", text);
    }
    finds(&said, 1, "OK", "RESP3");
    assert_eq!(sandbox.say(&["run", "a", "true"]).code, Some(0), "as it says: no failure");
    server.command(&["ACL", "SETUSER", "low", "resetchannels"]);
    finds(&sandbox.say(&["doctor"]), 1, "WARN", "no messages come through");
    assert!(!format!("{said:?}").contains("secret"), "{said:?}");
}

/// Puts the wall clock of a program forward by an hour, and leaves its other clocks alone.
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
fn a_clock_that_differs_is_told_of() {
    let server = RedisServer::builder().persistent().start_or_panic();
    let sandbox = Sandbox::on(&server.url());
    let (source, shim) = (sandbox.path("shim.c"), sandbox.path("shim.so"));
    fs::write(&source, SHIM).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&shim).arg(&source);
    assert_eq!(Running::start(compiler).end().code, Some(0), "there is a C compiler");
    let mut command = sandbox.command(&["doctor"]);
    command.env("LD_PRELOAD", &shim);
    let said = Running::start(command).end();
    finds(&said, 1, "WARN", "clock is 3600.0s from the one here: leases survive that");
    finds(&sandbox.say(&["doctor"]), 0, "OK", "clock agrees");
}

#[test]
fn behind_sentinels_the_master_is_diagnosed() {
    let mut sentinel = RedisSentinel::start_or_panic();
    let sandbox = Sandbox::on(&sentinel.url());
    let said = sandbox.say(&["doctor"]);
    let master = sentinel.master().addr();
    finds(&said, 1, "OK", &format!("{master}: reachable"));
    finds(&said, 1, "WARN", &format!("{master}: 1 replicas, and grants do not wait"));
    let waits = format!("{}?min_replicas=1", sentinel.url());
    finds(&sandbox.say(&["doctor", "--store", &waits]), 1, "OK", "grants wait for 1 of them");
    let nobody = sentinel.url().replace("mymaster", "nobody");
    finds(&sandbox.say(&["doctor", "--store", &nobody]), 2, "FAIL", "nobody");
    for sentinel in sentinel.sentinels_mut() {
        sentinel.kill9();
    }
    assert_eq!(lines(&sandbox.say(&["doctor"]), "FAIL").len(), 1);
}

#[test]
fn every_master_of_a_cluster_is_diagnosed() {
    let mut cluster = RedisCluster::start_or_panic();
    let sandbox = Sandbox::on(&cluster.url());
    let said = sandbox.say(&["doctor"]);
    let reachable = lines(&said, "OK").into_iter().filter(|line| line.contains("reachable"));
    assert!(reachable.count() >= 3, "{said:?}");
    let node = &mut cluster.nodes_mut()[0];
    let dead = node.addr();
    node.kill9();
    finds(&sandbox.say(&["doctor"]), 2, "FAIL", &dead.to_string());
}

#[test]
fn a_redis_that_cannot_be_used_fails() {
    let server = RedisServer::builder().password("right").start_or_panic();
    let sandbox = Sandbox::new();
    let wrong = server.url().replace("right", "wrong");
    finds(&sandbox.say(&["doctor", "--store", &wrong]), 2, "FAIL", "password");
    let none = format!("redis://{}/", server.addr());
    finds(&sandbox.say(&["doctor", "--store", &none]), 2, "FAIL", "wants a password");
    let nobody = sandbox.say(&["doctor", "--store", "redis://127.0.0.1:1/"]);
    finds(&nobody, 2, "FAIL", "127.0.0.1:1");
    server.stop();
    let silent = format!("{}?connect_timeout=200ms", server.url());
    finds(&sandbox.say(&["doctor", "--store", &silent]), 2, "FAIL", "no answer");
    server.cont();
}

#[test]
fn replicas_are_told_of() {
    let master = RedisServer::start_or_panic();
    let replica = RedisServer::builder().replica_of(&master).start_or_panic();
    let sandbox = Sandbox::new();
    let said = sandbox.say(&["doctor", "--store", &master.url()]);
    finds(&said, 1, "WARN", "1 replicas, and grants do not wait");
    let waits = format!("{}?min_replicas=1", master.url());
    finds(&sandbox.say(&["doctor", "--store", &waits]), 1, "OK", "grants wait for 1 of them");
    let said = sandbox.say(&["doctor", "--store", &replica.url()]);
    finds(&said, 2, "FAIL", &format!("a replica of 127.0.0.1:{}", master.port()));
    let other = RedisServer::start_or_panic();
    let quorum = format!("redlock://{},{},{}", master.addr(), replica.addr(), other.addr());
    let said = sandbox.say(&["doctor", "--store", &quorum]);
    finds(&said, 2, "FAIL", "must know nothing of each other");
}

/// A failover may go to any of them.
#[test]
fn replicas_that_grants_do_not_wait_for_are_told_of() {
    let master = RedisServer::start_or_panic();
    let replica = || RedisServer::builder().replica_of(&master);
    let (one, two) = (replica().start_or_panic(), replica().start_or_panic());
    let sandbox = Sandbox::new();
    let say = |wanted: &str| {
        let url = format!("{}?min_replicas={wanted}", master.url());
        sandbox.say(&["doctor", "--store", &url])
    };
    finds(&say("0"), 1, "WARN", "put ?min_replicas=2 into the URL");
    finds(&say("1"), 1, "WARN", "2 replicas, and grants wait for only 1 of them");
    finds(&say("1"), 1, "WARN", "put ?min_replicas=2 into the URL");
    finds(&say("2"), 1, "OK", "2 replicas, and grants wait for 2 of them");
    finds(&say("3"), 2, "FAIL", "min_replicas is 3");
    // One that is never promoted need not have every grant.
    two.command(&["CONFIG", "SET", "replica-priority", "0"]);
    finds(
        &say("1"),
        1,
        "OK",
        "2 replicas, 1 of which may be promoted, and grants wait for 1 of them",
    );
    drop((one, two));
}

#[test]
fn clocks_of_replicas_are_compared_with_the_masters() {
    let (masters, replicas) = (ServerClock::new().unwrap(), ServerClock::new().unwrap());
    let master = RedisServer::builder().clock(&masters).user("ann", "secret").start_or_panic();
    let replica = RedisServer::builder().clock(&replicas).user("ann", "secret");
    let replica = replica.replica_of(&master).start_or_panic();
    let sandbox = Sandbox::on(&master.url());
    finds(&sandbox.say(&["doctor"]), 1, "OK", "the clocks of its replicas agree with its own");
    // Both of the same: the one here is not asked.
    masters.set_ahead(1_500_000);
    replicas.set_ahead(1_500_000);
    finds(&sandbox.say(&["doctor"]), 1, "OK", "the clocks of its replicas agree with its own");
    for (master_ahead, replica_ahead, text) in
        [(400_000, 0, "behind its own"), (0, 400_000, "ahead of its own")]
    {
        masters.set_ahead(master_ahead);
        replicas.set_ahead(replica_ahead);
        let said = sandbox.say(&["doctor"]);
        finds(&said, 1, "WARN", &format!("the clock of its replica {} is", replica.addr()));
        finds(&said, 1, "WARN", text);
    }
    // The replica refuses the login, and later does not answer.
    masters.set_ahead(0);
    replica.command(&["ACL", "SETUSER", "ann", ">other", "<secret"]);
    let said = sandbox.say(&["doctor"]);
    finds(&said, 1, "WARN", &format!("the clock of its replica {} cannot be read", replica.addr()));
    replica.stop();
    let silent = format!("{}?connect_timeout=500ms", master.url());
    let said = sandbox.say(&["doctor", "--store", &silent]);
    replica.cont();
    finds(&said, 1, "WARN", "cannot be read: no answer in time");
    assert!(!format!("{said:?}").contains("secret"), "{said:?}");
}

#[test]
fn a_quorum_is_diagnosed_node_by_node() {
    let nodes = RedlockNodes::start_or_panic(3);
    let sandbox = Sandbox::on(&nodes.url());
    let said = sandbox.say(&["doctor"]);
    finds(&said, 1, "OK", "the nodes know nothing of each other");
    for node in nodes.nodes() {
        finds(&said, 1, "OK", &format!("{}: reachable", node.addr()));
    }
    let [one, two, _] = nodes.nodes() else { panic!("three") };
    let twice = format!("redlock://{},{},localhost:{}", one.addr(), two.addr(), one.port());
    finds(&sandbox.say(&["doctor", "--store", &twice]), 2, "FAIL", "the same server as");
}

#[test]
fn a_healthy_postgres_is_well_and_what_stands_in_its_place_is_not() {
    let server = PostgresServer::start_or_panic();
    let said = Sandbox::on(&server.url()).say(&["doctor"]);
    assert_eq!(
        (said.code, said.out.lines().count()),
        (Some(0), lines(&said, "OK").len()),
        "{said:?}"
    );
    for text in ["login is right", "no pooler", "idle_session_timeout", "locks in use", "fsync"] {
        finds(&said, 0, "OK", text);
    }
    server.stop();
    let silent = format!("{}?connect_timeout=1", server.url());
    let said = Sandbox::new().say(&["doctor", "--store", &silent]);
    server.cont();
    assert_eq!(lines(&said, "FAIL").len(), 1, "{said:?}");
    let standby = server.standby().unwrap();
    finds(&Sandbox::on(&standby.url()).say(&["doctor"]), 2, "FAIL", "a standby");
    let pooler = PgBouncer::before(&server).unwrap();
    finds(&Sandbox::on(&pooler.url()).say(&["doctor"]), 2, "FAIL", "PgBouncer");
    let hasty = PostgresServer::with_args(&["-c", "fsync=off"]).unwrap();
    finds(&Sandbox::on(&hasty.url()).say(&["doctor"]), 1, "WARN", "fsync is off");
    let nobody = Sandbox::new().say(&["doctor", "--store", "postgres://u:hunter2@127.0.0.1:1/"]);
    assert_eq!(nobody.code, Some(2), "{nobody:?}");
    assert!(!nobody.out.contains("hunter2"), "{nobody:?}");
}
