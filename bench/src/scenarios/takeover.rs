//! The time from the death of a holder to the guard of the waiter.

use std::time::{Duration, Instant};

use lockkeeper_testkit::server::RedisServer;

use crate::bench::{Bench, REPETITIONS};
use crate::child::{self, ChildArgs, Process, Role};
use crate::implementation::{Implementation, Mode, Outcome, one_line, unique_name};
use crate::report::{Better, Section};

/// How long after the end of a lease the waiter may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The store that is measured.
pub(crate) struct Target<'a> {
    pub(crate) store: &'a str,
    /// The address or directory of the store.
    pub(crate) address: &'a str,
    /// Set where leases expire: the time is measured from the end of the lease.
    pub(crate) redis: Option<&'a RedisServer>,
}

/// Kills holders, in child processes, with SIGKILL.
pub(crate) async fn run(bench: &mut Bench, section: Section, target: Target<'_>) -> Outcome<()> {
    let title =
        if target.redis.is_some() { "ms after the lease's end" } else { "ms after the kill" };
    let mut section = section.column("ms", title, Better::Low);
    bench.begin(&mut section).await?;
    let lease = Duration::from_millis(bench.either(2000, 500));
    let ttl = if target.redis.is_some() { lease } else { crate::stores::TTL };
    let implementations = child::implementations_on(target.store, target.address, ttl).await?;
    let rounds = if target.redis.is_some() { REPETITIONS } else { bench.either(7, REPETITIONS) };
    for round in 0..rounds {
        // Leases expire independently, so all implementations run concurrently. A kill takes effect immediately, so in a full run each runs alone.
        let mut times = Vec::new();
        if target.redis.is_some() || bench.quick {
            let all = implementations
                .iter()
                .map(|implementation| takeover_time(&target, implementation, ttl));
            times = futures_util::future::join_all(all).await;
        } else {
            for implementation in &implementations {
                times.push(takeover_time(&target, implementation, ttl).await);
            }
        }
        for (implementation, time) in implementations.iter().zip(times) {
            let row = section.row(implementation);
            let time = row.ok_or_record(time);
            row.record("ms", round, time);
        }
    }
    bench.end(section);
    Ok(())
}

async fn takeover_time(
    target: &Target<'_>,
    implementation: &Implementation,
    ttl: Duration,
) -> Outcome<f64> {
    let key = unique_name("killed");
    let args = ChildArgs {
        role: Role::Hold,
        store: target.store.into(),
        address: target.address.into(),
        implementation: implementation.label(),
        ttl_ms: u64::try_from(ttl.as_millis()).map_err(one_line)?,
        key: key.clone(),
        count: 1,
    };
    let mut holder = Process::start(&args).await?;
    let lock = implementation.lock(&key, 1).await?;
    let waiter = tokio::spawn(async move {
        let held = lock.acquire(Mode::Exclusive).await?;
        let entered = Instant::now();
        held.release().await?;
        Ok::<_, String>(entered)
    });
    // Long enough for the waiter to wait, and random, so that it does not match the phase of a polling interval.
    let min = if implementation.polls { 150 } else { 50 };
    tokio::time::sleep(Duration::from_millis(fastrand::u64(min..min + 100))).await;
    let killed = Instant::now();
    holder.kill();
    let mut left = Duration::ZERO;
    if let Some(server) = target.redis {
        let answer = server.command(&["PTTL", &implementation.key_of(&key)]);
        let millis =
            answer.parse().map_err(|_| format!("the lease had ended: PTTL returned {answer}"))?;
        left = Duration::from_millis(millis);
    }
    let read_at = Instant::now();
    let Ok(entered) = tokio::time::timeout(left + TIMEOUT, waiter).await else {
        return Err(format!("the waiter did not get the lock within {TIMEOUT:?}"));
    };
    let entered = entered.map_err(one_line)??;
    if target.redis.is_some() {
        let end = read_at + left;
        let late = entered.saturating_duration_since(end).as_secs_f64();
        return Ok((late - end.saturating_duration_since(entered).as_secs_f64()) * 1e3);
    }
    Ok(entered.saturating_duration_since(killed).as_secs_f64() * 1e3)
}
