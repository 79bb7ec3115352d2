//! URLs, credentials, databases, prefixes and TLS.

use lockkeeper_core::Keeper;
use lockkeeper_redis::{Config, Protocol, Redis};
use lockkeeper_testkit::server::RedisServer;

use crate::common::{key, lock, nothing_left, number, open, server};

#[cfg(feature = "tls")]
#[tokio::test]
async fn locks_work_over_tls() {
    use crate::common::{got, waiter, write};

    let server = RedisServer::builder().tls().start_or_panic();
    for protocol in ["resp2", "resp3"] {
        let ca = server.ca_file();
        let url = format!("{}?ca_file={}&protocol={protocol}", server.url(), ca.display());
        assert!(url.starts_with("rediss://localhost:"), "{url}");
        let (one, two) = (open(&url).await, open(&url).await);
        let guard = lock(&one, "a").await;
        let waiting = waiter(&one, "a", 1, write(&two, "a")).await;
        guard.release().await.unwrap();
        got(waiting).await.release().await.unwrap();
        nothing_left(&two, &server).await;
        nothing_left(&one, &server).await;
    }
}

/// A store that reconnects often does not parse them each time.
#[cfg(feature = "tls")]
#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_read_once_for_several_connections() {
    let server = RedisServer::builder().tls().start_or_panic();
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().join("ca.pem");
    std::fs::copy(server.ca_file(), &ca).unwrap();
    let keeper = open(&format!("{}?ca_file={}", server.url(), ca.display())).await;
    std::fs::remove_file(&ca).unwrap();
    let before = number(&server, &["CLIENT", "ID"]);
    for kind in ["normal", "pubsub"] {
        server.command(&["CLIENT", "KILL", "TYPE", kind]);
    }
    lockkeeper_testkit::wait::eventually("a lock on another connection", async || {
        match keeper.mutex("a").try_lock().await {
            Ok(guard) => guard.is_some(),
            // The client may not have noticed that the connection is closed.
            Err(error) => {
                assert_eq!(error.kind(), lockkeeper_core::ErrorKind::Unavailable, "{error}");
                false
            }
        }
    })
    .await;
    // Each of the three commands since then used a new connection.
    assert!(number(&server, &["CLIENT", "ID"]) > before + 3, "the client did not reconnect");
    nothing_left(&keeper, &server).await;
}

/// Simulates a file on a hanging network file system by a pipe: a read blocks until the test writes.
#[cfg(feature = "tls")]
#[test]
fn a_certificate_file_that_is_slow_to_read_does_not_block_other_tasks() {
    let server = RedisServer::builder().tls().start_or_panic();
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("ca.pem");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let certificates = std::fs::read(server.ca_file()).unwrap();
    let url = format!("{}?ca_file={}&connect_timeout=60s", server.url(), pipe.display());
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let opening = tokio::spawn(async move { open(&url).await });
            // Opening for writing blocks until the client has opened it for reading.
            let write = tokio::task::spawn_blocking(move || {
                std::fs::OpenOptions::new().write(true).open(&pipe).unwrap()
            });
            let mut file = write.await.unwrap();
            // Continues only if the runtime's only thread is not blocked.
            tokio::task::yield_now().await;
            std::io::Write::write_all(&mut file, &certificates).unwrap();
            drop(file);
            opening.await.unwrap().close().await;
        });
        let _ = done.send(());
    });
    let finished = finished.recv_timeout(std::time::Duration::from_secs(30));
    assert!(finished.is_ok(), "the runtime's only thread is blocked by a file");
}

#[tokio::test]
async fn the_url_sets_password_and_user() {
    let server = RedisServer::builder().password("secret").start_or_panic();
    let keeper = open(&server.url()).await;
    lock(&keeper, "a").await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
    let server = RedisServer::builder().user("ann", "secret").start_or_panic();
    for protocol in ["resp2", "resp3"] {
        let keeper = open(&format!("{}?protocol={protocol}", server.url())).await;
        lock(&keeper, "a").await.release().await.unwrap();
        nothing_left(&keeper, &server).await;
    }
}

#[tokio::test]
async fn a_user_needs_no_dangerous_command_and_only_keys_and_channels_with_the_prefix() {
    let server = RedisServer::start_or_panic();
    let allowed = ["~lockkeeper:*", "&lockkeeper:*", "+@all", "-@admin", "-@dangerous"];
    let mut command = vec!["ACL", "SETUSER", "ann", "on", ">a%b/c@d", "resetchannels"];
    command.extend(allowed);
    server.command(&command);
    let url = format!("redis://ann:a%25b%2Fc%40d@127.0.0.1:{}/", server.port());
    let keeper = open(&url).await;
    assert!(keeper.capabilities().push);
    lock(&keeper, "a").await.release().await.unwrap();
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn locks_are_in_the_database_of_the_url() {
    let server = RedisServer::start_or_panic();
    let (three, none) = (open(&format!("{}3", server.url())).await, open(&server.url()).await);
    let guard = lock(&three, "a").await;
    assert_eq!(number(&server, &["DBSIZE"]), 0);
    assert!(server.command(&["INFO", "keyspace"]).contains("db3:keys=1"));
    // The same name in another database is another lock.
    lock(&none, "a").await.release().await.unwrap();
    guard.release().await.unwrap();
    assert!(!server.command(&["INFO", "keyspace"]).contains("db3"));
}

#[tokio::test]
async fn locks_with_different_prefixes_are_independent() {
    let (server, keeper) = server().await;
    let shop = open(&format!("{}?prefix=shop%3Aone", server.url())).await;
    let (ours, theirs) = (lock(&keeper, "a").await, lock(&shop, "a").await);
    assert!(server.command(&["GET", &key("a")]).starts_with(&ours.owner().to_string()));
    assert!(server.command(&["GET", "shop:one:{a}"]).starts_with(&theirs.owner().to_string()));
    let infos = shop.inspect().unwrap().list("").await.unwrap();
    assert_eq!(infos.len(), 1);
    assert_eq!(infos[0].holders[0].owner, Some(theirs.owner()));
    drop((ours, theirs));
    shop.close().await;
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_keeper_opens_with_the_settings_of_a_redis_crate_client() {
    let server = RedisServer::builder().user("ann", "secret").start_or_panic();
    let client = redis::Client::open(format!("{}2", server.url())).unwrap();
    let config = Config::from_client(&client).unwrap();
    let shown = format!("{config:?}");
    assert!(!shown.contains("secret") && !shown.contains("ann"), "{shown}");
    for protocol in [Protocol::Any, Protocol::Resp2] {
        let config = config.clone().protocol(protocol).prefix("shop").unwrap();
        let keeper = Keeper::new(Redis::connect(config).await.unwrap());
        let shown = format!("{keeper:?}");
        assert!(!shown.contains("secret"), "{shown}");
        let guard = lock(&keeper, "a").await;
        assert!(server.command(&["INFO", "keyspace"]).contains("db2:keys=1"));
        guard.release().await.unwrap();
        keeper.close().await;
        assert!(!server.command(&["INFO", "keyspace"]).contains("db2"));
    }
}
