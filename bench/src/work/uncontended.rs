//! One lock, that nobody else wants.

use std::time::Duration;

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::figures::quantile;
use crate::make::{Lock, Make, Outcome, fresh};
use crate::report::{Better, Section};
use crate::slice::{Alone, alone};

/// Longer than anything takes that works.
const PATIENCE: Duration = Duration::from_secs(3);

/// Measures lock and release, in units of what one of the makes takes.
pub(crate) async fn run(
    bench: &mut Bench,
    section: Section,
    makes: &[Make],
    unit: (&str, &str),
) -> Outcome<()> {
    let mut section =
        section.column("p50", "p50 µs", Better::Low).column("p99", "p99 µs", Better::Neither);
    bench.begin(&mut section).await?;
    let mut locks: Vec<(&Make, Box<dyn Lock>)> = Vec::new();
    for make in makes {
        let lock = make.lock(&fresh("alone"), 0).await;
        locks.extend(section.row(make).worked(lock).map(|lock| (make, lock)));
    }
    let (rounds, time) = (bench.either(10, 4), bench.ms(12, 4));
    for repetition in 0..=REPETITIONS {
        let mut sums = vec![Alone::default(); locks.len()];
        for _ in 0..rounds {
            for place in shuffled(0..locks.len()) {
                let slice = alone(&*locks[place].1, time, PATIENCE).await;
                let sum = &mut sums[place];
                sum.times.extend(slice.times);
                sum.errors += slice.errors;
                sum.first_error = sum.first_error.take().or(slice.first_error);
            }
        }
        // The first one is only to get warm.
        if let Some(repetition) = repetition.checked_sub(1) {
            for ((make, _), sum) in locks.iter().zip(&sums) {
                let row = section.row(make);
                row.put("p50", repetition, quantile(&sum.times, 0.5));
                row.put("p99", repetition, quantile(&sum.times, 0.99));
                row.wrongs_of_alone(sum);
            }
        }
    }
    section.in_units_of("p50", unit.0, unit.1);
    bench.end(section);
    Ok(())
}
