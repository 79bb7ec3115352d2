//! Many tasks that contend for one lock.

use std::time::Duration;

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::figures::{mean, quantile};
use crate::implementation::{Implementation, Outcome, unique_name};
use crate::load::Meter;
use crate::report::{Better, Row, Section};
use crate::slice::{self, Contention, Slice, SliceOptions};

/// The length of a slice in milliseconds, in a full and in a quick run.
pub(crate) const SLICE: [u64; 2] = [400, 40];

/// Measures hand-offs between tasks, and their cost for the server, if there is one.
pub(crate) async fn run(
    bench: &mut Bench,
    section: Section,
    implementations: &[Implementation],
    tasks: usize,
    meter: Option<Meter<'_>>,
) -> Outcome<()> {
    let mut section = section
        .column("rate", "hand-offs per second", Better::High)
        .column("acquisitions", "acquisitions per second", Better::Neither)
        .column("mean", "mean µs", Better::Neither)
        .column("p99", "p99 µs", Better::Neither)
        .column("fewest", "fewest by one task", Better::Neither)
        .column("most", "most by one task", Better::Neither)
        .column("longest", "longest wait, ms", Better::Neither);
    if meter.is_some_and(Meter::counts_requests) {
        section = section.column("requests", "requests per hand-off", Better::Neither);
    }
    if meter.is_some() {
        section = section.column("server", "server µs per hand-off", Better::Neither);
    }
    bench.begin(&mut section).await?;
    for repetition in 0..REPETITIONS {
        for implementation in shuffled(implementations) {
            let row = section.row(implementation);
            if implementation.max_tasks < tasks {
                row.note(implementation.too_many_tasks(tasks));
                continue;
            }
            let slice =
                run_slice(bench, implementation, tasks, meter, bench.ms(SLICE[0], SLICE[1])).await;
            if let Some(slice) = row.ok_or_record(slice) {
                record(row, repetition, &slice);
            }
        }
    }
    bench.end(section);
    Ok(())
}

/// Measures fairness between tasks, in one slice that is so long that one acquisition is less than the threshold.
pub(crate) async fn fairness(
    bench: &mut Bench,
    section: Section,
    implementation: &Implementation,
    tasks: &[usize],
) -> Outcome<()> {
    let mut section = section;
    for tasks in tasks {
        let title = format!("(most − fewest) / most, %, {tasks} tasks");
        section = section.column(&tasks.to_string(), &title, Better::Low);
    }
    bench.begin(&mut section).await?;
    for tasks in tasks {
        let time = if *tasks > 100 { bench.ms(11_000, 900) } else { bench.ms(2800, 300) };
        let slice = run_slice(bench, implementation, *tasks, None, time).await?;
        let fewest = *slice.acquisitions.iter().min().unwrap_or(&0) as f64;
        let most = *slice.acquisitions.iter().max().unwrap_or(&0) as f64;
        let row = section.row(implementation);
        row.record_once(&tasks.to_string(), Some((most - fewest) / most * 100.0));
        row.note(format!("{tasks} tasks: {fewest} to {most} acquisitions"));
        row.add_errors(&slice);
    }
    bench.end(section);
    Ok(())
}

/// Measures hand-offs by number of tasks.
pub(crate) async fn scaling(
    bench: &mut Bench,
    section: Section,
    implementations: &[Implementation],
    points: &[usize],
) -> Outcome<()> {
    let mut section = section;
    for point in points {
        section = section.column(&point.to_string(), &format!("{point} waiters"), Better::High);
    }
    bench.begin(&mut section).await?;
    for repetition in 0..REPETITIONS {
        for point in points {
            for implementation in shuffled(implementations) {
                let row = section.row(implementation);
                if implementation.max_tasks < *point {
                    row.note(implementation.too_many_tasks(*point));
                    continue;
                }
                let slice = run_slice(bench, implementation, *point, None, bench.ms(300, 30)).await;
                let Some(slice) = row.ok_or_record(slice) else { continue };
                row.record(&point.to_string(), repetition, Some(slice.hand_offs_per_second()));
                row.add_errors(&slice);
            }
        }
    }
    bench.end(section);
    Ok(())
}

async fn run_slice(
    bench: &Bench,
    implementation: &Implementation,
    tasks: usize,
    meter: Option<Meter<'_>>,
    time: Duration,
) -> Outcome<Slice> {
    let locks = implementation.locks_on_one_key(&unique_name("queue"), tasks).await?;
    let meter = meter.map(|meter| (meter, implementation));
    // Long enough for every task to be in the queue before it counts.
    let warm = if tasks > 128 { bench.ms(300, 40) } else { bench.ms(100, 15) };
    Ok(slice::run(
        locks,
        SliceOptions { contention: Contention::SharedLock, readers: 0, warm, time, meter },
    )
    .await)
}

fn record(row: &mut Row, repetition: usize, slice: &Slice) {
    let mut record = |key: &str, value: Option<f64>| row.record(key, repetition, value);
    record("rate", Some(slice.hand_offs_per_second()));
    record("acquisitions", Some(slice.acquisitions_per_second()));
    record("mean", mean(&slice.hand_offs));
    record("p99", quantile(&slice.hand_offs, 0.99));
    record("fewest", slice.acquisitions.iter().min().map(|acquisitions| *acquisitions as f64));
    record("most", slice.acquisitions.iter().max().map(|acquisitions| *acquisitions as f64));
    record("longest", Some(slice.longest.as_secs_f64() * 1e3));
    // Costs per hand-off are undefined without hand-offs.
    let count = Some(slice.hand_offs.len() as f64).filter(|count| *count > 0.0);
    let each = |cost: Option<f64>| cost.zip(count).map(|(cost, count)| cost / count);
    record("requests", each(slice.requests));
    record("server", each(slice.server).map(|seconds| seconds * 1e6));
    row.add_errors(slice);
}
