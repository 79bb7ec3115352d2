//! Many tasks, and one lock.

use std::time::Duration;

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::figures::{mean, quantile};
use crate::load::Meter;
use crate::make::{Make, Outcome, fresh};
use crate::report::{Better, Row, Section};
use crate::slice::{self, Contend, Plan, Slice};

/// How long a slice is, in milliseconds, in a full run and in a quick one.
pub(crate) const SLICE: [u64; 2] = [400, 40];

/// Measures hand-overs between so many tasks. With a server: what they cost it.
pub(crate) async fn run(
    bench: &mut Bench,
    section: Section,
    makes: &[Make],
    tasks: usize,
    meter: Option<Meter<'_>>,
) -> Outcome<()> {
    let mut section = section
        .column("rate", "hand-overs per second", Better::High)
        .column("turns", "turns per second", Better::Neither)
        .column("mean", "mean µs", Better::Neither)
        .column("p99", "p99 µs", Better::Neither)
        .column("least", "turns of the least served", Better::Neither)
        .column("most", "of the most served", Better::Neither)
        .column("longest", "longest wait, ms", Better::Neither);
    if meter.is_some_and(Meter::counts_requests) {
        section = section.column("requests", "requests per hand-over", Better::Neither);
    }
    if meter.is_some() {
        section = section.column("server", "server µs per hand-over", Better::Neither);
    }
    bench.begin(&mut section).await?;
    for repetition in 0..REPETITIONS {
        for make in shuffled(makes) {
            let row = section.row(make);
            if make.most_tasks < tasks {
                row.note(make.too_few(tasks));
                continue;
            }
            let slice = one(bench, make, tasks, meter, bench.ms(SLICE[0], SLICE[1])).await;
            if let Some(slice) = row.worked(slice) {
                put(row, repetition, &slice);
            }
        }
    }
    bench.end(section);
    Ok(())
}

/// How evenly turns are dealt: one slice of ours, so long that a turn is less than the bar.
pub(crate) async fn fairness(
    bench: &mut Bench,
    section: Section,
    make: &Make,
    tasks: &[usize],
) -> Outcome<()> {
    let mut section = section;
    for tasks in tasks {
        let title = format!("most less least, of the most, %, {tasks} tasks");
        section = section.column(&tasks.to_string(), &title, Better::Low);
    }
    bench.begin(&mut section).await?;
    for tasks in tasks {
        let time = if *tasks > 100 { bench.ms(11_000, 900) } else { bench.ms(2800, 300) };
        let slice = one(bench, make, *tasks, None, time).await?;
        let least = *slice.turns.iter().min().unwrap_or(&0) as f64;
        let most = *slice.turns.iter().max().unwrap_or(&0) as f64;
        let row = section.row(make);
        row.put_once(&tasks.to_string(), Some((most - least) / most * 100.0));
        row.note(format!("{tasks} tasks: {least} to {most} turns"));
        row.wrongs_of(&slice);
    }
    bench.end(section);
    Ok(())
}

/// Hand-overs over numbers of tasks.
pub(crate) async fn scaling(
    bench: &mut Bench,
    section: Section,
    makes: &[Make],
    points: &[usize],
) -> Outcome<()> {
    let mut section = section;
    for point in points {
        section = section.column(&point.to_string(), &format!("{point} waiters"), Better::High);
    }
    bench.begin(&mut section).await?;
    for repetition in 0..REPETITIONS {
        for point in points {
            for make in shuffled(makes) {
                let row = section.row(make);
                if make.most_tasks < *point {
                    row.note(make.too_few(*point));
                    continue;
                }
                let slice = one(bench, make, *point, None, bench.ms(300, 30)).await;
                let Some(slice) = row.worked(slice) else { continue };
                row.put(&point.to_string(), repetition, Some(slice.hand_overs_per_second()));
                row.wrongs_of(&slice);
            }
        }
    }
    bench.end(section);
    Ok(())
}

async fn one(
    bench: &Bench,
    make: &Make,
    tasks: usize,
    meter: Option<Meter<'_>>,
    time: Duration,
) -> Outcome<Slice> {
    let locks = make.locks(&fresh("queue"), tasks).await?;
    let meter = meter.map(|meter| (meter, make));
    // So long that everybody has had a place before it counts.
    let warm = if tasks > 128 { bench.ms(300, 40) } else { bench.ms(100, 15) };
    Ok(slice::run(locks, Plan { contend: Contend::One, readers: 0, warm, time, meter }).await)
}

fn put(row: &mut Row, repetition: usize, slice: &Slice) {
    let mut put = |key: &str, value: Option<f64>| row.put(key, repetition, value);
    put("rate", Some(slice.hand_overs_per_second()));
    put("turns", Some(slice.turns_per_second()));
    put("mean", mean(&slice.hand_overs));
    put("p99", quantile(&slice.hand_overs, 0.99));
    put("least", slice.turns.iter().min().map(|turns| *turns as f64));
    put("most", slice.turns.iter().max().map(|turns| *turns as f64));
    put("longest", Some(slice.longest.as_secs_f64() * 1e3));
    // Without any, there is nothing that it could be the cost of.
    let count = Some(slice.hand_overs.len() as f64).filter(|count| *count > 0.0);
    let each = |cost: Option<f64>| cost.zip(count).map(|(cost, count)| cost / count);
    put("requests", each(slice.requests));
    put("server", each(slice.server).map(|seconds| seconds * 1e6));
    row.wrongs_of(slice);
}
