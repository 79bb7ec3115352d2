//! Locks over a Unix socket.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use lockkeeper_core::{ErrorKind, Keeper, Severity};
use lockkeeper_redis::{Config, Protocol, Redis, diagnose};
use lockkeeper_testkit::server::{RedisBuilder, RedisServer};
use lockkeeper_testkit::wait::eventually;

use crate::common::{all_of, got, lock, nothing_left, open, try_open, waiter, write};

/// Starts a server with a socket in a directory whose name needs percent-encoding.
fn start(server: RedisBuilder) -> (RedisServer, tempfile::TempDir, PathBuf) {
    let dir = tempfile::Builder::new().prefix("lk ? ").tempdir().unwrap();
    let path = dir.path().join("redis.sock");
    (server.arg("--unixsocket", path.to_str().unwrap()).start_or_panic(), dir, path)
}

fn encoded(path: &Path) -> String {
    path.to_str().unwrap().replace('%', "%25").replace(' ', "%20").replace('?', "%3F")
}

/// Returns the number of connected clients by Unix socket.
fn unix_clients(server: &RedisServer) -> usize {
    let clients = server.command(&["CLIENT", "LIST"]);
    // The flag U, as in `flags=U` or `flags=PU`.
    let flags =
        clients.lines().filter_map(|line| line.split(' ').find(|w| w.starts_with("flags=")));
    flags.filter(|flags| flags.contains('U')).count()
}

#[tokio::test]
async fn locks_work_over_a_unix_socket() {
    let (server, _dir, path) = start(RedisServer::builder().user("ann", "secret"));
    for (protocol, connections) in [("resp3", 1), ("resp2", 2)] {
        let path = encoded(&path);
        let url = format!("redis+unix://ann:secret@{path}?db=2&protocol={protocol}");
        let (one, two) = (open(&url).await, open(&url).await);
        assert!(one.capabilities().push);
        assert_eq!(unix_clients(&server), 2 * connections);
        let guard = lock(&one, "a").await;
        assert!(server.command(&["INFO", "keyspace"]).contains("db2:keys=1"));
        let waiting = waiter(&one, "a", 1, write(&two, "a")).await;
        guard.release().await.unwrap();
        got(waiting).await.release().await.unwrap();
        nothing_left(&one, &server).await;
        nothing_left(&two, &server).await;
        assert!(!server.command(&["INFO", "keyspace"]).contains("db2"));
        drop((one, two));
        eventually("closed connections", async || unix_clients(&server) == 0).await;
    }
}

#[tokio::test]
async fn clients_of_the_socket_and_of_the_port_exclude_each_other() {
    let (server, _dir, path) = start(RedisServer::builder());
    let socket = open(&format!("redis+unix://{}", encoded(&path))).await;
    let tcp = open(&server.url()).await;
    let guard = lock(&socket, "a").await;
    assert!(tcp.mutex("a").try_lock().await.unwrap().is_none());
    guard.release().await.unwrap();
    lock(&tcp, "a").await.release().await.unwrap();
    nothing_left(&socket, &server).await;
}

#[tokio::test]
async fn a_keeper_reconnects_to_the_socket_of_a_restarted_server() {
    let (mut server, _dir, path) = start(RedisServer::builder());
    let keeper = open(&format!("redis+unix://{}", encoded(&path))).await;
    lock(&keeper, "a").await.release().await.unwrap();
    server.restart().unwrap();
    eventually("a lock on the restarted server", async || {
        matches!(keeper.mutex("a").try_lock().await, Ok(Some(_)))
    })
    .await;
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_redis_crate_client_with_a_unix_socket_gives_its_settings() {
    let (server, _dir, path) = start(RedisServer::builder().password("secret"));
    let url = format!("redis+unix://{}?db=3&pass=secret", encoded(&path));
    let config = Config::from_client(&redis::Client::open(url).unwrap()).unwrap();
    for protocol in [Protocol::Any, Protocol::Resp2] {
        let store = Redis::connect(config.clone().protocol(protocol)).await.unwrap();
        let keeper = Keeper::new(store);
        let guard = lock(&keeper, "a").await;
        assert!(server.command(&["INFO", "keyspace"]).contains("db3:keys=1"));
        guard.release().await.unwrap();
        nothing_left(&keeper, &server).await;
    }
}

#[tokio::test]
async fn the_error_for_a_socket_that_cannot_be_opened_names_its_path_and_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("file"), "").unwrap();
    // The socket file stays when the listener is closed.
    drop(UnixListener::bind(at("stale")).unwrap());
    let long = "x".repeat(120);
    for (name, kind, advice) in [
        ("missing", ErrorKind::Unavailable, "check the path in the URL"),
        ("file", ErrorKind::Config, "not a Unix socket"),
        (".", ErrorKind::Config, "not a Unix socket"),
        ("stale", ErrorKind::Unavailable, "start the server"),
        (&long, ErrorKind::Config, "too long"),
    ] {
        let url = format!("redis+unix://ann:hunter2@{}", encoded(&at(name)));
        let error = try_open(&url).await.unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), kind, "{text}");
        assert!(text.contains(at(name).to_str().unwrap()) && text.contains(advice), "{text}");
        assert!(!text.contains('\n') && !all_of(&error).contains("hunter2"), "{text}");
    }
}

/// Permissions do not apply to root. A unit test in `client/unix.rs` checks the same error.
#[tokio::test]
async fn a_socket_without_permission_is_a_config_error() {
    if rustix::process::geteuid().is_root() {
        eprintln!("skipped: permissions do not apply to root");
        return;
    }
    let (_server, _dir, path) = start(RedisServer::builder());
    fs::set_permissions(&path, Permissions::from_mode(0o000)).unwrap();
    let error = try_open(&format!("redis+unix://{}", encoded(&path))).await.unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::Config, "{text}");
    assert!(text.contains(path.to_str().unwrap()) && text.contains("unixsocketperm"), "{text}");
}

#[tokio::test]
async fn diagnosis_names_the_socket() {
    let (_server, _dir, path) = start(RedisServer::builder());
    let findings = diagnose(&format!("redis+unix://{}", encoded(&path))).await.unwrap();
    let name = format!("{}: ", path.display());
    assert!(findings.iter().all(|finding| finding.what.starts_with(&name)), "{findings:?}");
    assert!(findings.iter().all(|finding| finding.severity != Severity::Fail), "{findings:?}");
    let missing = path.with_file_name("missing");
    let findings = diagnose(&format!("redis+unix://{}", encoded(&missing))).await.unwrap();
    let [finding] = findings.as_slice() else { panic!("{findings:?}") };
    assert_eq!(finding.severity, Severity::Fail);
    assert!(finding.what.contains(missing.to_str().unwrap()), "{finding:?}");
}
