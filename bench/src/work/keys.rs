//! Many tasks, each on a lock of its own.

use std::time::Duration;

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::load::Meter;
use crate::make::{Make, Outcome, fresh};
use crate::report::{Better, Section};
use crate::slice::{self, Contend, Plan, Slice};

/// Measures locks per second, with 64 tasks. With a server: what they cost it.
pub(crate) async fn run(
    bench: &mut Bench,
    section: Section,
    makes: &[Make],
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
    // Those with connections open them now, and not while it counts. Whoever cannot will say so then.
    for make in makes {
        let _ = one(make, 64, (warm, warm), None).await;
    }
    for repetition in 0..REPETITIONS {
        for make in shuffled(makes) {
            let slice = one(make, 64, (warm, time), meter).await;
            let row = section.row(make);
            let Some(slice) = row.worked(slice) else { continue };
            row.put("rate", repetition, Some(slice.turns_per_second()));
            let each = |seconds: f64| seconds * 1e6 / slice.all_turns().max(1) as f64;
            row.put("client", repetition, Some(each(slice.client)));
            row.put("server", repetition, slice.server.map(each));
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
            for make in shuffled(makes) {
                let row = section.row(make);
                if make.most_tasks < *point {
                    row.note(make.too_few(*point));
                    continue;
                }
                // Connections are opened before it warms up.
                let slice = one(make, *point, (bench.ms(30, 10), bench.ms(120, 25)), None).await;
                let Some(slice) = row.worked(slice) else { continue };
                row.put(&point.to_string(), repetition, Some(slice.turns_per_second()));
                row.wrongs_of(&slice);
            }
        }
    }
    bench.end(section);
    Ok(())
}

async fn one(
    make: &Make,
    tasks: usize,
    (warm, time): (Duration, Duration),
    meter: Option<Meter<'_>>,
) -> Outcome<Slice> {
    let locks = make.many(&fresh("many"), tasks).await?;
    let meter = meter.map(|meter| (meter, make));
    let plan = Plan { contend: Contend::Each, readers: 0, warm, time, meter };
    Ok(slice::run(locks, plan).await)
}
