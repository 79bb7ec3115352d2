//! Readers and, now and then, a writer.

use crate::bench::{Bench, REPETITIONS, shuffled};
use crate::make::{Make, Outcome, fresh};
use crate::report::{Better, Section};
use crate::slice::{self, Contend, Plan};

/// How many tasks there are.
pub(crate) const TASKS: usize = 32;

/// Measures how many readers and writers get through in a second: 95 of 100 turns read.
pub(crate) async fn run(bench: &mut Bench, section: Section, makes: &[Make]) -> Outcome<()> {
    let mut section = section
        .column("reads", "readers per second", Better::High)
        .column("writes", "writers per second", Better::Neither)
        .column("longest", "longest wait, ms", Better::Neither);
    bench.begin(&mut section).await?;
    for repetition in 0..REPETITIONS {
        for make in shuffled(makes) {
            let row = section.row(make);
            let locks = make.locks(&fresh("readers"), TASKS).await;
            let Some(locks) = row.worked(locks) else { continue };
            let (warm, time) = (bench.ms(80, 15), bench.ms(400, 40));
            let plan = Plan { contend: Contend::One, readers: 95, warm, time, meter: None };
            let slice = slice::run(locks, plan).await;
            let seconds = slice.took.as_secs_f64();
            row.put("reads", repetition, Some(slice.reads as f64 / seconds));
            row.put("writes", repetition, Some((slice.all_turns() - slice.reads) as f64 / seconds));
            row.put("longest", repetition, Some(slice.longest.as_secs_f64() * 1e3));
            row.wrongs_of(&slice);
        }
    }
    bench.end(section);
    Ok(())
}
