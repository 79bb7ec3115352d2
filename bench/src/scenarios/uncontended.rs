//! One lock without contention.

use std::time::Duration;

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::figures::quantile;
use crate::implementation::{Implementation, Lock, Outcome, unique_name};
use crate::report::{Better, Section};
use crate::slice::{UncontendedSlice, run_uncontended};

/// Longer than any successful lock and release takes.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Measures lock and release, also in units of one of the implementations.
pub(crate) async fn run(
    bench: &mut Bench,
    section: Section,
    implementations: &[Implementation],
    unit: (&str, &str),
) -> Outcome<()> {
    let mut section =
        section.column("p50", "p50 µs", Better::Low).column("p99", "p99 µs", Better::Neither);
    bench.begin(&mut section).await?;
    let mut locks: Vec<(&Implementation, Box<dyn Lock>)> = Vec::new();
    for implementation in implementations {
        let lock = implementation.lock(&unique_name("alone"), 0).await;
        locks.extend(
            section.row(implementation).ok_or_record(lock).map(|lock| (implementation, lock)),
        );
    }
    let (rounds, time) = (bench.either(10, 4), bench.ms(12, 4));
    for repetition in 0..=REPETITIONS {
        let mut sums = vec![UncontendedSlice::default(); locks.len()];
        for _ in 0..rounds {
            for index in shuffled(0..locks.len()) {
                let slice = run_uncontended(&*locks[index].1, time, TIMEOUT).await;
                let sum = &mut sums[index];
                sum.times.extend(slice.times);
                sum.errors += slice.errors;
                sum.first_error = sum.first_error.take().or(slice.first_error);
            }
        }
        // The first repetition warms up.
        if let Some(repetition) = repetition.checked_sub(1) {
            for ((implementation, _), sum) in locks.iter().zip(&sums) {
                let row = section.row(implementation);
                row.record("p50", repetition, quantile(&sum.times, 0.5));
                row.record("p99", repetition, quantile(&sum.times, 0.99));
                row.add_uncontended_errors(sum);
            }
        }
    }
    section.in_units_of("p50", unit.0, unit.1);
    bench.end(section);
    Ok(())
}
