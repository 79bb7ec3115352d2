//! What each make does where it is easy to do wrong. Not a matter of speed.

use std::task::Poll;
use std::time::Duration;

use lockkeeper_testkit::server::RedisServer;

use crate::bench::Bench;
use crate::make::{Kind, Lock, Make, Mode, Outcome, fresh};
use crate::makes;
use crate::report::{Better, Section};

const TTL: Duration = Duration::from_secs(1);
/// Longer than anything takes that is done in the background.
const SETTLED: Duration = Duration::from_millis(300);

/// Looks at how each make waits, holds and goes.
pub(crate) async fn run(bench: &mut Bench, section: Section, server: &RedisServer) -> Outcome<()> {
    let mut section = section
        .column("renews", "held for two ttls", Better::Neither)
        .column("guard", "dropped guard frees it", Better::Neither)
        .column("future", "dropped acquire frees it", Better::Neither);
    bench.begin(&mut section).await?;
    let makes = makes::on_redis(&server.url(), TTL).await?;
    let makes = makes.into_iter().filter(|make| !matches!(make.kind, Kind::Raw | Kind::Tuned));
    let looks = makes.map(|make| async move { (look(&make, server).await, make) });
    for (seen, make) in futures_util::future::join_all(looks).await {
        let row = section.row(&make);
        let Some([renews, guard, future]) = row.worked(seen) else { continue };
        for (key, is, note) in [
            (
                "renews",
                renews,
                "**does not renew: the lock is gone after its ttl, and nobody is told**",
            ),
            ("guard", guard, "**a dropped guard leaves the lock until its ttl**"),
            (
                "future",
                future,
                "**leaks: an acquire that is dropped leaves the lock until its ttl**",
            ),
        ] {
            row.put_once(key, is.map(|is| f64::from(u8::from(is))));
            if is == Some(false) {
                row.note(note);
            }
        }
    }
    bench.end(section);
    Ok(())
}

async fn look(make: &Make, server: &RedisServer) -> Outcome<[Option<bool>; 3]> {
    let renews = renews(make, server).await?;
    let guard = guard_frees(make, server).await?;
    // Blocking calls cannot be dropped.
    let blocks = make.most_tasks < usize::MAX;
    let future = if blocks { None } else { Some(future_frees(make, server).await?) };
    Ok([Some(renews), Some(guard), future])
}

fn is_there(make: &Make, key: &str, server: &RedisServer) -> bool {
    server.command(&["EXISTS", &make.key_of(key)]) == "1"
}

async fn renews(make: &Make, server: &RedisServer) -> Outcome<bool> {
    let key = fresh("renewed");
    let held = make.lock(&key, 0).await?.acquire(Mode::Exclusive).await?;
    tokio::time::sleep(TTL * 2).await;
    let is_there = is_there(make, &key, server);
    let _ = held.release().await;
    Ok(is_there)
}

async fn guard_frees(make: &Make, server: &RedisServer) -> Outcome<bool> {
    let key = fresh("dropped");
    drop(make.lock(&key, 0).await?.acquire(Mode::Exclusive).await?);
    tokio::time::sleep(SETTLED).await;
    Ok(!is_there(make, &key, server))
}

/// Drops an acquire of a free lock at some moments while it is under way: after so many polls.
async fn future_frees(make: &Make, server: &RedisServer) -> Outcome<bool> {
    let mut keys = Vec::new();
    for step in 0..40 {
        let key = fresh("left");
        let lock: Box<dyn Lock> = make.lock(&key, 0).await?;
        let mut acquire = lock.acquire(Mode::Exclusive);
        let mut held = None;
        for _ in 0..=step {
            if let Poll::Ready(done) = futures_util::poll!(&mut acquire) {
                held = Some(done?);
                break;
            }
            // Connections are looked after by other threads, timers are too coarse.
            std::thread::sleep(Duration::from_micros(20));
        }
        // So long that what was sent has been done, and nobody has looked at the answer.
        std::thread::sleep(Duration::from_micros(400));
        drop(acquire);
        if let Some(held) = held {
            // It was faster.
            let _ = held.release().await;
        }
        keys.push(key);
    }
    tokio::time::sleep(SETTLED).await;
    Ok(!keys.iter().any(|key| is_there(make, key, server)))
}
