//! Many tasks, each on a lock of its own.

use crate::bench::{Bench, REPETITIONS, rotated};
use crate::make::{Make, Outcome, fresh};
use crate::report::{Better, Section};
use crate::slice::{self, Contend, Plan};

/// Measures locks per second, with 64 tasks.
pub(crate) async fn run(
    bench: &mut Bench,
    section: Section,
    makes: &[Make],
    unit: (&str, &str),
) -> Outcome<()> {
    let mut section = section.column("rate", "locks per second", Better::High);
    bench.begin(&mut section).await?;
    // Those with connections open them now, and not while it counts.
    for make in makes {
        one(bench, make, 64).await?;
    }
    for repetition in 0..REPETITIONS {
        for make in rotated(makes, repetition) {
            let slice = one(bench, make, 64).await?;
            let row = section.row(make);
            row.put("rate", Some(slice.turns_per_second()));
            row.wrongs_of(&slice);
        }
    }
    section.in_units_of("rate", unit.0, unit.1);
    bench.end(section);
    Ok(())
}

/// The same, over numbers of tasks and keys.
pub(crate) async fn scaling(
    bench: &mut Bench,
    section: Section,
    makes: &[Make],
    points: &[usize],
) -> Outcome<()> {
    let mut section = section;
    for point in points {
        section = section.column(&point.to_string(), &format!("{point} keys"), Better::High);
    }
    bench.begin(&mut section).await?;
    for repetition in 0..REPETITIONS {
        for point in points {
            for make in rotated(makes, repetition) {
                let slice = one(bench, make, *point).await?;
                let row = section.row(make);
                row.put(&point.to_string(), Some(slice.turns_per_second()));
                row.wrongs_of(&slice);
            }
        }
    }
    bench.end(section);
    Ok(())
}

async fn one(bench: &Bench, make: &Make, tasks: usize) -> Outcome<slice::Slice> {
    let locks = make.many(&fresh("many"), tasks.min(make.most_tasks)).await?;
    let (warm, time) = (bench.ms(80, 20), bench.ms(350, 40));
    let plan = Plan { contend: Contend::Each, readers: 0, warm, time, meter: None };
    Ok(slice::run(locks, plan).await)
}
