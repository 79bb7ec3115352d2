//! Helpers for these tests.

use std::pin::Pin;
use std::time::Duration;

use lockkeeper_core::{Error, Guard, Keeper, Result};
use lockkeeper_redis::{Config, Redis};
use lockkeeper_testkit::server::{RedisMake, RedisServer};
use lockkeeper_testkit::wait::{eventually, soon};
use tokio::task::JoinHandle;

pub(crate) async fn open(url: &str) -> Keeper {
    try_open(url).await.unwrap()
}

pub(crate) async fn try_open(url: &str) -> Result<Keeper> {
    let config = Config::from_url(url)?;
    Ok(Keeper::new(soon("a connection", Redis::connect(config)).await?))
}

/// Starts a server and opens a keeper on it.
pub(crate) async fn server() -> (RedisServer, Keeper) {
    server_of(RedisMake::Installed).await
}

/// Starts a server of this make and opens a keeper on it.
pub(crate) async fn server_of(make: RedisMake) -> (RedisServer, Keeper) {
    let server = RedisServer::builder().make(make).start_or_panic();
    let keeper = open(&server.url()).await;
    (server, keeper)
}

/// Returns the key of the exclusive holder.
pub(crate) fn key(name: &str) -> String {
    format!("lockkeeper:{{{}}}", name.replace('%', "%25").replace('}', "%7D"))
}

/// Runs a command whose reply is a number.
#[track_caller]
pub(crate) fn number(server: &RedisServer, command: &[&str]) -> i64 {
    let reply = server.command(command);
    reply.parse().unwrap_or_else(|_| panic!("{command:?}: {reply:?}"))
}

/// Waits until a keeper's releases are done, and asserts that the database is empty.
pub(crate) async fn nothing_left(keeper: &Keeper, server: &RedisServer) {
    soon("the releases", keeper.close()).await;
    let keys = server.command(&["KEYS", "*"]);
    assert_eq!(keys, "", "left behind");
}

/// Spawns an acquire, and returns when the queue has `place` waiters.
pub(crate) async fn waiter(
    keeper: &Keeper,
    name: &str,
    place: usize,
    acquire: impl Future<Output = Result<Guard>> + Send + 'static,
) -> JoinHandle<Result<Guard>> {
    let waiter = tokio::spawn(acquire);
    queued(keeper, name, place).await;
    waiter
}

/// Waits until a lock has this many waiters.
pub(crate) async fn queued(keeper: &Keeper, name: &str, count: usize) {
    let inspect = keeper.inspect().unwrap();
    eventually("queued waiters", async || {
        let infos = inspect.show(name).await.unwrap();
        infos.iter().map(|info| info.waiters.len()).sum::<usize>() == count
    })
    .await;
}

pub(crate) async fn lock(keeper: &Keeper, name: &str) -> Guard {
    soon("the lock", keeper.mutex(name).lock()).await.unwrap()
}

pub(crate) fn write(
    keeper: &Keeper,
    name: &str,
) -> Pin<Box<dyn Future<Output = Result<Guard>> + Send>> {
    let lock = keeper.rw_lock(name);
    Box::pin(async move { lock.write().await })
}

pub(crate) fn read(
    keeper: &Keeper,
    name: &str,
) -> Pin<Box<dyn Future<Output = Result<Guard>> + Send>> {
    let lock = keeper.rw_lock(name);
    Box::pin(async move { lock.read().await })
}

/// Returns the guard of a waiter when it has acquired.
pub(crate) async fn got(waiter: JoinHandle<Result<Guard>>) -> Guard {
    soon("the waiter's guard", waiter).await.unwrap().unwrap()
}

/// Returns the `Display` and `Debug` output of an error and all its sources.
pub(crate) fn all_of(error: &Error) -> String {
    let mut texts = vec![format!("{error} | {error:?} | {error:#?}")];
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        texts.push(format!("{error} | {error:?}"));
        source = error.source();
    }
    texts.join(" | ")
}

pub(crate) const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
