//! Semantics of each implementation: renewal, and cleanup after drop and cancellation. Not speed.

use std::task::Poll;
use std::time::Duration;

use lockkeeper_testkit::server::RedisServer;

use crate::bench::Bench;
use crate::implementation::{Implementation, Kind, Lock, Mode, Outcome, unique_name};
use crate::implementations;
use crate::report::{Better, Section};

const TTL: Duration = Duration::from_secs(1);
/// Longer than any background cleanup takes.
const SETTLE_TIME: Duration = Duration::from_millis(300);

/// Checks renewal, dropped guards and cancelled acquires of each implementation.
pub(crate) async fn run(bench: &mut Bench, section: Section, server: &RedisServer) -> Outcome<()> {
    let mut section = section
        .column("renews", "held for two TTLs", Better::Neither)
        .column("guard", "dropped guard releases", Better::Neither)
        .column("future", "cancelled acquire releases", Better::Neither);
    bench.begin(&mut section).await?;
    let implementations = implementations::on_redis(&server.url(), TTL).await?;
    let implementations = implementations
        .into_iter()
        .filter(|implementation| !matches!(implementation.kind, Kind::Raw | Kind::Tuned));
    let checks = implementations.map(|implementation| async move {
        (check(&implementation, server).await, implementation)
    });
    for (seen, implementation) in futures_util::future::join_all(checks).await {
        let row = section.row(&implementation);
        let Some([renews, guard, future]) = row.ok_or_record(seen) else { continue };
        for (key, is, note) in [
            (
                "renews",
                renews,
                "**does not renew: the lock expires after its TTL, and the holder is not notified**",
            ),
            ("guard", guard, "**a dropped guard keeps the lock until its TTL ends**"),
            ("future", future, "**leaks: a cancelled acquire keeps the lock until its TTL ends**"),
        ] {
            row.record_once(key, is.map(|is| f64::from(u8::from(is))));
            if is == Some(false) {
                row.note(note);
            }
        }
    }
    bench.end(section);
    Ok(())
}

async fn check(
    implementation: &Implementation,
    server: &RedisServer,
) -> Outcome<[Option<bool>; 3]> {
    let renews = renews(implementation, server).await?;
    let guard = guard_frees(implementation, server).await?;
    // Blocking calls cannot be cancelled.
    let blocks = implementation.max_tasks < usize::MAX;
    let future = if blocks { None } else { Some(future_frees(implementation, server).await?) };
    Ok([Some(renews), Some(guard), future])
}

fn key_exists(implementation: &Implementation, key: &str, server: &RedisServer) -> bool {
    server.command(&["EXISTS", &implementation.key_of(key)]) == "1"
}

async fn renews(implementation: &Implementation, server: &RedisServer) -> Outcome<bool> {
    let key = unique_name("renewed");
    let held = implementation.lock(&key, 0).await?.acquire(Mode::Exclusive).await?;
    tokio::time::sleep(TTL * 2).await;
    let exists = key_exists(implementation, &key, server);
    let _ = held.release().await;
    Ok(exists)
}

async fn guard_frees(implementation: &Implementation, server: &RedisServer) -> Outcome<bool> {
    let key = unique_name("dropped");
    drop(implementation.lock(&key, 0).await?.acquire(Mode::Exclusive).await?);
    tokio::time::sleep(SETTLE_TIME).await;
    Ok(!key_exists(implementation, &key, server))
}

/// Cancels acquires of a free lock at different moments: after a number of polls.
async fn future_frees(implementation: &Implementation, server: &RedisServer) -> Outcome<bool> {
    let mut keys = Vec::new();
    for step in 0..40 {
        let key = unique_name("left");
        let lock: Box<dyn Lock> = implementation.lock(&key, 0).await?;
        let mut acquire = lock.acquire(Mode::Exclusive);
        let mut held = None;
        for _ in 0..=step {
            if let Poll::Ready(done) = futures_util::poll!(&mut acquire) {
                held = Some(done?);
                break;
            }
            // Blocking sleep: other threads drive the connections, and timers are too coarse.
            std::thread::sleep(Duration::from_micros(20));
        }
        // Long enough for the server to process the request while its response is not yet polled.
        std::thread::sleep(Duration::from_micros(400));
        drop(acquire);
        if let Some(held) = held {
            // The acquire completed first.
            let _ = held.release().await;
        }
        keys.push(key);
    }
    tokio::time::sleep(SETTLE_TIME).await;
    Ok(!keys.iter().any(|key| key_exists(implementation, key, server)))
}
