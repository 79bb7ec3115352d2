//! What the tests have in common.

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
    Ok(Keeper::new(soon("to connect", Redis::connect(config)).await?))
}

/// A server and a keeper on it.
pub(crate) async fn server() -> (RedisServer, Keeper) {
    server_of(RedisMake::Installed).await
}

/// A server of this make and a keeper on it.
pub(crate) async fn server_of(make: RedisMake) -> (RedisServer, Keeper) {
    let server = RedisServer::builder().make(make).start_or_panic();
    let keeper = open(&server.url()).await;
    (server, keeper)
}

/// The key of the exclusive holder.
pub(crate) fn key(name: &str) -> String {
    format!("lockkeeper:{{{}}}", name.replace('%', "%25").replace('}', "%7D"))
}

/// A number that the server answers.
#[track_caller]
pub(crate) fn number(server: &RedisServer, command: &[&str]) -> i64 {
    let answer = server.command(command);
    answer.parse().unwrap_or_else(|_| panic!("{command:?}: {answer:?}"))
}

/// Waits until a keeper's releases are done, and sees that the database is empty.
pub(crate) async fn nothing_left(keeper: &Keeper, server: &RedisServer) {
    soon("the releases", keeper.close()).await;
    let keys = server.command(&["KEYS", "*"]);
    assert_eq!(keys, "", "left behind");
}

/// Waits for a lock in a task of its own; returns when it is in the queue as the `place`th.
pub(crate) async fn waiter(
    keeper: &Keeper,
    name: &str,
    place: usize,
    ask: impl Future<Output = Result<Guard>> + Send + 'static,
) -> JoinHandle<Result<Guard>> {
    let waiter = tokio::spawn(ask);
    queued(keeper, name, place).await;
    waiter
}

/// Waits until so many wait for a lock.
pub(crate) async fn queued(keeper: &Keeper, name: &str, count: usize) {
    let inspect = keeper.inspect().unwrap();
    eventually("a place in the queue", async || {
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

/// What a waiter got.
pub(crate) async fn got(waiter: JoinHandle<Result<Guard>>) -> Guard {
    soon("the waiter's turn", waiter).await.unwrap().unwrap()
}

/// All that an error says, in all ways that it can be asked.
pub(crate) fn all_of(error: &Error) -> String {
    let mut said = vec![format!("{error} | {error:?} | {error:#?}")];
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        said.push(format!("{error} | {error:?}"));
        source = error.source();
    }
    said.join(" | ")
}

pub(crate) const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
