//! The makes that are compared, by store.

mod distkit;
mod distributed_lock;
mod file;
mod lockkeeper;
mod postgres;
mod raw_redis;
mod redlock;
mod rslock;

use std::path::Path;
use std::time::Duration;

use crate::make::{Make, Outcome};

/// The shortest pause that makes sense for those that poll.
pub(crate) const TUNED: Duration = Duration::from_millis(1);

/// Said of those that do not tell what became of a release.
const UNCONFIRMED: &str = "does not say whether a release was confirmed: counted when it returned";

/// Locks on one Redis server.
///
/// Lockkeeper itself has to be there. A peer that is not is one of them all the same, and says so in its rows.
pub(crate) async fn on_redis(url: &str, ttl: Duration) -> Outcome<Vec<Make>> {
    let urls = [url];
    // At the same time: one that hangs is waited for, and there may be several.
    let (ours, raw, slow, tuned, others) = tokio::join!(
        lockkeeper::redis(url, ttl),
        raw_redis::make(url, ttl),
        distkit::make(url, ttl, None),
        distkit::make(url, ttl, Some(TUNED)),
        distributed_lock::redis(&urls, ttl),
    );
    let mut makes = vec![
        ours?,
        raw,
        rslock::make(&urls, ttl, None),
        rslock::make(&urls, ttl, Some(TUNED)),
        slow,
        tuned,
    ];
    makes.extend(others);
    makes.push(redlock::make(&urls, ttl, None));
    makes.push(redlock::make(&urls, ttl, Some(TUNED)));
    Ok(makes)
}

/// As many requests as a lock and its release are, by the client that most peers use.
pub(crate) async fn redis_floor(url: &str) -> Outcome<Make> {
    raw_redis::pings(url).await
}

/// As many statements as a lock and its release are.
pub(crate) async fn postgres_floor(url: &str) -> Outcome<Make> {
    postgres::selects(url).await
}

pub(crate) use postgres::connect as connect_postgres;
pub(crate) use raw_redis::connect;

/// Locks on a majority of Redis servers, or on the only one.
pub(crate) async fn on_redlock(urls: &[&str], ttl: Duration) -> Outcome<Vec<Make>> {
    let ours = match urls {
        [url] => lockkeeper::redis(url, ttl).await?,
        _ => lockkeeper::redlock(urls, ttl).await?,
    };
    let mut makes = vec![ours, rslock::make(urls, ttl, None)];
    makes.extend(distributed_lock::redis(urls, ttl).await.into_iter().take(1));
    makes.push(redlock::make(urls, ttl, None));
    Ok(makes)
}

/// Readers and writers on one Redis server.
pub(crate) async fn shared_on_redis(url: &str, ttl: Duration) -> Outcome<Vec<Make>> {
    let (ours, slow, tuned, other) = tokio::join!(
        lockkeeper::redis(url, ttl),
        distkit::shared(url, ttl, None),
        distkit::shared(url, ttl, Some(TUNED)),
        distributed_lock::shared_redis(url, ttl),
    );
    Ok(vec![ours?, slow, tuned, other])
}

/// Locks on `PostgreSQL`. Of these only Lockkeeper has leases.
pub(crate) async fn on_postgres(url: &str, ttl: Duration) -> Outcome<Vec<Make>> {
    let mut makes = lockkeeper::postgres(url, ttl)?;
    makes.push(postgres::raw(url));
    makes.push(postgres::sqlx_own(url));
    makes.push(postgres::sqlx_pool(url).await);
    makes.extend(distributed_lock::postgres(url).await);
    Ok(makes)
}

/// Readers and writers on `PostgreSQL`.
pub(crate) async fn shared_on_postgres(url: &str, ttl: Duration) -> Outcome<Vec<Make>> {
    let mut makes = lockkeeper::postgres(url, ttl)?;
    makes.push(postgres::raw(url));
    makes.extend(distributed_lock::shared_postgres(url).await);
    Ok(makes)
}

/// Locks in a directory.
pub(crate) async fn on_files(dir: &Path, ttl: Duration) -> Outcome<Vec<Make>> {
    let mut makes = shared_on_files(dir, ttl)?;
    makes.push(distributed_lock::files(dir).await);
    Ok(makes)
}

/// Readers and writers in a directory.
pub(crate) fn shared_on_files(dir: &Path, ttl: Duration) -> Outcome<Vec<Make>> {
    let mut makes = lockkeeper::files(dir, ttl)?;
    makes.push(file::raw(dir));
    makes.push(file::fd_lock(dir));
    Ok(makes)
}
