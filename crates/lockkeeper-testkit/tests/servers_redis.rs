//! Redis servers, clusters, sentinels and TLS, against the real programs.
#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use lockkeeper_testkit::server::{
    Binaries, RedisCluster, RedisMake, RedisSentinel, RedisServer, RedlockNodes,
};

#[track_caller]
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}: not within a minute");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the processes, ports and directories of servers.
fn resources(servers: &[RedisServer]) -> Vec<(u32, u16, PathBuf)> {
    servers.iter().map(|s| (s.pid(), s.port(), s.dir().to_owned())).collect()
}

#[track_caller]
fn assert_gone(resources: Vec<(u32, u16, PathBuf)>) {
    for (pid, port, dir) in resources {
        let process = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
        assert!(rustix::process::test_kill_process(process).is_err(), "process {pid} still exists");
        assert!(TcpListener::bind(("127.0.0.1", port)).is_ok(), "port {port} is still taken");
        assert!(!dir.exists(), "{} still exists", dir.display());
    }
}

#[test]
fn a_command_returns_text() {
    let redis = RedisServer::start_or_panic();
    assert_eq!(redis.command(&["SET", "a key", "zwölf\r\n"]), "OK");
    assert_eq!(redis.command(&["GET", "a key"]), "zwölf\r\n");
    assert_eq!(redis.command(&["GET", "none"]), "(nil)");
    assert_eq!(redis.command(&["INCR", "n"]), "1");
    assert_eq!(redis.command(&["MGET", "n", "none"]), "1\n(nil)");
    assert_eq!(redis.command(&["PTTL", "n"]), "-1");
    assert_eq!(redis.command(&["KEYS", "none"]), "");
    assert_eq!(redis.command(&["EVAL", "return {1, {2, 'x'}}", "0"]), "1\n2\nx");
    assert_eq!(redis.command(&["DEBUG", "SLEEP", "0"]), "OK");
    let error = redis.try_command(&["LPUSH", "n", "1"]).unwrap_err().to_string();
    assert!(error.starts_with("WRONGTYPE"), "{error}");
    assert!(redis.try_command(&["SHUTDOWN"]).is_err(), "a reply to SHUTDOWN");
}

#[test]
fn a_password_is_required_and_in_the_url() {
    let redis = RedisServer::builder().password("secret").start_or_panic();
    assert_eq!(redis.url(), format!("redis://:secret@127.0.0.1:{}/", redis.port()));
    assert_eq!(redis.command(&["ACL", "WHOAMI"]), "default");
    assert!(rejects_unauthenticated_clients(&redis));
    assert!(
        !format!("{redis:?} {:?}", RedisServer::builder().password("secret")).contains("secret")
    );
}

#[test]
fn a_user_is_required_and_in_the_url() {
    let redis = RedisServer::builder().user("anna", "secret").start_or_panic();
    assert_eq!(redis.url(), format!("redis://anna:secret@127.0.0.1:{}/", redis.port()));
    assert_eq!(redis.command(&["ACL", "WHOAMI"]), "anna");
    assert!(rejects_unauthenticated_clients(&redis));
}

fn rejects_unauthenticated_clients(redis: &RedisServer) -> bool {
    let mut stream = TcpStream::connect(redis.addr()).unwrap();
    stream.write_all(b"GET a\r\n").unwrap();
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply).unwrap();
    reply.starts_with("-NOAUTH")
}

#[test]
fn a_restart_loses_data_unless_it_is_persistent() {
    for (builder, left) in [
        (RedisServer::builder(), "(nil)"),
        (RedisServer::builder().persistent().password("secret"), "1"),
    ] {
        let mut redis = builder.start_or_panic();
        redis.command(&["SET", "a", "1"]);
        redis.restart().unwrap();
        assert_eq!(redis.command(&["GET", "a"]), left);
    }
}

#[test]
fn an_argument_is_passed_on() {
    let redis = RedisServer::builder().arg("--maxmemory", "1mb").start_or_panic();
    assert_eq!(redis.command(&["CONFIG", "GET", "maxmemory"]), "maxmemory\n1048576");
}

#[test]
fn other_server_programs_are_started() {
    for (make, expected) in [
        (RedisMake::Installed, "redis_version:"),
        (RedisMake::Redis62, "redis_version:6.2."),
        (RedisMake::Redis82, "redis_version:8.2."),
        (RedisMake::Valkey, "valkey_version:9."),
    ] {
        let server = RedisServer::builder().make(make).start_or_panic();
        let info = server.command(&["INFO", "server"]);
        assert!(info.lines().any(|line| line.starts_with(expected)), "{make:?}: {info}");
    }
    let error = Binaries::downloaded("redis-6.2", "no-such-server").unwrap_err().to_string();
    assert!(error.ends_with("no-such-server is missing: run `./check servers`"), "{error}");
}

#[test]
fn a_replica_has_the_data_of_its_master() {
    let master = RedisServer::builder().user("anna", "secret").start_or_panic();
    master.command(&["SET", "a", "1"]);
    let replica = RedisServer::builder().replica_of(&master).start_or_panic();
    assert_eq!(replica.command(&["GET", "a"]), "1");
    assert!(replica.try_command(&["SET", "a", "2"]).is_err());
}

#[test]
fn a_cluster_shards_keys_and_is_gone_after_drop() {
    let mut cluster = RedisCluster::start_or_panic();
    let [a, b, c] = cluster.nodes() else { panic!("{cluster:?}") };
    let addresses = format!("127.0.0.1:{},127.0.0.1:{},127.0.0.1:{}", a.port(), b.port(), c.port());
    assert_eq!(cluster.url(), format!("redis+cluster://{addresses}/"));
    // "b" is in slot 3300, "foo" in 12182.
    assert_eq!(a.command(&["SET", "b", "1"]), "OK");
    assert_eq!(c.command(&["SET", "foo", "1"]), "OK");
    let moved = a.try_command(&["SET", "foo", "1"]).unwrap_err().to_string();
    assert_eq!(moved, format!("MOVED 12182 127.0.0.1:{}", c.port()));
    assert_eq!(cluster.dbsize(), 2);

    cluster.nodes_mut()[0].restart().unwrap();
    cluster.wait_until_ok().unwrap();
    assert_eq!(cluster.nodes()[0].command(&["SET", "b", "1"]), "OK");

    let resources = resources(cluster.nodes());
    drop(cluster);
    assert_gone(resources);
}

#[test]
fn redlock_nodes_are_independent_and_gone_after_drop() {
    let mut nodes = RedlockNodes::start_or_panic(3);
    let [a, b, c] = nodes.nodes() else { panic!("{nodes:?}") };
    let addresses = format!("127.0.0.1:{},127.0.0.1:{},127.0.0.1:{}", a.port(), b.port(), c.port());
    assert_eq!(nodes.url(), format!("redlock://{addresses}?min_uptime=0s"));
    assert_eq!(a.command(&["SET", "a", "1"]), "OK");
    assert_eq!(b.command(&["GET", "a"]), "(nil)");
    let resources = resources(nodes.nodes());
    nodes.nodes_mut()[1].kill9();
    drop(nodes);
    assert_gone(resources);
}

#[test]
fn sentinels_replace_a_dead_master_and_are_gone_after_drop() {
    let mut redis = RedisSentinel::start_or_panic();
    let [a, b, c] = redis.sentinels() else { panic!("{redis:?}") };
    let addresses = format!("127.0.0.1:{},127.0.0.1:{},127.0.0.1:{}", a.port(), b.port(), c.port());
    assert_eq!(redis.url(), format!("redis+sentinel://{addresses}/mymaster"));
    assert_eq!(redis.master().command(&["SET", "a", "1"]), "OK");
    assert!(redis.replica().try_command(&["SET", "a", "2"]).is_err());
    wait_until("replication", || redis.replica().command(&["GET", "a"]) == "1");
    let (old, next) = (redis.master().addr(), redis.replica().addr());

    redis.kill_master();
    wait_until("a new master", || {
        redis.master().addr() != old && redis.master().command(&["ROLE"]).starts_with("master")
    });
    assert_eq!(redis.master().addr(), next);
    assert_eq!(redis.master().command(&["GET", "a"]), "1");
    assert!(redis.replica().try_command(&["PING"]).is_err(), "the old master replies");

    let resources = [resources(redis.sentinels()), resources(redis.servers_mut())].concat();
    drop(redis);
    assert_gone(resources);
}

#[test]
fn each_tls_server_has_its_own_ca() {
    let redis = RedisServer::builder().tls().start_or_panic();
    let other = RedisServer::builder().tls().start_or_panic();
    redis.command(&["SET", "a", "1"]);
    let port = redis.url().strip_prefix("rediss://localhost:").unwrap().replace('/', "");
    let get = |ca: &Path| {
        let mut cli = Command::new("redis-cli");
        cli.args(["-h", "127.0.0.1", "-p", &port, "--tls", "--cacert"]).arg(ca);
        let output = cli.args(["GET", "a"]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(get(&redis.ca_file()), "1\n");
    assert_eq!(get(&other.ca_file()), "");
}

#[test]
fn tls_works_with_a_password_and_after_a_restart() {
    let mut redis = RedisServer::builder().tls().password("secret").start_or_panic();
    let url = redis.url();
    assert!(url.starts_with("rediss://:secret@localhost:"), "{url}");
    assert!(redis.ca_file().is_file());
    redis.restart().unwrap();
    assert_eq!(redis.url(), url);
    assert_eq!(redis.command(&["PING"]), "PONG");
}
