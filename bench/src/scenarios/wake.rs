//! Wake-up of a single waiter by a release.

use std::time::{Duration, Instant};

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::figures::quantile;
use crate::implementation::{
    Implementation, Kind, Lock, Mode, NoLocks, Outcome, one_line, unique_name,
};
use crate::report::{Better, Section};

/// Longer than any wake-up takes.
const TIMEOUT: Duration = Duration::from_secs(3);
/// The pause before a release, in µs: a CPU that has been idle answers more slowly.
const PAUSE: std::ops::Range<u64> = 4_000..10_000;
/// The unit of the wake-up times.
pub(crate) const UNIT: &str = "one PING to Redis, after the same pause";

/// Measures from the call of release to the guard of the only waiter, which is in another client.
pub(crate) async fn run(
    bench: &mut Bench,
    section: Section,
    implementations: &[Implementation],
    others: &[Implementation],
) -> Outcome<()> {
    let mut section =
        section.column("p50", "p50 µs", Better::Low).column("p99", "p99 µs", Better::Neither);
    let unit = Implementation::new(UNIT, Kind::Raw, NoLocks);
    bench.begin(&mut section).await?;
    let time = bench.ms(250, 40);
    for repetition in 0..REPETITIONS {
        let ping = bench.ping_after(PAUSE).await?;
        section.row(&unit).record("p50", repetition, Some(ping));
        for index in shuffled(0..implementations.len()) {
            let mut times = Vec::new();
            let outcome = measure(&implementations[index], &others[index], time, &mut times).await;
            let row = section.row(&implementations[index]);
            let _ = row.ok_or_record(outcome);
            row.record("p50", repetition, quantile(&times, 0.5));
            row.record("p99", repetition, quantile(&times, 0.99));
        }
    }
    section.in_units_of("p50", UNIT, "in units of that PING");
    bench.end(section);
    Ok(())
}

/// Measures wake-ups in a row, until one fails or the time has passed.
async fn measure(
    implementation: &Implementation,
    other: &Implementation,
    time: Duration,
    times: &mut Vec<f64>,
) -> Outcome<()> {
    let key = unique_name("wake");
    let holder = implementation.lock(&key, 0).await?;
    let end = Instant::now() + time;
    while Instant::now() < end {
        // A second handle to the lock, with another task number.
        let waiter = other.lock(&key, 1).await?;
        times.push(wake_up_time(&*holder, waiter, implementation.polls).await?);
    }
    Ok(())
}

async fn wake_up_time(holder: &dyn Lock, waiter: Box<dyn Lock>, polls: bool) -> Outcome<f64> {
    let held = holder.acquire(Mode::Exclusive).await?;
    let waiting = tokio::spawn(async move {
        let held = waiter.acquire(Mode::Exclusive).await?;
        let woken = Instant::now();
        held.release().await?;
        Ok::<_, String>(woken)
    });
    // Long enough for the waiter to wait, and random, so that it does not match the phase of a polling interval.
    let pause = if polls { 5_000..80_000 } else { PAUSE };
    tokio::time::sleep(Duration::from_micros(fastrand::u64(pause))).await;
    let start = Instant::now();
    let release = tokio::spawn(held.release());
    let Ok(woken) = tokio::time::timeout(TIMEOUT, waiting).await else {
        return Err(format!("the waiter was not woken within {TIMEOUT:?}"));
    };
    release.await.map_err(one_line)??;
    Ok(woken.map_err(one_line)??.duration_since(start).as_secs_f64() * 1e6)
}
