//! Servers and URLs that are refused, and their errors.

use std::time::{Duration, Instant};

use lockkeeper_core::{Error, ErrorKind, Keeper};
use lockkeeper_postgres::Postgres;
use lockkeeper_testkit::server::{PgBouncer, PostgresServer};

use crate::common::{SOON, client, client_at, name, server, soon, url};

/// Returns the error of connecting to a URL, and checks that a lock fails with an error of the same kind.
async fn refusal(url: &str, kind: ErrorKind) -> Error {
    let error = soon("open", Postgres::connect(url)).await.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    let keeper = Keeper::new(Postgres::new(url).unwrap());
    let used = soon("lock", keeper.mutex("a").lock()).await.unwrap_err();
    assert_eq!(used.kind(), kind, "{used}");
    assert!(used.to_string().starts_with("postgres: lock \"a\": "), "{used}");
    for shown in [error.to_string(), format!("{error:?}"), used.to_string(), format!("{keeper:?}")]
    {
        assert!(!shown.contains("hunter2") && !shown.contains('\n'), "{shown}");
    }
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        assert!(!format!("{inner} {inner:?}").contains("hunter2"), "{inner:?}");
        cause = inner.source();
    }
    error
}

#[tokio::test]
async fn a_pooler_is_refused() {
    // Session mode would be safe, but cannot be distinguished from the other modes.
    for bouncer in [PgBouncer::before(server()), PgBouncer::pooling_sessions(server())] {
        let bouncer = bouncer.unwrap();
        // The pooler works.
        client_at(&bouncer.url()).await.batch_execute("SELECT 1").await.unwrap();
        let error = refusal(&bouncer.url(), ErrorKind::Config).await;
        assert!(error.to_string().contains("connect to the server directly"), "{error}");
    }
}

#[tokio::test]
async fn a_standby_is_refused_and_the_primary_is_chosen_from_several_hosts() {
    let standby = server().standby().unwrap();
    let error = refusal(&standby.url(), ErrorKind::Config).await;
    assert!(error.to_string().contains("connect to the primary"), "{error}");
    let (first, second) = (standby.port(), server().port());
    let url = format!("postgres://postgres@127.0.0.1:{first},127.0.0.1:{second}/postgres");
    let keeper = Keeper::new(soon("connect", Postgres::connect(&url)).await.unwrap());
    keeper.mutex(name("hosts")).lock().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_wrong_or_missing_password_is_refused() {
    let server = PostgresServer::start_or_panic();
    let sql = "CREATE ROLE me LOGIN PASSWORD 'secret-7'";
    client_at(&server.url()).await.batch_execute(sql).await.unwrap();
    let rules = "host all postgres all trust\nhost all all all scram-sha-256\n";
    std::fs::write(server.dir().join("data/pg_hba.conf"), rules).unwrap();
    let reload = "SELECT pg_reload_conf()";
    client_at(&server.url()).await.batch_execute(reload).await.unwrap();
    let at = |password: &str| server.url().replace("postgres@", &format!("me{password}@"));
    // The server reads its rules asynchronously.
    let refused = async || Postgres::connect(&at(":hunter2")).await.is_err();
    crate::common::eventually("the rules are read", refused).await;
    let error = refusal(&at(":hunter2"), ErrorKind::Config).await;
    assert!(error.to_string().contains("check the user and the password"), "{error}");
    let error = Postgres::connect(&at("")).await.unwrap_err();
    assert!(error.to_string().contains("the URL has none"), "{error}");
    // This role may not create the sequence of fences.
    let url = format!("{}?fence=off", at(":secret-7"));
    Postgres::connect(&url).await.unwrap();
}

#[tokio::test]
async fn the_error_names_a_missing_database() {
    let error = refusal(&url().replace("/postgres", "/nosuch"), ErrorKind::Config).await;
    assert!(error.to_string().contains("\"nosuch\" does not exist"), "{error}");
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_unavailable() {
    let mut server = PostgresServer::start_or_panic();
    server.kill9();
    let error = refusal(&server.url(), ErrorKind::Unavailable).await;
    let expected = format!("postgres: connect: 127.0.0.1:{}: Connection refused", server.port());
    assert!(error.to_string().starts_with(&expected), "{error}");
    // Of several hosts, all are named.
    let url = format!("postgres://me:hunter2@127.0.0.1:{0},localhost:{0}/db", server.port());
    let error = refusal(&url, ErrorKind::Unavailable).await;
    let expected = format!(
        "postgres: connect: 127.0.0.1:{0},localhost:{0}: Connection refused",
        server.port()
    );
    assert!(error.to_string().starts_with(&expected), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_hangs_is_unavailable_in_bounded_time() {
    let server = PostgresServer::start_or_panic();
    let url = format!("{}?connect_timeout=1", server.url());
    let store = Postgres::connect(&server.url()).await.unwrap();
    let keeper = Keeper::new(store).ttl(Duration::from_secs(4));
    let guard = keeper.mutex("a").lock().await.unwrap();
    server.stop();
    let start = Instant::now();
    refusal(&url, ErrorKind::Unavailable).await;
    // Also over a connection that was open before. Holders are notified of the loss.
    let error = soon("try_lock", keeper.mutex("b").try_lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    soon("the loss", guard.lost()).await;
    assert!(start.elapsed() < SOON);
    server.cont();
    soon("lock", async {
        // Sessions that hung may still exist.
        while keeper.mutex("a").lock().await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_full_lock_table_fails_new_locks_and_keeps_held_ones() {
    let args = ["-c", "max_connections=5", "-c", "max_locks_per_transaction=10"];
    let server = PostgresServer::with_args(&args).unwrap();
    // The store may open more connections than the server accepts, and uses those that it has.
    let keeper = Keeper::new(Postgres::new(&server.url()).unwrap());
    let mut guards = Vec::new();
    let error = loop {
        match soon("lock", keeper.mutex(format!("lock/{}", guards.len())).lock()).await {
            Ok(guard) => guards.push(guard),
            Err(error) => break error,
        }
        assert!(guards.len() < 50_000, "the lock table is never full");
    };
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("max_locks_per_transaction"), "{error}");
    let held = guards.len();
    guards.truncate(held / 2);
    soon("lock", async {
        while keeper.mutex("another").lock().await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    keeper.inspect().unwrap().list("").await.unwrap();
    assert!(guards.iter().all(lockkeeper_core::Guard::is_held), "an error released other locks");
}

#[tokio::test]
async fn of_many_concurrent_tries_those_that_fit_into_the_lock_table_are_granted() {
    let args = ["-c", "max_connections=5", "-c", "max_locks_per_transaction=10"];
    let server = PostgresServer::with_args(&args).unwrap();
    // On one connection, they share statements.
    let url = format!("{}?max_connections=1", server.url());
    let keeper = Keeper::new(Postgres::new(&url).unwrap());
    let mut guards = Vec::new();
    while let Ok(guard) = soon("lock", keeper.mutex(format!("{}", guards.len())).lock()).await {
        guards.push(guard);
    }
    for guard in guards.split_off(guards.len() - 16) {
        guard.release().await.unwrap();
    }
    let tries = (0..32).map(|place| {
        let mutex = keeper.mutex(format!("at once/{place}"));
        tokio::spawn(async move { mutex.try_lock().await })
    });
    let (mut granted, mut refused) = (Vec::new(), 0);
    for tried in tries.collect::<Vec<_>>() {
        match soon("a try", tried).await.unwrap() {
            Ok(guard) => granted.extend(guard),
            Err(error) => {
                assert!(error.to_string().contains("max_locks_per_transaction"), "{error}");
                refused += 1;
            }
        }
    }
    assert!(refused > 0, "all tries fit, so the test has no effect");
    assert!(granted.len() > 8, "only {} were granted, and {refused} were refused", granted.len());
    assert!(guards.iter().all(lockkeeper_core::Guard::is_held), "an error released other locks");
}

#[tokio::test]
async fn a_lock_cannot_be_detached_from_its_session() {
    let keeper = crate::common::keeper("");
    let guard = keeper.mutex(name("detached")).lock().await.unwrap();
    assert_eq!(guard.detach().unwrap_err().kind(), ErrorKind::Unsupported);
    drop(client().await);
}
