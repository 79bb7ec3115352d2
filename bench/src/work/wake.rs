//! One who waits, and one who gives back.

use std::time::{Duration, Instant};

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::figures::quantile;
use crate::make::{Kind, Lock, Make, Mode, Nothing, Outcome, fresh, told};
use crate::report::{Better, Section};

/// Longer than anybody waits who is woken.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long it is quiet before a release, in µs: a machine that has slept is slower than one that has not.
const PAUSE: std::ops::Range<u64> = 4_000..10_000;
/// What the wake-ups are measured in.
pub(crate) const UNIT: &str = "one PING to Redis, after such a pause";

/// Measures from the call of release to the guard of the only waiter, which is in another client.
pub(crate) async fn run(
    bench: &mut Bench,
    section: Section,
    makes: &[Make],
    others: &[Make],
) -> Outcome<()> {
    let mut section =
        section.column("p50", "p50 µs", Better::Low).column("p99", "p99 µs", Better::Neither);
    let unit = Make::new(UNIT, Kind::Raw, Nothing);
    bench.begin(&mut section).await?;
    let time = bench.ms(250, 40);
    for repetition in 0..REPETITIONS {
        let ping = bench.ping_after(PAUSE).await?;
        section.row(&unit).put("p50", repetition, Some(ping));
        for place in shuffled(0..makes.len()) {
            let mut times = Vec::new();
            let outcome = some(&makes[place], &others[place], time, &mut times).await;
            let row = section.row(&makes[place]);
            let _ = row.worked(outcome);
            row.put("p50", repetition, quantile(&times, 0.5));
            row.put("p99", repetition, quantile(&times, 0.99));
        }
    }
    section.in_units_of("p50", UNIT, "in units of that PING");
    bench.end(section);
    Ok(())
}

/// One wake-up after the other, until one fails or the time is over.
async fn some(make: &Make, other: &Make, time: Duration, times: &mut Vec<f64>) -> Outcome<()> {
    let key = fresh("wake");
    let holder = make.lock(&key, 0).await?;
    let end = Instant::now() + time;
    while Instant::now() < end {
        // A second way to the lock, with a task number of its own.
        let waiter = other.lock(&key, 1).await?;
        times.push(one(&*holder, waiter, make.polls).await?);
    }
    Ok(())
}

async fn one(holder: &dyn Lock, waiter: Box<dyn Lock>, polls: bool) -> Outcome<f64> {
    let held = holder.acquire(Mode::Exclusive).await?;
    let waiting = tokio::spawn(async move {
        let held = waiter.acquire(Mode::Exclusive).await?;
        let woken = Instant::now();
        held.release().await?;
        Ok::<_, String>(woken)
    });
    // So long that it waits, and at random: those that poll are not always met at the same moment.
    let pause = if polls { 5_000..80_000 } else { PAUSE };
    tokio::time::sleep(Duration::from_micros(fastrand::u64(pause))).await;
    let start = Instant::now();
    let release = tokio::spawn(held.release());
    let Ok(woken) = tokio::time::timeout(PATIENCE, waiting).await else {
        return Err(format!("the waiter was not woken within {PATIENCE:?}"));
    };
    release.await.map_err(told)??;
    Ok(woken.map_err(told)??.duration_since(start).as_secs_f64() * 1e6)
}
