//! From the death of a holder to the guard of the next.

use std::time::{Duration, Instant};

use lockkeeper_testkit::server::RedisServer;

use crate::bench::{Bench, REPETITIONS};
use crate::child::{self, Orders, Process, Role};
use crate::make::{Make, Mode, Outcome, fresh, told};
use crate::report::{Better, Section};

/// How much longer than its lease a lock may stay.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where it is measured.
pub(crate) struct Place<'a> {
    pub(crate) store: &'a str,
    /// Its address or directory.
    pub(crate) at: &'a str,
    /// Where a lease ends by itself: what it is counted from.
    pub(crate) redis: Option<&'a RedisServer>,
}

/// Kills holders, in processes of their own, with SIGKILL.
pub(crate) async fn run(bench: &mut Bench, section: Section, place: Place<'_>) -> Outcome<()> {
    let title =
        if place.redis.is_some() { "ms after the lease's end" } else { "ms after the kill" };
    let mut section = section.column("ms", title, Better::Low);
    bench.begin(&mut section).await?;
    let lease = Duration::from_millis(bench.either(2000, 500));
    let ttl = if place.redis.is_some() { lease } else { crate::stores::TTL };
    let makes = child::of(place.store, place.at, ttl).await?;
    let rounds = if place.redis.is_some() { REPETITIONS } else { bench.either(7, REPETITIONS) };
    for round in 0..rounds {
        // A lease runs out by itself, so all may at once; a kill is seen at once, so each is alone if there is time.
        let mut times = Vec::new();
        if place.redis.is_some() || bench.quick {
            let all = makes.iter().map(|make| one(&place, make, ttl));
            times = futures_util::future::join_all(all).await;
        } else {
            for make in &makes {
                times.push(one(&place, make, ttl).await);
            }
        }
        for (make, time) in makes.iter().zip(times) {
            let row = section.row(make);
            let time = row.worked(time);
            row.put("ms", round, time);
        }
    }
    bench.end(section);
    Ok(())
}

async fn one(place: &Place<'_>, make: &Make, ttl: Duration) -> Outcome<f64> {
    let key = fresh("killed");
    let orders = Orders {
        role: Role::Hold,
        store: place.store.into(),
        place: place.at.into(),
        make: make.label(),
        ttl_ms: u64::try_from(ttl.as_millis()).map_err(told)?,
        key: key.clone(),
        count: 1,
    };
    let mut holder = Process::start(&orders).await?;
    let lock = make.lock(&key, 1).await?;
    let waiter = tokio::spawn(async move {
        let held = lock.acquire(Mode::Exclusive).await?;
        let entered = Instant::now();
        held.release().await?;
        Ok::<_, String>(entered)
    });
    // So long that it waits, and at random: those that poll are not always met at the same moment.
    let least = if make.polls { 150 } else { 50 };
    tokio::time::sleep(Duration::from_millis(fastrand::u64(least..least + 100))).await;
    let killed = Instant::now();
    holder.kill();
    let mut left = Duration::ZERO;
    if let Some(server) = place.redis {
        let answer = server.command(&["PTTL", &make.key_of(&key)]);
        let millis = answer.parse().map_err(|_| format!("its lease had ended: {answer}"))?;
        left = Duration::from_millis(millis);
    }
    let asked = Instant::now();
    let Ok(entered) = tokio::time::timeout(left + PATIENCE, waiter).await else {
        return Err(format!("nobody had it {PATIENCE:?} after that"));
    };
    let entered = entered.map_err(told)??;
    if place.redis.is_some() {
        let end = asked + left;
        let late = entered.saturating_duration_since(end).as_secs_f64();
        return Ok((late - end.saturating_duration_since(entered).as_secs_f64()) * 1e3);
    }
    Ok(entered.saturating_duration_since(killed).as_secs_f64() * 1e3)
}
