//! Ways to say where the server is and who asks.

use lockkeeper_core::Keeper;
use lockkeeper_redis::{Config, Protocol, Redis};
use lockkeeper_testkit::server::RedisServer;

use crate::common::{key, lock, nothing_left, number, open, server};

#[cfg(feature = "tls")]
#[tokio::test]
async fn locks_over_tls() {
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

/// They are kept for later connections, so that a store that connects again and again does not parse them each time.
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
            // The connection may not be known to be dead yet.
            Err(error) => {
                assert_eq!(error.kind(), lockkeeper_core::ErrorKind::Unavailable, "{error}");
                false
            }
        }
    })
    .await;
    // Each of the three commands since then has had a connection of its own.
    assert!(number(&server, &["CLIENT", "ID"]) > before + 3, "it connected again");
    nothing_left(&keeper, &server).await;
}

/// Files may be on a network that hangs. A pipe stands for one: a read blocks until the test writes.
#[cfg(feature = "tls")]
#[test]
fn certificates_that_are_slow_to_read_hold_up_no_other_task() {
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
            // Opened for writing only when it has been opened for reading.
            let write = tokio::task::spawn_blocking(move || {
                std::fs::OpenOptions::new().write(true).open(&pipe).unwrap()
            });
            let mut file = write.await.unwrap();
            // Only the one thread of this runtime goes on from here.
            tokio::task::yield_now().await;
            std::io::Write::write_all(&mut file, &certificates).unwrap();
            drop(file);
            opening.await.unwrap().close().await;
        });
        let _ = done.send(());
    });
    let finished = finished.recv_timeout(std::time::Duration::from_secs(30));
    assert!(finished.is_ok(), "the runtime's only thread waits for a file");
}

#[tokio::test]
async fn a_password_and_a_user_stand_in_the_url() {
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
    assert!(server.command(&["INFO", "keyspace"]).contains("db3:keys=2"));
    // They do not meet.
    lock(&none, "a").await.release().await.unwrap();
    guard.release().await.unwrap();
    assert!(!server.command(&["INFO", "keyspace"]).contains("db3"));
}

#[tokio::test]
async fn prefixes_keep_locks_apart() {
    let (server, keeper) = server().await;
    let shop = open(&format!("{}?prefix=shop%3Aone", server.url())).await;
    let (ours, theirs) = (lock(&keeper, "a").await, lock(&shop, "a").await);
    assert_eq!(server.command(&["GET", &key("a")]), ours.owner().to_string());
    assert_eq!(server.command(&["GET", "shop:one:{a}"]), theirs.owner().to_string());
    let infos = shop.inspect().unwrap().list("").await.unwrap();
    assert_eq!(infos.len(), 1);
    assert_eq!(infos[0].holders[0].owner, Some(theirs.owner()));
    drop((ours, theirs));
    shop.close().await;
    nothing_left(&keeper, &server).await;
}

#[tokio::test]
async fn a_client_of_the_redis_crate_says_where_to_connect() {
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
        assert!(server.command(&["INFO", "keyspace"]).contains("db2:keys=2"));
        guard.release().await.unwrap();
        keeper.close().await;
        assert!(!server.command(&["INFO", "keyspace"]).contains("db2"));
    }
}
