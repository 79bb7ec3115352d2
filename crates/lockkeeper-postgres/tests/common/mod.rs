//! A server that the tests of a binary share, clients, and helpers.
#![allow(dead_code, unreachable_pub, reason = "no test binary uses all of it")]

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use lockkeeper_core::Keeper;
use lockkeeper_postgres::{AdvisoryKey, Postgres};
use lockkeeper_testkit::server::PostgresServer;
use lockkeeper_testkit::wait::no_longer_than;
use tokio_postgres::{Client, NoTls};

/// A timeout that no working operation reaches, even on a busy machine.
pub const SOON: Duration = Duration::from_secs(30);

/// The arguments of servers that no test crashes.
pub const SERVER_ARGS: [&str; 4] = ["-c", "max_connections=400", "-c", "fsync=off"];

/// Longer than all tests of a binary take together.
const MAX_TEST_TIME: Duration = Duration::from_secs(600);

/// Returns the server that all tests of this binary share. Each test uses its own names.
pub fn server() -> &'static PostgresServer {
    static SERVER: OnceLock<PostgresServer> = OnceLock::new();
    no_longer_than(MAX_TEST_TIME);
    SERVER.get_or_init(|| {
        // A static is never dropped. The server ends with the process.
        PostgresServer::with_args(&SERVER_ARGS).unwrap_or_else(|error| panic!("{error}"))
    })
}

pub fn url() -> String {
    server().url()
}

/// Returns the path of the helper program, which cargo has built as an example.
pub fn helper() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let helper = test.ancestors().nth(2).unwrap().join("examples/postgres_helper");
    assert!(helper.exists(), "{} is missing: run `cargo build --examples`", helper.display());
    helper
}

/// Opens a connection with the bare driver.
pub async fn client_at(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    client
}

pub async fn client() -> Client {
    client_at(&url()).await
}

/// Returns an SQL condition that selects the rows of a key in `pg_locks`.
pub fn in_pg_locks(key: AdvisoryKey) -> String {
    let text = key.to_string();
    let numbers = text.strip_prefix("pg:").unwrap();
    match numbers.split_once(',') {
        Some((first, second)) => format!(
            "locktype = 'advisory' AND objsubid = 2 AND classid::bigint = {first}::bigint & 4294967295 \
             AND objid::bigint = {second}::bigint & 4294967295"
        ),
        None => format!(
            "locktype = 'advisory' AND objsubid = 1 \
             AND (classid::bigint << 32 | objid::bigint) = ({numbers})::bigint"
        ),
    }
}

/// Terminates the sessions that hold a key.
pub async fn terminate_holders(key: AdvisoryKey) {
    terminate_holders_at(&url(), key).await;
}

pub async fn terminate_holders_at(url: &str, key: AdvisoryKey) {
    let sql = format!(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE granted AND {}",
        in_pg_locks(key)
    );
    client_at(url).await.batch_execute(&sql).await.unwrap();
}

/// Returns how many sessions hold a key, and how many wait for it.
pub async fn holders_and_waiters(client: &Client, key: AdvisoryKey) -> (i64, i64) {
    let sql = format!(
        "SELECT count(*) FILTER (WHERE granted), count(*) FILTER (WHERE NOT granted) FROM pg_locks \
         WHERE {}",
        in_pg_locks(key)
    );
    let row = client.query_one(&sql, &[]).await.unwrap();
    (row.get(0), row.get(1))
}

/// Awaits a future, and panics after [`SOON`].
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let output = tokio::time::timeout(SOON, future).await;
    output.unwrap_or_else(|_| panic!("{what}: not within {SOON:?}"))
}

/// Waits until a condition is true.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    soon(what, async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

/// Returns a name that no other test uses.
pub fn name(what: &str) -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    no_longer_than(MAX_TEST_TIME);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("{what}-{}-{count}", std::process::id())
}

/// Returns a store with its own connections to the shared server.
pub fn store(parameters: &str) -> Postgres {
    Postgres::new(&format!("{}?{parameters}", url())).unwrap()
}

pub fn keeper(parameters: &str) -> Keeper {
    Keeper::new(store(parameters))
}

/// Returns how many connections have an application name.
pub async fn sessions(client: &Client, application: &str) -> i64 {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1";
    client.query_one(sql, &[&application]).await.unwrap().get(0)
}

/// Kills a server with SIGKILL, and starts it again.
pub async fn crash_and_restart(mut server: PostgresServer) -> PostgresServer {
    let restarted = tokio::task::spawn_blocking(move || {
        server.kill9();
        server.restart().unwrap();
        server
    });
    restarted.await.unwrap()
}
