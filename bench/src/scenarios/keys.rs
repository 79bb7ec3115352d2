//! Many tasks, each on its own lock.

use std::time::Duration;

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::implementation::{Implementation, Outcome, unique_name};
use crate::load::Meter;
use crate::report::{Better, Section};
use crate::slice::{self, Contention, Slice, SliceOptions};

/// Measures locks per second with 64 tasks, and their cost for the server, if there is one.
pub(crate) async fn run(
    bench: &mut Bench,
    section: Section,
    implementations: &[Implementation],
    unit: (&str, &str),
    meter: Option<Meter<'_>>,
) -> Outcome<()> {
    let mut section = section.column("rate", "locks per second", Better::High).column(
        "client",
        "client µs per lock",
        Better::Neither,
    );
    if meter.is_some() {
        section = section.column("server", "server µs per lock", Better::Neither);
    }
    bench.begin(&mut section).await?;
    let (warm, time) = (bench.ms(80, 15), bench.ms(350, 30));
    // Open connections before the measurement. Errors appear again in the measured slices.
    for implementation in implementations {
        let _ = run_slice(implementation, 64, (warm, warm), None).await;
    }
    for repetition in 0..REPETITIONS {
        for implementation in shuffled(implementations) {
            let slice = run_slice(implementation, 64, (warm, time), meter).await;
            let row = section.row(implementation);
            let Some(slice) = row.ok_or_record(slice) else { continue };
            row.record("rate", repetition, Some(slice.acquisitions_per_second()));
            let each = |seconds: f64| seconds * 1e6 / slice.total_acquisitions().max(1) as f64;
            row.record("client", repetition, Some(each(slice.client)));
            row.record("server", repetition, slice.server.map(each));
            row.add_errors(&slice);
        }
    }
    section.in_units_of("rate", unit.0, unit.1);
    bench.end(section);
    Ok(())
}

/// Measures locks per second by number of tasks and keys.
pub(crate) async fn scaling(
    bench: &mut Bench,
    section: Section,
    implementations: &[Implementation],
    points: &[usize],
) -> Outcome<()> {
    let mut section = section;
    for point in points {
        let title = if *point == 1 { "1 key".to_owned() } else { format!("{point} keys") };
        section = section.column(&point.to_string(), &title, Better::High);
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
                // Connections are opened before the warm-up.
                let slice =
                    run_slice(implementation, *point, (bench.ms(30, 10), bench.ms(120, 25)), None)
                        .await;
                let Some(slice) = row.ok_or_record(slice) else { continue };
                row.record(&point.to_string(), repetition, Some(slice.acquisitions_per_second()));
                row.add_errors(&slice);
            }
        }
    }
    bench.end(section);
    Ok(())
}

async fn run_slice(
    implementation: &Implementation,
    tasks: usize,
    (warm, time): (Duration, Duration),
    meter: Option<Meter<'_>>,
) -> Outcome<Slice> {
    let locks = implementation.locks_on_own_keys(&unique_name("many"), tasks).await?;
    let meter = meter.map(|meter| (meter, implementation));
    let options = SliceOptions { contention: Contention::OwnLock, readers: 0, warm, time, meter };
    Ok(slice::run(locks, options).await)
}
