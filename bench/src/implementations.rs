//! The implementations that are compared, by store.

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

use crate::implementation::{Implementation, Outcome};

/// The shortest sensible retry interval for implementations that poll.
pub(crate) const TUNED_RETRY: Duration = Duration::from_millis(1);

/// The caveat for implementations that do not report the outcome of a release.
const UNCONFIRMED: &str =
    "does not report whether a release was confirmed: counted when it returned";

/// Returns the lock implementations on one Redis server.
///
/// An error of Lockkeeper's setup fails the run; an error of a peer's setup is shown in its rows.
pub(crate) async fn on_redis(url: &str, ttl: Duration) -> Outcome<Vec<Implementation>> {
    let urls = [url];
    // Concurrently, because each setup may take its full timeout.
    let (ours, raw, slow, tuned, others) = tokio::join!(
        lockkeeper::redis(url, ttl),
        raw_redis::implementation(url, ttl),
        distkit::implementation(url, ttl, None),
        distkit::implementation(url, ttl, Some(TUNED_RETRY)),
        distributed_lock::redis(&urls, ttl),
    );
    let mut implementations = vec![
        ours?,
        raw,
        rslock::implementation(&urls, ttl, None),
        rslock::implementation(&urls, ttl, Some(TUNED_RETRY)),
        slow,
        tuned,
    ];
    implementations.extend(others);
    implementations.push(redlock::implementation(&urls, ttl, None));
    implementations.push(redlock::implementation(&urls, ttl, Some(TUNED_RETRY)));
    Ok(implementations)
}

/// Send as many requests as a lock and its release take: with the client that most peers use, and with Lockkeeper's.
pub(crate) async fn redis_floors(url: &str) -> Outcome<[Implementation; 2]> {
    Ok([raw_redis::pings(url).await?, lockkeeper::pings(url).await?])
}

/// Sends as many statements as a lock and its release take.
pub(crate) async fn postgres_floor(url: &str) -> Outcome<Implementation> {
    postgres::selects(url).await
}

pub(crate) use postgres::connect as connect_postgres;
pub(crate) use raw_redis::connect;

/// Returns the lock implementations on a majority of Redis servers, or on a single one.
pub(crate) async fn on_redlock(urls: &[&str], ttl: Duration) -> Outcome<Vec<Implementation>> {
    let ours = match urls {
        [url] => lockkeeper::redis(url, ttl).await?,
        _ => lockkeeper::redlock(urls, ttl).await?,
    };
    let mut implementations = vec![ours, rslock::implementation(urls, ttl, None)];
    implementations.extend(distributed_lock::redis(urls, ttl).await.into_iter().take(1));
    implementations.push(redlock::implementation(urls, ttl, None));
    Ok(implementations)
}

/// Returns the reader-writer lock implementations on one Redis server.
pub(crate) async fn shared_on_redis(url: &str, ttl: Duration) -> Outcome<Vec<Implementation>> {
    let (ours, slow, tuned, other) = tokio::join!(
        lockkeeper::redis(url, ttl),
        distkit::shared(url, ttl, None),
        distkit::shared(url, ttl, Some(TUNED_RETRY)),
        distributed_lock::shared_redis(url, ttl),
    );
    Ok(vec![ours?, slow, tuned, other])
}

/// Returns the lock implementations on `PostgreSQL`. Of these, only Lockkeeper has leases.
pub(crate) async fn on_postgres(url: &str, ttl: Duration) -> Outcome<Vec<Implementation>> {
    let mut implementations = lockkeeper::postgres(url, ttl)?;
    implementations.push(postgres::raw(url));
    implementations.push(postgres::sqlx_connection_per_task(url));
    implementations.push(postgres::sqlx_pool(url).await);
    implementations.extend(distributed_lock::postgres(url).await);
    Ok(implementations)
}

/// Returns the reader-writer lock implementations on `PostgreSQL`.
pub(crate) async fn shared_on_postgres(url: &str, ttl: Duration) -> Outcome<Vec<Implementation>> {
    let mut implementations = lockkeeper::postgres(url, ttl)?;
    implementations.push(postgres::raw(url));
    implementations.extend(distributed_lock::shared_postgres(url).await);
    Ok(implementations)
}

/// Returns the lock implementations on files of a directory.
pub(crate) async fn on_files(dir: &Path, ttl: Duration) -> Outcome<Vec<Implementation>> {
    let mut implementations = shared_on_files(dir, ttl)?;
    implementations.push(distributed_lock::files(dir).await);
    Ok(implementations)
}

/// Returns the reader-writer lock implementations on files of a directory.
pub(crate) fn shared_on_files(dir: &Path, ttl: Duration) -> Outcome<Vec<Implementation>> {
    let mut implementations = lockkeeper::files(dir, ttl)?;
    implementations.push(file::raw(dir));
    implementations.push(file::fd_lock(dir));
    Ok(implementations)
}
