//! Servers that restart, fail over, or have no free connection.

use std::time::Duration;

use lockkeeper_core::{ErrorKind, Keeper};
use lockkeeper_postgres::Postgres;
use lockkeeper_testkit::server::PostgresServer;

use crate::common::{client_at, eventually, soon};

/// Runs blocking work on another thread, because the runtime runs the tasks of connections.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    // Without a timeout of its own: starting a server has one, and a base backup takes as long as the disk needs.
    tokio::task::spawn_blocking(work).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_server_restart_holders_have_lost_and_waiters_are_granted() {
    let server = PostgresServer::start_or_panic();
    let keeper = Keeper::new(Postgres::new(&server.url()).unwrap()).ttl(Duration::from_secs(60));
    let mutex = keeper.mutex("a");
    let guard = mutex.lock().await.unwrap();
    let waiter = tokio::spawn(async move { mutex.lock().await });
    let inspect = keeper.inspect().unwrap();
    eventually("it waits", async || inspect.show("a").await.unwrap()[0].waiters.len() == 1).await;
    // A fast shutdown: the server ends all sessions and exits.
    let pid = server.pid().to_string();
    let status = std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap();
    assert!(status.success());
    soon("the loss", guard.lost()).await;
    let _server = blocking(move || {
        let mut server = server;
        while server.answers(Duration::from_secs(1)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        server.restart().unwrap();
        server
    })
    .await;
    let next = soon("the waiter", waiter).await.unwrap().unwrap();
    assert!(next.fence() > guard.fence());
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_ids_rise_over_a_failover_to_a_standby_that_is_behind() {
    let (primary, standby) = blocking(|| {
        let primary = PostgresServer::start_or_panic();
        let standby = primary.standby().unwrap();
        (primary, standby)
    })
    .await;
    let (first, second) = (primary.port(), standby.port());
    let url =
        format!("postgres://postgres@127.0.0.1:{first},127.0.0.1:{second}/postgres?fence=xid");
    let keeper = Keeper::new(Postgres::new(&url).unwrap());
    let mutex = keeper.mutex("a");
    // From now on, the standby receives nothing from the primary.
    let standby = blocking(move || {
        let mut standby = standby;
        standby.kill9();
        standby
    })
    .await;
    for _ in 0..20 {
        mutex.lock().await.unwrap().release().await.unwrap();
    }
    let guard = mutex.lock().await.unwrap();
    let before = guard.fence().unwrap().get();
    let standby = blocking(move || {
        let (mut primary, mut standby) = (primary, standby);
        primary.kill9();
        standby.restart().unwrap();
        standby
    })
    .await;
    soon("the loss", guard.lost()).await;
    let client = client_at(&standby.url()).await;
    client.batch_execute("SELECT pg_promote()").await.unwrap();
    let recovers = "SELECT pg_is_in_recovery()";
    eventually("it is promoted", async || {
        !client.query_one(recovers, &[]).await.unwrap().get::<_, bool>(0)
    })
    .await;
    let guard = soon("lock", async {
        loop {
            match mutex.lock().await {
                Ok(guard) => break guard,
                // The new primary may refuse writes for a short time.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    })
    .await;
    let after = guard.fence().unwrap().get();
    assert!(after > before, "{after} after {before}");
    let xid = |fence: u64| fence & ((1 << 48) - 1);
    assert!(xid(after) <= xid(before), "the standby was not behind, so the test has no effect");
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_at_its_connection_limit_is_named_in_the_error() {
    let args = ["-c", "max_connections=4", "-c", "superuser_reserved_connections=0"];
    let server = PostgresServer::with_args(&args).unwrap();
    let store = Postgres::new(&server.url()).unwrap();
    let keeper = Keeper::new(store.clone()).ttl(Duration::from_secs(4));
    let mut others = vec![client_at(&server.url()).await];
    // The client that checked the start of the server may still be connected.
    let clients = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'";
    eventually("the server is empty", async || {
        others[0].query_one(clients, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    for _ in 1..4 {
        others.push(client_at(&server.url()).await);
    }
    let error = soon("connect", store.check()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("too many clients already"), "{error}");
    assert!(error.to_string().contains("raise the server's max_connections"), "{error}");
    let error = soon("lock", keeper.mutex("a").lock()).await.unwrap_err();
    assert!(error.to_string().contains("raise the server's max_connections"), "{error}");
    // One free connection is enough to hold and to wait.
    others.pop();
    let guard = soon("lock", async {
        loop {
            match keeper.mutex("a").lock().await {
                Ok(guard) => break guard,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    })
    .await;
    let mutex = keeper.mutex("a");
    let waiter = tokio::spawn(async move { mutex.lock().await });
    let other = soon("another name", keeper.mutex("b").lock()).await.unwrap();
    guard.release().await.unwrap();
    soon("the waiter", waiter).await.unwrap().unwrap().release().await.unwrap();
    other.release().await.unwrap();
}
